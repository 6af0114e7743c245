"""``kd-serve``: a student behind HTTP. Heavy imports wait until there is one."""

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.run.open import open_run
from kd.run.request import Request
from kd.storage.of_weights import export_at, on_stderr
from kd.storage.run_urls import run_at

if TYPE_CHECKING:
    from kd.ship.cascade_rule import CascadeRule
    from kd.ship.export.base import Runtime
    from kd.ship.export.manifest import ExportManifest

HELP = """\
kd-serve: a run's student, or an export of it, behind HTTP (extra serve; ONNX Runtime inside).

  kd-serve RUN_FOLDER [int8=true] [teacher=true] [key=value ...]
  kd-serve EXPORT     an export's folder, or its model.onnx

  POST /predict   multipart files, JSON {"images": ["BASE64", ...]}, or a picture; ?top=5
  /v2/...         KServe v2 (Open Inference Protocol): the model 'student', its tensor 'pictures'
  /ping, /invocations   SageMaker
  GET /           a page to drop a picture on
  GET /healthz, /readyz, /metrics

  host=127.0.0.1  port=8000        port=0 takes a free one
  hosts=NAME,NAME                  names by which clients reach it, beside localhost and addresses; * is any
  threads=0                        of the model; 0: all cores
  max_batch=16  max_wait_ms=2      pictures a batch, and how long one waits for company
  queue=512                        pictures, and requests, at a time: more are answered 503, Retry-After
  timeout_s=30                     of a request
  max_upload_mb=16  max_pixels=40000000  max_pictures=32     of a request, of a picture, of a request
  teacher=true                     the run's teacher answers too (in torch)
  defer=true                       beside teacher=true: it answers only the pictures of which the student is not sure, by
                                   the threshold of kd-eval cascade=true; defer=0.1: for that share of the pictures.
                                   /metrics counts who answered, and kd_deferral_alert is 1 when the share has changed

A run without an ONNX export is exported first (kd-export). SIGTERM finishes what was taken and ends with status 0.
"""

KEYS = ("host", "hosts", "port", "threads", "teacher", "int8", "defer")


def run(request: Request) -> int | None:
    """Serves a student until SIGTERM or Ctrl-C; returns the exit status, None to show the help.

    The port is taken before the models are loaded and tried out; the address is printed once all are ready.

    Raises:
        UserError: a missing extra, no such model, a wrong key, a port in use, or a model that fails on a trial picture.
    """
    if "help" in request.flags or len(request.rest) != 1:
        return None
    from kd.run.own_keys import positive, take_all, truth, whole_number
    from kd.ship.export.base import need

    for package in ("starlette", "uvicorn", "python_multipart", "prometheus_client"):
        need(package, "serve", "kd-serve")
    from kd.ship.export.onnx import open_model
    from kd.ship.serving.answers import try_out
    from kd.ship.serving.app import Server
    from kd.ship.serving.bodies import Limits
    from kd.ship.serving.run import bind, serve

    options = take_all(request, *KEYS, *(f.name for f in fields(Limits)))
    numbers: dict[str, Any] = {}
    for f in fields(Limits):
        if f.name not in options:
            continue
        if f.type in (int, "int"):
            numbers[f.name] = whole_number(options, f.name, 1)
        else:
            numbers[f.name] = positive(
                f.name, options[f.name], below=1e9, or_zero=f.name == "max_wait_ms"
            )
    limits = Limits(**numbers)
    threads = whole_number(options, "threads", 0, low=0)
    port = whole_number(options, "port", 8000, low=0)
    host = options.get("host", "127.0.0.1")
    if not host:  # a socket would take it for all addresses of the machine
        raise UserError("host: must be an address to listen at, got nothing (0.0.0.0 is any)")
    request.rest = [str(run_at(request.rest[0]))]  # fetched once
    rule = _rule(request, options)
    # first, as an export takes long and a port that is taken would be reported after it
    listening = bind(host, port)
    try:
        file = _model(request, truth(options, "int8"))
        manifest, student = open_model(file, threads)
        models = {"student": student}
        if truth(options, "teacher"):
            models["teacher"] = _teacher(request, manifest)
        for name, model in models.items():
            try_out(model, manifest, str(file) if name == "student" else "teacher: it")
        listed = f"{options.get('host', '')},{options.get('hosts', '')}".lower().split(",")
        names = {name.strip() for name in listed} - {""}
        if rule is not None and manifest.task != "classification":
            raise UserError(f"defer: needs one class a picture, {file} has {manifest.task}")
        server = Server(manifest, models, limits, names, rule)
        host, port = listening.getsockname()[:2]
        if ":" in host:  # IPv6
            host = f"[{host}]"
        print(f"kd-serve: {manifest.arch} on http://{host}:{port}", flush=True)
        serve(server, listening)
    finally:
        listening.close()
    print("kd-serve: stopped", flush=True)
    return 0


def _model(request: Request, int8: bool) -> Path:
    """The ONNX file that the command line's first word means: an export's own, or that of a run.

    Args:
        request: its first word is an export's folder, a ``.onnx`` file, or a run's folder, which is exported where it has
            no such export of its present weights.
        int8: a run's int8 export is wanted.

    Raises:
        UserError: neither is there, ``int8`` of what is an export already, or an export that differs too much to be kept.
    """
    place = Path(request.rest[0])
    exported = place / "model.onnx"
    if place.is_file() and place.suffix == ".onnx":
        exported = place
    if exported.is_file():
        if int8:
            raise UserError(f"int8: has no effect on an export, {exported} is served as it is")
        return exported
    name = "onnx_int8" if int8 else "onnx"
    file = export_at(place, name, on_stderr)
    if file is None:
        from kd.commands import export

        if not (place / "student.safetensors").is_file():
            raise UserError(f"{place}: neither a finished run nor an ONNX export was found")
        settings = ["to=onnx"]
        if int8:
            settings.append("int8=true")
        settings += request.overrides
        if export.run(replace(request, rest=[str(place)], overrides=settings)):
            raise UserError(f"{place}: its export was not kept, see above")
        file = export_at(place, name, on_stderr)
        assert file is not None, "it was kept"
    return file


def _rule(request: Request, options: dict[str, str]) -> "CascadeRule | None":
    """When the teacher is asked, as ``kd-eval cascade=true`` has measured it; None without ``defer`` or with ``false``.

    Args:
        request: names the run, by its folder.
        options: the command's own keys, as text; ``defer`` is ``true`` or a share of the pictures.

    Raises:
        UserError: ``defer`` without ``teacher=true``, or as of :func:`kd.ship.cascade_rule.read_rule`.
    """
    from kd.run.own_keys import truth
    from kd.ship.cascade_rule import read_rule

    if options.get("defer", "false") == "false":
        return None
    if not truth(options, "teacher"):
        raise UserError("defer: has no effect without teacher=true")
    return read_rule(Path(request.rest[0]), options["defer"])


def _teacher(request: Request, manifest: "ExportManifest") -> "Runtime":
    """What runs the teacher of the run that the request names, on pictures in the manifest's layout.

    Raises:
        UserError: an export, or a run without a teacher that has a classifier and answers for any picture here.
    """
    if not (Path(request.rest[0]) / "config.yaml").is_file():
        raise UserError("teacher: needs the run's folder; an export has no teacher")
    opened = open_run(request.rest[0], request)
    teacher = opened.teacher_runtime(manifest.layout)
    if teacher is None:
        raise UserError(
            f"teacher: {opened.folder} has no teacher with a classifier that can be run here"
        )
    return teacher

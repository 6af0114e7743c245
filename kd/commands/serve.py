"""``kd-serve``: a student behind HTTP. Heavy imports wait until there is one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from kd.config.kinds import Range
from kd.errors import UserError
from kd.run.open import export_of, open_run
from kd.run.options import CommandOptions
from kd.run.request import Request
from kd.ship.serving.limits import Limits
from kd.storage.run_urls import run_at

if TYPE_CHECKING:
    from kd.ship.finished import FinishedRun

HELP = """\
  kd-serve RUN_FOLDER [int8=true] [teacher=true] [key=value ...]
  kd-serve EXPORT     an export's folder, or its model.onnx

  POST /predict   multipart files, JSON {"images": ["BASE64", ...]}, or a picture; ?top=5
  /v2/...         KServe v2 (Open Inference Protocol): the model 'student', its tensor 'pictures'
  /ping, /invocations   SageMaker
  GET /           a page to drop a picture on
  GET /healthz, /readyz, /metrics

{options}

A run without an ONNX export is exported first (kd-export). SIGTERM finishes what was taken and ends with status 0.
"""


class ServedModel(CommandOptions):
    """What is served, and where."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {"defer": ("teacher=true",)}
    OTHERS = "data"
    WORDS = (1, 1)
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is any."""
    port: Annotated[int, Range(">= 0 and < 65536")] = 8000
    """0 takes a free one."""
    hosts: str = ""
    """Names by which clients reach it, with commas, beside localhost and addresses; * is any."""
    threads: Annotated[int, Range(">= 0")] = 0
    """Of the model; 0: all cores."""
    int8: bool = False
    """Serves the run's int8 export."""
    teacher: bool = False
    """The run's teacher answers too (in torch): under /v2, and in /predict with defer=true."""
    defer: bool = False
    """Beside teacher=true: it answers the pictures of which the student is not sure, by the threshold of kd-eval
    cascade=true. /metrics counts who answered."""


class ServeOptions(Limits, ServedModel):
    """What ``kd-serve`` is given."""


OPTIONS = ServeOptions


def run(request: Request, options: ServeOptions) -> int:
    """Serves a student until SIGTERM or Ctrl-C; returns the exit status.

    The port is taken before the models are loaded and tried out; the address is printed once all are ready.

    Raises:
        UserError: a missing extra, no such model, a wrong key, a port in use, or a model that fails on a trial picture.
    """
    from kd.ship.export.base import need

    for package in ("starlette", "uvicorn", "python_multipart", "prometheus_client"):
        need(package, "serve", "kd-serve")
    from kd.ship.export.formats.onnx import open_model
    from kd.ship.serving.answers import try_out
    from kd.ship.serving.app import Server
    from kd.ship.serving.run import bind, serve

    request.rest = [str(run_at(request.rest[0]))]  # fetched once
    from kd.ship.cascade_rule import read_rule

    rule = read_rule(Path(request.rest[0])) if options.defer else None
    # both first, as an export takes long: what is refused or taken would be reported after it
    with_teacher = _run_with_teacher(request, options) if options.teacher else None
    listening = bind(options.host, options.port)
    try:
        file = _model(request, options.int8)
        manifest, student = open_model(file, options.threads)
        models = {"student": student}
        if with_teacher is not None:
            teacher = with_teacher.teacher_runtime()
            assert teacher is not None, "it was looked for"
            models["teacher"] = teacher
        for name, model in models.items():
            try_out(model, manifest, str(file) if name == "student" else "teacher: it")
        host = options.host if "host" in options.given else ""
        listed = f"{host},{options.hosts}".lower().split(",")
        names = {name.strip() for name in listed} - {""}
        server = Server(manifest, models, options, names, rule)
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
    if not (place / "student.safetensors").is_file():
        raise UserError(f"{place}: neither a finished run nor an ONNX export was found")
    return export_of(place, request, "onnx", int8)


def _run_with_teacher(request: Request, options: ServeOptions) -> "FinishedRun":
    """The run that the request names, whose teacher answers too.

    Raises:
        UserError: an export, or a run without a teacher that has a classifier and answers for any picture here; with
            ``defer`` also a run of another kind of answers than one class a picture.
    """
    if not (Path(request.rest[0]) / "config.yaml").is_file():
        raise UserError("teacher: needs the run's folder; an export has no teacher")
    opened = open_run(request.rest[0], request)
    if options.defer and opened.kind != "classification":
        raise UserError(f"defer: needs one class a picture, {opened.folder} has {opened.kind}")
    if not opened.teacher_takes_pictures:
        raise UserError(
            f"teacher: {opened.folder} has no teacher with a classifier that can be run here"
        )
    return opened

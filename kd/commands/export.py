"""``kd-export``: a run's student in a format that other programs run. Heavy imports wait until there is a run."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.run.request import Request
from kd.run.trust import remember_made
from kd.storage.elsewhere import json_of, text_of

if TYPE_CHECKING:
    from kd.commands._finished import FinishedRun
    from kd.ship.export.base import Format, Limits
    from kd.ship.export.manifest import Layout

HELP = """\
kd-export: a run's student for other programs, compared with the student in torch before it is kept.

  kd-export RUN_FOLDER to=FORMAT [int8=true] [out=FOLDER] [key=value ...]

  to=onnx           model.onnx: uint8 pictures in, preprocessing inside, any batch (extra export)
  to=openvino       model.xml, model.bin: likewise (extra openvino)
  to=torch_export   model.pt2: likewise, for torch.export.load
  to=triton         a model repository for NVIDIA Triton
  to=sagemaker      model.tar.gz for SageMaker's Triton images
  to=hub            config.json, model.safetensors: timm.create_model("local-dir:FOLDER", pretrained=True)
  to=backbone       backbone.safetensors: the layers below the classifier, for detectors built on timm
  int8=true         int8 weights and activations, calibrated on training pictures (extra openvino)
  layout=nhwc       or nchw: of the pictures that go in
  out=FOLDER        default: RUN_FOLDER/export/FORMAT, with _int8 behind it
  calibrate=300     so many training pictures calibrate
  min_agreement=99.9    of a float export with the student, in per cent of validation's answers
  max_drop=1            what an int8 export may lose of the main metric, in points
  data.key=...      as for kd-train: data.source.root=DIR, ...

An export that loses more is not kept: exit status 1. The comparison goes to RUN_FOLDER/export/export.json either way.
"""

KEYS = ("to", "int8", "out", "layout", "calibrate", "min_agreement", "max_drop")


def run(request: Request) -> int:
    """Exports, compares, keeps."""
    if "help" in request.flags or len(request.rest) != 1:
        print(HELP, end="")
        return 0 if "help" in request.flags else 2
    from kd.run.own_keys import take, truth, whole_number
    from kd.run.quiet import quiet_libraries
    from kd.ship.export.formats import find_format

    quiet_libraries()
    own = take(request, *KEYS)
    if "to" not in own:
        raise UserError("to: say which format, to=onnx for example (kd-export --help lists them)")
    int8, calibrate, limits = truth(own, "int8"), whole_number(own, "calibrate", 300), _limits(own)
    layout = _layout(own.get("layout", "nhwc"))
    kind = find_format(own["to"])
    if int8 and not kind.quantises:
        raise UserError(f"int8: to={own['to']} has no int8 (to=onnx, openvino, triton, sagemaker have)")
    kind.check(f"to={own['to']}", int8)  # before torch is loaded
    from kd.commands._finished import open_run

    opened = open_run(request, KEYS)
    name = own["to"].rpartition(".")[2] + ("_int8" if int8 else "")
    out = Path(own["out"]) if "out" in own else opened.folder / "export" / name
    if "out" in own and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} is there already and is no empty folder")
    problem, found = _export(opened, kind, own["to"], int8, layout, calibrate, limits, out)
    _remember(opened.folder, name, found)
    _print(found)
    if problem:
        print(f"kd-export: not kept: {problem}", file=sys.stderr)
        return 1
    print(f"written to {out}")
    return 0


def _limits(own: dict[str, str]) -> "Limits":
    from kd.ship.export.base import Limits

    numbers = {}
    for key, default in (("min_agreement", 99.9), ("max_drop", 1.0)):
        try:
            numbers[key] = float(own.get(key, default))
            if not 0 <= numbers[key] <= 100:
                raise ValueError
        except ValueError:
            raise UserError(f"{key}: must be a number between 0 and 100, got '{own[key]}'") from None
    return Limits(numbers["min_agreement"] / 100, numbers["max_drop"] / 100)


def _layout(name: str) -> "Layout":
    if name == "nchw":
        return "nchw"
    if name == "nhwc":
        return "nhwc"
    raise UserError(f"layout: must be nhwc or nchw, got '{name}'")


def _export(
    opened: "FinishedRun",
    kind: "Format",
    to: str,
    int8: bool,
    layout: "Layout",
    calibrate: int,
    limits: "Limits",
    out: Path,
) -> tuple[str, dict[str, Any]]:
    """Writes beside ``out`` first; what fails to agree, or anything that goes wrong, leaves nothing there."""
    from kd.ship.export.base import Job
    from kd.ship.export.gate import compare, failure, size_mb
    from kd.ship.export.manifest import FILE

    manifest = opened.manifest(to, layout, int8)
    if kind.features:
        manifest = replace(manifest, task="features", classes=[])
    job = Job(
        opened.prepared(layout), opened.model, manifest, opened.folder / "student.safetensors",
        partial(opened.calibration, layout, calibrate),
    )  # fmt: skip
    batches = opened.data.eval_dataloader("val")  # before the work: missing pictures are reported at once
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(mkdtemp(prefix=".export-", dir=out.parent))
    try:
        file = kind.write(job, part)
        if not (part / FILE).exists():
            manifest.write(part)
        runtime = kind.open(file)
        measured = compare(kind.reference(job), runtime, manifest, batches, opened.task)
        where = str(out / file.relative_to(part))
        found = {"to": to, "int8": int8, "layout": layout, "file": where, "size_mb": size_mb(part), **measured}
        problem = failure(found, int8, limits)
        if not problem:
            part.chmod(0o755)
            if out.exists():
                shutil.rmtree(out)
            part.replace(out)
            if to == "torch_export":
                remember_made(Path(where).read_bytes())
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return problem, {**found, "kept": not problem}


def _remember(folder: Path, name: str, found: dict[str, Any]) -> None:
    """The newest comparison of each export, in ``export/export.json``."""
    from kd.storage.checkpoints import write_whole

    file = folder / "export" / "export.json"
    file.parent.mkdir(exist_ok=True)
    known = json_of(text_of(file)) if file.is_file() else {}
    text = json.dumps({**known, name: found}, indent=2) + "\n"
    write_whole(file, lambda opened: opened.write(text.encode()))


def _print(found: dict[str, Any]) -> None:
    rows = [
        ("largest difference", f"{found['max_difference']:.3g}"),
        ("mean difference", f"{found['mean_difference']:.3g}"),
        ("agreement", f"{found['agreement']:.2%} of {found['pictures']} pictures"),
    ]
    if "metric" in found:
        rows += [
            (f"{found['metric']} of the student", f"{found['student']:.2%}"),
            ("of the export", f"{found['export']:.2%}"),
        ]
    rows += [
        ("one picture", f"student {found['student_ms']:.2f} ms, export {found['export_ms']:.2f} ms"),
        ("size", f"{found['size_mb']:.1f} MB"),
    ]
    for name, value in rows:
        print(f"{name:<22} {value}")

"""``kd-export``: a run's student in a format that other programs run. Heavy imports wait until there is a run."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kd.errors import UserError
from kd.run.claim import claim_of
from kd.run.open import open_run
from kd.run.own_keys import out_path, take_all, truth, whole_number
from kd.run.request import Request
from kd.run.run import Run
from kd.run.trust import remember_made
from kd.storage.of_weights import EXPORT
from kd.storage.run_urls import finished_at

if TYPE_CHECKING:
    from kd.ship.export.base import Format
    from kd.ship.export.gate import Fp16
    from kd.ship.export.manifest import Layout

HELP = """\
kd-export: a run's student for other programs, compared with the student in torch before it is kept.

  kd-export RUN_FOLDER to=FORMAT [int8=true] [out=FOLDER] [key=value ...]

  to=onnx           model.onnx: uint8 pictures in, preprocessing inside, any batch (extra export)
  to=openvino       model.xml, model.bin: likewise (extra openvino)
  to=executorch     model.pte: likewise, for phones and small machines, batches up to max_batch (extra executorch)
  to=litert         model.tflite (TensorFlow Lite): likewise, one picture at a time (extra litert)
  to=coreml         model.mlpackage: an RGB image in, one at a time; written anywhere, runs on macOS (extra coreml)
  to=torch_export   model.pt2: likewise, for torch.export.load
  to=triton         a model repository for NVIDIA Triton
  to=sagemaker      model.tar.gz for SageMaker's Triton images
  to=hub            config.json, model.safetensors: timm.create_model("local-dir:FOLDER", pretrained=True)
  to=backbone       backbone.safetensors: the layers below the classifier, for detectors built on timm or by your builder
  to=cascade        student, teacher (each a model.onnx) and the rule of kd-eval cascade=true, with ten lines of Python
  int8=true         int8 weights and activations, calibrated on training pictures (extra openvino, or the format's own)
  fp16=true         FP16 weights and activations, proven on the CPU; layers that overflow stay in float32
  fp16=all          FP16 without exception, for machines that have nothing else; refused where a layer overflows
  layout=nhwc       or nchw: layout of the input pictures
  out=FOLDER        default: RUN_FOLDER/export/FORMAT, with _int8 or _fp16 after it
  max_batch=8       largest batch that to=executorch plans memory for
  calibrate=300     number of training pictures for the calibration
  min_agreement=99.9    per cent of the validation pictures for which a float export must answer as the student does
  margin=1              instead of these: kept only if the export is shown to lose less than a point, by the same pictures
  confidence=0.95       of that certificate
  max_drop=1            points of the main metric that an int8 export may lose
  data.key=...      as for kd-train: data.source.root=DIR, ...

An export that loses more is not kept: exit status 1. The comparison goes to RUN_FOLDER/export/export.json either way.
"""

QUANTISE = "to=onnx, openvino, executorch, litert, triton, sagemaker"
"""Formats that have int8, for the message."""
HALVES = "to=onnx, openvino, executorch, coreml, triton, sagemaker"
"""Formats that have FP16, for the message."""

KEYS = (
    "to",
    "int8",
    "fp16",
    "out",
    "layout",
    "calibrate",
    "max_batch",
    "min_agreement",
    "max_drop",
    "margin",
    "confidence",
)


def run(request: Request) -> int | None:
    """Exports a run's student and compares it with the student in torch; prints the comparison.

    The comparison is written to ``export/export.json`` in the run, whether the export is kept or not.

    Returns:
        The exit status: 1 where the export differs too much and is not kept; None to show the help.

    Raises:
        UserError: a wrong key, a missing extra, no finished run, or an ``out`` that is in use.
    """
    if "help" in request.flags or len(request.rest) != 1:
        return None
    from kd.ship.export.base import ExportLimits, find_format

    options = take_all(request, *KEYS)
    if "to" not in options:
        raise UserError("to: must name a format, to=onnx for example (kd-export --help lists them)")
    name = options["to"]
    int8 = truth(options, "int8")
    fp16 = _fp16(options)
    calibrate = whole_number(options, "calibrate", 300)
    max_batch = whole_number(options, "max_batch", 8)
    min_agreement = _share(options, "min_agreement", 99.9)
    claim = claim_of(options)
    for key in ("min_agreement", "max_drop"):
        if claim is not None and key in options:
            raise UserError(f"{key}: has no effect beside margin=, which decides alone")
    certificate = None if claim is None else claim.wanted
    limits = ExportLimits(min_agreement, _share(options, "max_drop", 1), certificate)
    layout = _layout(options)
    out = out_path(options)
    export_format = find_format(name)
    if claim is not None and export_format.features:
        raise UserError(f"margin: needs a classifier, and to={name} has none")
    _check_abilities(export_format, name, int8, fp16)
    _check_effects(export_format, name, int8, options)
    request.rest = [str(finished_at(request.rest[0], "config.yaml"))]  # fetched once
    export_format.check(f"to={name}", int8)  # before torch is loaded
    _check_pictures(request, int8)
    opened = open_run(request.rest[0], request)
    _check_bound(int8, opened.kind, options)
    from kd.ship.export.gate import ExportRequest, export, lines

    export_request = ExportRequest(
        name, export_format, int8, layout, calibrate, limits, fp16, max_batch
    )
    if out is None:
        out = opened.folder / EXPORT / export_request.name
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} exists already and is not an empty folder")
    problem, comparison = export(opened, export_request, out, remember_made)
    print("\n".join(lines(comparison)))
    if problem:
        print(f"kd-export: not kept: {problem}", file=sys.stderr)
        return 1
    print(f"written to {out}")
    return 0


def _check_pictures(request: Request, int8: bool) -> None:
    """Refuses pictures that an export can't be compared on, as far as a list of them shows it, before torch is loaded.

    Args:
        request: names the run, and settings that are changed; keeps the source in ``listed``, so that its pictures are not
            listed again.
        int8: the export is calibrated on training pictures.
    """
    from kd.run.pictures import list_splits, source_key

    config, _ = Run.settings(Path(request.rest[0]) / "config.yaml", request)
    splits = list_splits(config, ["val", "train"] if int8 else ["val"])
    if splits is not None:
        request.listed[source_key(config)] = splits.source


def _check_abilities(export_format: "Format", name: str, int8: bool, fp16: "Fp16") -> None:
    """Raises a UserError where a format lacks what was requested, or int8 and FP16 both were.

    Args:
        export_format: whose abilities count.
        name: of the format, as it was typed.
        int8: whether an export in int8 is wanted.
        fp16: how much of it in FP16; "": nothing.
    """
    if int8 and not export_format.quantises:
        raise UserError(f"int8: to={name} has no int8 ({QUANTISE} have)")
    if fp16 and not export_format.halves:
        raise UserError(f"fp16: to={name} has no FP16 ({HALVES} have)")
    if fp16 and int8:
        raise UserError("fp16: an export is in FP16 or in int8, not both")


def _check_effects(
    export_format: "Format", name: str, int8: bool, options: Mapping[str, str]
) -> None:
    """Raises a UserError where a key was given that changes nothing.

    Args:
        export_format: whose keys count.
        name: of the format, as it was typed.
        int8: whether an export in int8 is wanted.
        options: the command's own keys, as text.
    """
    if "max_batch" in options and not export_format.bounded:
        raise UserError(
            f"max_batch: has no effect with to={name} (to=executorch has a largest batch)"
        )
    if "layout" in options and not export_format.has_layout:
        raise UserError(f"layout: has no effect with to={name}, whose file holds weights alone")
    if int8:
        return
    if "calibrate" in options:
        raise UserError("calibrate: has no effect without int8=true")
    if "max_drop" in options:
        raise UserError(
            "max_drop: has no effect without int8=true (min_agreement= bounds other exports)"
        )


def _check_bound(int8: bool, kind: str, options: Mapping[str, str]) -> None:
    """Raises a UserError where the other of the two bounds decides about an int8 export.

    ``max_drop`` decides about a metric, ``min_agreement`` about features.

    Args:
        int8: whether the export is in int8.
        kind: what the student answers; ``features`` have no metric.
        options: the command's own keys, as text.
    """
    if not int8:
        return
    if kind == "features" and "max_drop" in options:
        raise UserError("max_drop: has no effect on features, which min_agreement= bounds")
    if kind != "features" and "min_agreement" in options:
        raise UserError(
            "min_agreement: has no effect with int8=true, where max_drop= bounds the loss of accuracy"
        )


def _fp16(options: dict[str, str]) -> "Fp16":
    """What ``fp16=`` requests: ``all`` layers, ``mixed`` (``true``: those that do not overflow), or "" for none."""
    if options.get("fp16", "").lower() == "all":
        return "all"
    if options.get("fp16", "false").lower() not in ("true", "false"):
        raise UserError(f"fp16: must be true, false or all, got '{options['fp16']}'")
    return "mixed" if truth(options, "fp16") else ""


def _layout(options: dict[str, str]) -> "Layout":
    """The memory order of the pictures that the export takes, by ``layout=``: ``nhwc``, the default, or ``nchw``."""
    layout = options.get("layout", "nhwc")
    if layout == "nhwc":
        return "nhwc"
    if layout == "nchw":
        return "nchw"
    raise UserError(f"layout: must be nhwc or nchw, got '{layout}'")


def _share(options: dict[str, str], key: str, default: float) -> float:
    """Per cent in an option, as a share in 0..1.

    Args:
        options: the command's own keys, as text.
        key: of the number.
        default: in per cent, where it is not given.
    """
    try:
        percent = float(options.get(key, default))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise UserError(f"{key}: must be a number between 0 and 100, got '{options[key]}'")
    return percent / 100

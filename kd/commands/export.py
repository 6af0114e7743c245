"""``kd-export``: a run's student in a format that other programs run. Heavy imports wait until there is a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from kd.errors import UserError
from kd.report.tables import Result
from kd.run.open import make_export
from kd.run.options import CommandOptions
from kd.run.pictures import list_once
from kd.run.request import Request
from kd.run.run import Run
from kd.ship.export.settings import ExportSettings
from kd.storage.of_weights import EXPORT
from kd.storage.run_urls import finished_at
from kd.storage.student_metadata import student_metadata_in

HELP = """\
  kd-export RUN_FOLDER to=FORMAT [int8=true] [out=FOLDER] [key=value ...] [--json]

{options}
  data.key=...       as for kd-train: data.source.root=DIR, ...

An export that loses more is not kept: exit status 1. The comparison goes to RUN_FOLDER/export/export.json either way.
"""


class ExportOptions(ExportSettings, CommandOptions):
    """What ``kd-export`` is given."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {
        "calibrate": ("int8=true",),
        "max_drop": ("int8=true",),
    }
    EXCLUDES: ClassVar[Mapping[str, Sequence[str]]] = {"fp16": ("int8",)}
    OTHERS = "data"
    WORDS = (1, 1)
    out: Path | None = None
    """Default: RUN_FOLDER/export/FORMAT, with _int8 or _fp16 after it."""


OPTIONS = ExportOptions
FLAGS = ("--json",)
"""Options that take no value."""


def usage(_request: Request) -> str:
    """The help of ``kd-export``, with a line for each format; :mod:`kd.command_line` prints it in place of ``HELP``."""
    from kd.ship.export.base import about_formats

    lines = [f"  {f'to={name}':<17} {about}\n" for name, about in about_formats().items()]
    return f"{HELP}\nFormats:\n{''.join(lines)}"


def run(request: Request, options: ExportOptions) -> Result:
    """Exports a run's student and compares it with the student in torch.

    The comparison is written to ``export/export.json`` in the run, whether the export is kept or not.

    Returns:
        The comparison; with a problem where the export differs too much and is not kept.

    Raises:
        UserError: a wrong key, a missing extra, no finished run, or an ``out`` that is in use.
    """
    from kd.ship.export.base import refuse_foreign_format

    if options.to is None:
        raise UserError("to: must name a format, to=onnx for example (kd-export --help lists them)")
    refuse_foreign_format(options.to)
    folder = finished_at(request.rest[0], "config.yaml")
    request.rest = [str(folder)]  # fetched once
    _check_bound(student_metadata_in(folder / "student.safetensors").gives_features, options)
    out = options.out or folder / EXPORT / options.name
    if options.out and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} exists already and is not an empty folder")
    config, _ = Run.settings(folder / "config.yaml", request)
    list_once(request, config, ["val", "train"] if options.int8 else ["val"])
    _check_abilities(options)
    from kd.report.evaluated import exports_parts

    problem, comparison = make_export(folder, request, options, out)
    parts = exports_parts({options.name: comparison})
    if problem:
        return Result(comparison, parts, problem=f"not kept: {problem}")
    return Result(comparison, parts, files=[out])


def _check_abilities(options: ExportOptions) -> None:
    """Raises a UserError where a format lacks what was requested, or is unknown."""
    from kd.ship.export.base import find_format, formats_with

    export_format = find_format(str(options.to))
    for key, ability, what in (("int8", "quantises", "int8"), ("fp16", "halves", "FP16")):
        is_wanted = getattr(options, key)
        if is_wanted and not getattr(export_format, ability):
            able = ", ".join(formats_with(ability))
            raise UserError(f"{key}: to={options.to} has no {what} (to={able} have)")


def _check_bound(gives_features: bool, options: ExportOptions) -> None:
    """Raises a UserError where the other of the two bounds decides about an int8 export: ``max_drop`` about a metric,
    ``min_agreement`` about features, which have none.
    """
    if not options.int8:
        return
    if gives_features and "max_drop" in options.given:
        raise UserError("max_drop: has no effect on features, which min_agreement= bounds")
    if not gives_features and "min_agreement" in options.given:
        raise UserError(
            "min_agreement: has no effect with int8=true, where max_drop= bounds the loss of accuracy"
        )

"""``kd-export``: a run's student in a format that other programs run. Heavy imports wait until there is a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kd.errors import UserError
from kd.report.tables import Result
from kd.run.open import open_run
from kd.run.options import CommandOptions
from kd.run.request import Request
from kd.run.run import Run
from kd.run.trust import remember_made
from kd.ship.export.settings import ExportSettings
from kd.storage.of_weights import EXPORT
from kd.storage.run_urls import finished_at
from kd.storage.student_metadata import student_metadata_in

if TYPE_CHECKING:
    from kd.ship.export.base import Format

HELP = """\
kd-export: a run's student for other programs, compared with the student in torch before it is kept.

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


def usage() -> str:
    """The help of ``kd-export``, with a line for each format; :mod:`kd.cli` prints it in place of ``HELP``."""
    from kd.ship.export.base import about_formats

    lines = [f"  {f'to={name}':<17} {about}\n" for name, about in about_formats().items()]
    return f"{HELP}\nFormats:\n{''.join(lines)}"


def _formats_that(ability: str) -> str:
    """The formats with an ability, for a message."""
    from kd.ship.export.base import formats_with

    return ", ".join(formats_with(ability))


def run(request: Request, options: ExportOptions) -> Result:
    """Exports a run's student and compares it with the student in torch.

    The comparison is written to ``export/export.json`` in the run, whether the export is kept or not.

    Returns:
        The comparison; with a problem where the export differs too much and is not kept.

    Raises:
        UserError: a wrong key, a missing extra, no finished run, or an ``out`` that is in use.
    """
    from kd.ship.export.base import find_format, refuse_foreign_format

    if options.to is None:
        raise UserError("to: must name a format, to=onnx for example (kd-export --help lists them)")
    refuse_foreign_format(options.to)
    folder = finished_at(request.rest[0], "config.yaml")
    request.rest = [str(folder)]  # fetched once
    _check_bound(student_metadata_in(folder / "student.safetensors").gives_features, options)
    out = options.out
    if out is None:
        out = folder / EXPORT / options.name
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} exists already and is not an empty folder")
    _check_pictures(request, options.int8)
    export_format = find_format(options.to)
    _check_abilities(export_format, options)
    export_format.check(f"to={options.to}", options.int8)  # before torch is loaded
    opened = open_run(str(folder), request)
    from kd.report.evaluated import exports_parts
    from kd.ship.export.gate import export

    problem, comparison = export(opened, options, export_format, out, remember_made)
    parts = exports_parts({options.name: comparison})
    if problem:
        return Result(comparison, parts, problem=f"not kept: {problem}")
    return Result(comparison, parts, files=[out])


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


def _check_abilities(export_format: "Format", options: ExportOptions) -> None:
    """Raises a UserError where a format lacks what was requested."""
    name = options.to
    if options.int8 and not export_format.quantises:
        raise UserError(f"int8: to={name} has no int8 (to={_formats_that('quantises')} have)")
    if options.fp16 and not export_format.halves:
        raise UserError(f"fp16: to={name} has no FP16 (to={_formats_that('halves')} have)")


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

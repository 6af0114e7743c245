"""A finished run's folder, opened to use its student. Neither torch nor Lightning is imported before it is found."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.run.request import Request
from kd.run.run import Run
from kd.run.trust import remember_made
from kd.ship.export.settings import ExportSettings
from kd.storage.of_weights import EXPORT, export_at, on_stderr
from kd.storage.run_urls import finished_at

if TYPE_CHECKING:
    from kd.ship.finished import FinishedRun


def open_run(place: str, request: Request | None = None) -> "FinishedRun":
    """A finished run. Its student's file says what the student and its task are.

    A student whose classifier nothing has trained comes without it, and without classes. Of ``config.yaml`` nothing is
    built but the data, and the settings of teachers where one is measured; both when they are first used.

    Args:
        place: the run's folder, or a URL, which is fetched.
        request: a command line whose settings (``data.*``, ``model.teacher.*``) count before the run's; None: none.

    Raises:
        UserError: no finished run there, or settings or a student's file that name code which is not trusted.
    """
    folder = finished_at(place, "config.yaml")
    from kd.run.build import data_of, student_in, task_in, teacher_specs
    from kd.run.streams import quiet_libraries
    from kd.ship.finished import FinishedRun
    from kd.storage.student_metadata import student_metadata_in

    quiet_libraries()
    given = request or Request()
    file = folder / "student.safetensors"
    config, trusted = Run.settings(folder / "config.yaml", given)
    model, preprocess, classes = student_in(trusted.of(file))
    if classes and student_metadata_in(file).gives_features:
        model.reset_classifier(0)  # type: ignore[operator]
        classes = []
    return FinishedRun(
        folder,
        config,
        model,
        preprocess,
        classes,
        task=task_in(trusted.of(file)),
        load_teachers=lambda: teacher_specs(config, trusted),
        load_data=lambda: data_of(config, trusted, given.listed),
    )


def make_export(
    folder: Path, request: Request, wanted: ExportSettings, out: Path
) -> tuple[str, dict[str, Any]]:
    """Exports a run's student, compared with the student in torch (:func:`kd.ship.export.gate.export`).

    Args:
        folder: of a finished run.
        request: as of :func:`open_run`.
        wanted: the format, and what shapes the export.
        out: folder of the export.

    Returns:
        Why the export is not kept, "" where it is; and the comparison.

    Raises:
        UserError: no such format, a missing extra, an operator that the format lacks, or no pictures to compare on.
    """
    from kd.ship.export.base import find_format

    kind = find_format(str(wanted.to))
    kind.check(f"to={wanted.to}", wanted.int8)  # before torch is loaded
    opened = open_run(str(folder), request)
    from kd.ship.export.gate import export

    return export(opened, wanted, kind, out, remember_made)


def export_of(folder: Path, request: Request, to: str, int8: bool = False) -> Path:
    """The file or folder of a run's export, which is made (minutes) where it has none of the student's present weights.

    Args:
        folder: of a finished run.
        request: as of :func:`open_run`.
        to: the format.
        int8: whether it is quantised.

    Raises:
        UserError: the export needs an extra, was refused, since it differs from the student, or there are no pictures to
            compare it on.
    """
    wanted = ExportSettings(to=to, int8=int8)
    file = export_at(folder, wanted.name, on_stderr)
    if file is not None:
        return file
    problem, _ = make_export(folder, request, wanted, folder / EXPORT / wanted.name)
    if problem:
        raise UserError(f"{folder}: its export was not kept: {problem}")
    file = export_at(folder, wanted.name, on_stderr)
    assert file is not None, "it was kept"
    return file

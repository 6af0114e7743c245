"""How faithful a run's student is, on its page: what its best validation has compared, or its newest has counted."""

from kd.report.evaluated import class_parts, fidelity_parts
from kd.report.records import RunRecords
from kd.report.tables import Part
from kd.storage.elsewhere import json_of, text_of


def faithful(run: RunRecords) -> list[Part]:
    """The parts of ``fidelity.json``; without that file what the run's validations have counted."""
    file = run.folder / "fidelity.json"
    if not file.is_file():
        return _counted(run)
    try:
        return fidelity_parts(json_of(text_of(file)))
    except (ValueError, KeyError, TypeError, AttributeError):
        run.notes.append(f"{file.name} can't be read")
        return []


def _counted(run: RunRecords) -> list[Part]:
    """The classes of the student alone, as its newest validation has counted; [] where it has counted nothing."""
    newest = run.newest_confusion
    if newest is None:
        return []
    rows = []
    for name, count, right in zip(run.classes, newest["counts"], newest["right"], strict=False):
        if right is not None:
            rows.append({"name": name, "count": count, "student": right})
    confusions = []
    for true_id, called_id, times in newest["pairs"]:
        confusions.append((run.classes[true_id], run.classes[called_id], times, None))
    counts = dict(zip(run.classes, newest["counts"], strict=False))
    title = f"Each class's accuracy in epoch {newest['epoch'] + 1}"
    return class_parts(title, rows, "pictures", counts, confusions)

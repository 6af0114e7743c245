"""The labels that a teacher disputes (``kd-eval disputed=true``), with pictures, for people to look at."""

from kd.report.charts import JPEG, Section, gallery
from kd.report.records import RunRecords
from kd.report.terminal import disputed_line
from kd.storage.elsewhere import mapping_of

FILE = "disputed.json"


def disputed(run: RunRecords) -> list[Section]:
    """The section; none where nothing was looked for, or nothing found."""
    found = mapping_of(run.folder / FILE)
    try:
        line = disputed_line(found)
        items = [_item(example) for example in found["examples"]]
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        if found:
            run.notes.append(f"{FILE} can't be read")
        return []
    if not items:
        return []
    note = f"{line}. The least likely first; all are in disputed_labels.csv. A dispute is not yet an error: look."
    return [gallery("Labels to look at", items, note=note)]


def _item(example: dict[str, object]) -> Section:
    """A picture with its label and what its neighbours in the features say."""
    image = str(example["image"])
    if not image.startswith(JPEG):
        raise ValueError("no picture")
    lines = []
    for key, title in (("label", "label"), ("suggested", "rather")):
        name = example[key]
        probability = float(str(example[f"p_{key}"]))
        lines.append([title, f"{name} {probability:.0%}"])
    for model in ("teacher", "student"):
        if model in example:
            lines.append([f"the {model}", str(example[model])])
    name = str(example["picture"])
    return {"image": image, "name": name, "lines": lines, "wide": False}

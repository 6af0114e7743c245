"""The labels that a teacher disputes (``kd-eval disputed=true``), with pictures, for people to look at."""

from kd.report.charts import JPEG, Section, gallery
from kd.report.records import RunRecords
from kd.report.terminal import disputed_line
from kd.storage.of_weights import DISPUTED, read_of_weights


def disputed(run: RunRecords) -> list[Section]:
    """The section of the run's page, in a list; [] where no labels were checked, or none are disputed.

    A file that can't be read is named in the run's notes.
    """
    found = read_of_weights(run.folder, DISPUTED, run.notes.append)
    try:
        line = disputed_line(found)
        items = [_item(example) for example in found["examples"]]
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        if found:
            run.notes.append(f"{DISPUTED} can't be read")
        return []
    if not items:
        return []
    note = f"{line}. The least likely first; all are in disputed_labels.csv. A dispute is not yet an error: look."
    return [gallery("Labels to look at", items, note=note)]


def _item(example: dict[str, object]) -> Section:
    """A picture of ``disputed.json`` as an item of the gallery: its label, the suggested one, and what the models answer.

    Raises:
        KeyError, ValueError: a key is missing, a probability is no number, or the picture is no JPEG of the page.
    """
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

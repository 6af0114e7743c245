"""``kd-eval disputed=true``: the labels that a teacher disputes, in the terminal, a table and the report."""

import csv
import os
from pathlib import Path

import pytest

from kd.data.sources import FoodTagMini
from kd.report.tables import Gallery, results_of
from tests._files import read_json
from tests._helpers import Command

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture()
def mislabelled(tmp_path: Path) -> tuple[Path, set[str]]:
    """A folder of drawn pictures, each tenth below another class than its own, and the names of these."""
    source = FoodTagMini(train_per_class=16, val_per_class=8)
    split = source.load("train")
    classes = list(source.classes)
    wrong = set()
    for number, class_id in enumerate(split.targets):
        label = classes[class_id]
        name = f"{label}-{number}.jpg"
        if number % 10 == 0:
            label = classes[(class_id + 7) % len(classes)]
            wrong.add(f"{label}/{name}")
        folder = tmp_path / "pictures" / label
        folder.mkdir(parents=True, exist_ok=True)
        os.link(split.name(number), folder / name)
    return tmp_path / "pictures", wrong


def test_wrong_labels_of_drawn_pictures_come_first(
    mislabelled: tuple[Path, set[str]], tmp_path: Path, prints: Command
) -> None:
    """32 of 320 labels are wrong; the recipe's teacher, which was not trained on these, judges."""
    folder, wrong = mislabelled
    out = tmp_path / "figures.json"
    words = [str(RECIPES / "foodtag_teacher.safetensors"), f"folder={folder}", "disputed=true"]
    assert "are disputed: a fit of the student's features" in prints("eval", [*words, f"out={out}"])
    found = read_json(out)["disputed"]
    listed = ["/".join(Path(row["picture"]).parts[-2:]) for row in found["labels"]]
    assert len(wrong) == 32
    assert sum(name in wrong for name in listed[:32]) >= 24
    assert sum(name in wrong for name in listed) >= 28
    assert found["disputed"] == len(listed)
    of_labels = [row["p_label"] for row in found["labels"]]
    assert of_labels == sorted(of_labels)


def test_a_run_has_table_and_page(with_test: Path, prints: Command) -> None:
    root = f"data.source.root={with_test.parent / 'data'}"
    out = prints("eval", [str(with_test), "disputed=true", root])
    assert "labels of train" in out
    assert "disputed_labels.csv" in out
    assert "are disputed: a fit of the teacher's features" in out
    found = read_json(with_test / "eval_train.json")["disputed"]
    with (with_test / "disputed_labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["picture"] for row in rows] == [row["picture"] for row in found["labels"]]
    assert found["disputed"] == len(rows)
    parts = results_of(with_test, print)["disputed"]
    shown = [len(part.items) for part in parts if isinstance(part, Gallery)]
    assert shown == ([min(24, len(rows))] if rows else [])

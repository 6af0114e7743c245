"""Numbers that belong to classes: read, checked, carried with the student, shown with its predictions."""

import csv
from pathlib import Path

import numpy as np

from kd.cli import export_main, predict_main, train_main
from kd.data.class_facts import read_class_facts
from kd.data.info import DataInfo
from kd.ship.export.manifest import FILE, manifest_of
from kd.ship.serving.answers import answer
from tests._files import read_json
from tests._helpers import CLASSES, draw_folder, write_recipe


def test_fields_that_are_missing_or_empty_are_not_known(tmp_path: Path) -> None:
    """Rows of a spreadsheet are as long as its longest one; classes may be missing."""
    file = tmp_path / "facts.csv"
    file.write_text("class,kcal,more,,\napple,52,,,\n,,,,\n cake ,,3\n")
    facts = read_class_facts(str(file), DataInfo(CLASSES))
    assert facts == {"kcal": [52.0, None, None, None], "more": [None, None, 3.0, None]}


def test_predictions_and_exports_have_the_facts(tmp_path: Path) -> None:
    photos, file = draw_folder(tmp_path / "photos"), tmp_path / "facts.csv"
    file.write_text("class,kcal\napple,52\nbread,250\ncake,370\ndates,")
    recipe = write_recipe(tmp_path / "food.yaml", photos, None, recipe="food")
    assert train_main([f"recipe={recipe}", f"data.class_facts={file}", "trainer.max_epochs=1"]) == 0
    run = tmp_path / "runs" / "food" / "000"
    assert (
        predict_main([str(run), str(photos / "val"), f"out={tmp_path / 'found.csv'}", "top=1"]) == 0
    )
    rows = list(csv.DictReader((tmp_path / "found.csv").open()))
    assert list(rows[0]) == ["file", "label_1", "p_1", "kcal_of_label", "kcal_expected"]
    known = {"apple": "52.0", "bread": "250.0", "cake": "370.0", "dates": ""}
    assert all(row["kcal_of_label"] == known[row["label_1"]] for row in rows)
    assert all(52 <= float(row["kcal_expected"]) <= 370 for row in rows)
    assert export_main([str(run), "to=hub"]) == 0
    manifest = manifest_of(read_json(run / "export" / "hub" / FILE))
    assert answer(np.array([0.0, 9.0, 0.0, 0.0]), manifest, 1)["facts"]["kcal"]["of_label"] == 250.0
    assert read_json(run / "export" / "hub" / "manifest.json")["facts"]["kcal"][3] is None

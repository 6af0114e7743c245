"""The page's part about the student's faithfulness, as a reader of its data sees it."""

import json
import re
import shutil
from pathlib import Path

from kd.cli import main
from kd.report.evaluated import fidelity_parts
from kd.report.records import read_run
from kd.report.tables import Table
from tests._files import read_json, write_json


def test_the_page_shows_numbers_classes_and_pictures(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    fidelity = read_json(run / "fidelity.json")
    evil = "</script><script>alert(1)</script>"
    for row in fidelity["per_class"]:
        row["name"] = evil if row["name"] == "apple" else row["name"]
    write_json(run / "fidelity.json", fidelity)
    assert main("report", [str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<script>alert" not in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    classes = next(s for s in data["sections"] if s.get("title", "").startswith("Each class's"))
    assert classes["columns"][2:4] == ["teacher", "student"]
    assert evil in [row[0] for row in classes["rows"]]
    losses = [float(row[3][:-1]) - float(row[2][:-1]) for row in classes["rows"]]
    assert losses == sorted(losses)
    numbers = next(s for s in data["sections"] if s.get("title") == "How faithful the student is")
    assert ["the same answer", f"{fidelity['agreement']:.1%}"] in numbers["rows"]
    pictures = [item for s in data["sections"] if s["kind"] == "pictures" for item in s["items"]]
    assert pictures and all(len(item["image"]) < 12_000 for item in pictures)
    assert {line[0] for line in pictures[0]["lines"]} == {"is", "teacher", "student"}
    curve = next(s for s in data["sections"] if s.get("title") == "Share right by confidence")
    assert (
        set(curve["series"]) == {"teacher", "student", "as sure as right"} and len(curve["x"]) == 15
    )


def test_the_largest_confusions_are_named() -> None:
    names = [f"c{i}" for i in range(300)]
    content = {
        "kind": "classification", "pictures": 3000, "score": "accuracy", "ece": {"student": 0.1}, "reliability": {},
        "per_class": [{"name": n, "count": 10, "student": 0.5} for n in names],
        "confusions": [{"is": f"c{i}", "called": f"c{i + 1}", "student": 9, "teacher": 0} for i in range(40)],
    }  # fmt: skip
    _, classes, pairs = fidelity_parts(content)  # no calibration: it was not measured
    assert isinstance(classes, Table) and isinstance(pairs, Table)
    assert len(classes.rows) == 200 and "300 classes occur" in classes.note
    assert list(classes.rows[0]) == ["c0", 10, "50.0%", "c1 90%"]
    assert list(pairs.rows[0]) == ["c0", "c1", 9, "90%", None] and len(pairs.rows) == 20


def test_a_torn_file_is_noted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "fidelity.json").write_text('{"kind": ')
    run = read_run(tmp_path)
    assert run.fidelity == {} and "fidelity.json can't be read" in run.notes

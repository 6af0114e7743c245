"""The page's part about the student's faithfulness, as a reader of its data sees it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from kd.cli import main
from kd.report.faithful import faithful
from kd.report.records import read_run


def test_the_page_shows_numbers_classes_and_pictures(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    fidelity = json.loads((run / "fidelity.json").read_text())
    evil = "</script><script>alert(1)</script>"
    for row in fidelity["per_class"]:
        row["name"] = evil if row["name"] == "apple" else row["name"]
    (run / "fidelity.json").write_text(json.dumps(fidelity))
    assert main("report", [str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<script>alert" not in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    kinds = {section["kind"]: section for section in data["sections"]}
    bars = kinds["bars"]
    assert bars["models"] == ["teacher", "student"] and evil in [row[0] for row in bars["rows"]]
    losses = [row[2] - row[1] for row in bars["rows"]]
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


def test_the_heat_map_names_the_largest_pairs(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(50)]
    content = {
        "kind": "classification", "pictures": 500, "score": "accuracy", "ece": {"student": 0.1}, "reliability": {},
        "per_class": [{"name": n, "count": 10, "student": 0.5} for n in names],
        "confusions": [{"is": f"c{i}", "called": f"c{i + 1}", "student": 40 - i, "teacher": 0} for i in range(40)],
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "fidelity.json").write_text(json.dumps(content))
    sections = faithful(read_run(tmp_path))
    assert not [s for s in sections if s["title"] == "Share right by confidence"]  # not measured
    (classes,) = [s for s in sections if s["kind"] == "bars"]
    matrix = classes["matrix"]
    assert len(matrix["names"]) == 20 and "c0 called c1 40 times" in classes["note"]
    assert "20 more classes are better" in classes["note"]  # none has a teacher to lose to
    assert classes["mistakes"][0] == "400% taken for c1"
    row, column = matrix["names"].index("c0"), matrix["names"].index("c1")
    assert matrix["cells"][row][column] == pytest.approx(4.0) and matrix["cells"][row][row] == 0.5


def test_a_torn_file_is_noted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "fidelity.json").write_text('{"kind": ')
    run = read_run(tmp_path)
    assert faithful(run) == [] and "fidelity.json can't be read" in run.notes

"""``kd-eval``: models side by side, bare weights files, a line a picture."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import timm
import torch

from kd.cli import main


def test_a_run_and_weights_files_side_by_side(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own file again is the run's student; another model differs by points, on the same pictures."""
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "other.pth")
    table = tmp_path / "answers.csv"
    words = [str(finished), str(finished / "student.safetensors"), str(tmp_path / "other.pth")]
    assert main("eval", [*words, "arch=resnet10t", "img_size=32", f"out={table}"]) == 0
    out = capsys.readouterr().out
    assert main("eval", [*words, "arch=resnet10t", "img_size=32", f"out={tmp_path}/all.json"]) == 0
    run, same, other = json.loads((tmp_path / "all.json").read_text())
    assert (run["student"], run["teacher"], run["fidelity"]) == (
        same["student"],
        same["teacher"],
        same["fidelity"],
    )
    assert json.loads((finished / "eval_val.json").read_text()) == run
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == run["pictures"] == 16
    for name, result in zip(words, (run, same, other), strict=True):
        right = [row["label"] == row[f"{name} student"] for row in rows]
        assert sum(right) / 16 == pytest.approx(result["student"]["acc1"])
        assert all(0.25 <= float(row[f"{name} student_p"]) <= 1 for row in rows)
        agreed = [row[f"{name} student"] == row[f"{name} teacher"] for row in rows]
        assert sum(agreed) / 16 == pytest.approx(result["student"]["agreement"])
    assert "alone is right on 0 of 16 pictures" in out
    assert "other.pth - " in out
    gap = 100 * (other["student"]["acc1"] - run["student"]["acc1"])
    assert f"{gap:+.1f}" in out


def test_a_weights_file_alone_needs_only_pictures(
    finished: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """timm's folder knows its model, input and classes; the figures are those of the run on these pictures."""
    val = finished.parents[2] / "data" / "val"
    items = [f"folder={val}", "data.img_size=40"]
    assert main("eval", [str(finished / "student"), *items, f"out={tmp_path}/bare.json"]) == 0
    assert main("eval", [str(finished), f"folder={val}"]) == 0
    bare, run = (
        json.loads(f.read_text())
        for f in (tmp_path / "bare.json", finished / "eval_folder_val.json")
    )
    assert bare["student"]["acc1"] == run["student"]["acc1"]
    assert "teacher" not in bare
    capsys.readouterr()
    assert main("eval", [str(finished / "student")]) == 2
    assert "needs pictures: folder=DIR" in capsys.readouterr().err
    (tmp_path / "x.pth").write_bytes(b"")
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "x.pth")
    for items, told in (
        ([], "arch: "),
        (["arch=resnet10"], "arch: timm has no model 'resnet10'; did you mean"),
        (["arch=resnet18"], "checkpoint: "),
    ):
        assert main("eval", [str(tmp_path / "x.pth"), f"folder={val}", *items]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"kd-eval: {told}")
        assert err.count("\n") == 1


def test_what_a_source_notes_is_printed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished.parents[2] / "data" / "val", tmp_path / "mine")
    (tmp_path / "mine" / "nothing").mkdir()
    assert main("eval", [str(finished), f"folder={tmp_path / 'mine'}"]) == 0
    notes = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "'nothing'" in line or "nothing (" in line
    ]
    assert len(notes) == 1


def test_what_can_not_be_compared_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for items, told in (
        ([str(tmp_path)], "is no finished run: it has no config.yaml"),
        ([str(finished), "arch=resnet18"], "arch: is for a weights file"),
        ([str(finished), "recipe=foodtag_vit"], "recipe: "),
        ([str(finished), "out=answers.txt"], "out: must be FILE.csv or FILE.json"),
        ([str(finished), "splt=val"], "did you mean 'split'?"),
        ([str(finished), "split=val", "folder=x"], "folder: can't be given together with split="),
    ):
        assert main("eval", items) == 2
        assert told in capsys.readouterr().err

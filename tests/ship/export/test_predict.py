"""kd-predict on pictures, damaged ones, scenes, and with a student that has no classifier."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from kd.cli import main
from kd.data.pictures import decode
from kd.data.transforms import EvalView
from tests._helpers import CLASSES, Command


def pictures_of(run: Path) -> Path:
    return run.parents[2] / "data" / "val"


def by_timm(run: Path, files: list[Path]) -> torch.Tensor:
    """Probabilities by plain timm, from the file's own metadata."""
    with safe_open(run / "student.safetensors", "pt") as opened:
        meta = opened.metadata()
    model = timm.create_model(meta["arch"], **json.loads(meta["kwargs"])).eval()
    model.load_state_dict(load_file(run / "student.safetensors"))
    view = EvalView((40, 40), 0.875)
    x = torch.stack([view(decode(f.read_bytes())) for f in files]).float()
    x = torch.nn.functional.interpolate(x, (32, 32), mode="bilinear", antialias=True).round() / 255
    mean, std = (torch.tensor(json.loads(meta[key])).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.inference_mode():
        return model((x - mean) / std).softmax(1)


def test_labels_are_those_of_plain_timm_in_every_format(finished: Path, tmp_path: Path) -> None:
    folder = pictures_of(finished)
    files = sorted(folder.rglob("*.jpg"))
    expected = by_timm(finished, files)
    for suffix in ("csv", "jsonl"):
        out = tmp_path / f"labels.{suffix}"
        assert (
            main("predict", [str(finished), str(folder), f"out={out}", "top=2", "device=cpu"]) == 0
        )
        text = out.read_text()
        if suffix == "csv":
            rows = [
                (r["file"], r["label_1"], float(r["p_1"]))
                for r in csv.DictReader(text.splitlines())
            ]
        else:
            entries = [json.loads(line) for line in text.splitlines()]
            assert all(len(e["labels"]) == 2 for e in entries)
            rows = [(e["file"], e["labels"][0]["label"], e["labels"][0]["p"]) for e in entries]
        assert [name for name, _, _ in rows] == [str(f) for f in files]
        assert [CLASSES.index(label) for _, label, _ in rows] == expected.argmax(1).tolist()
        np.testing.assert_allclose([p for _, _, p in rows], expected.amax(1).numpy(), atol=2e-3)


def test_damaged_pictures_are_named_and_left_out(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = sorted(pictures_of(finished).rglob("*.jpg"))[0]
    (tmp_path / "good.jpg").write_bytes(good.read_bytes())
    (tmp_path / "cut.jpg").write_bytes(good.read_bytes()[:200])
    assert main("predict", [str(finished), str(tmp_path / "*.jpg")]) == 0
    told = capsys.readouterr()
    assert f"left out {tmp_path / 'cut.jpg'}:" in told.err and "1 pictures, 1 left out" in told.err
    assert [line.split(":")[0] for line in told.out.splitlines()] == [str(tmp_path / "good.jpg")]
    out = tmp_path / "none.csv"
    assert main("predict", [str(finished), str(tmp_path / "cut.jpg"), f"out={out}"]) == 1
    assert not out.exists()


def test_a_run_without_a_student(tmp_path: Path, refusal: Command) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for command in (
        ["predict", str(tmp_path), str(tmp_path / "a.png")],
        ["export", str(tmp_path), "to=hub"],
    ):
        assert f"{tmp_path} is no finished run: it has no student.safetensors" in refusal(
            command[0], command[1:]
        )

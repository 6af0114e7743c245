"""Runs of the tiny pair in this process, and what they leave."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kd.cli import eval_main, train_main
from kd.report.records import RunRecords, read_run
from kd.storage.checkpoints import newest_whole
from tests._files import read_json


def run(recipe: Path, *items: str) -> Path:
    """Trains in this process and returns the run folder."""
    before = set(run_folders(recipe))
    assert train_main([f"recipe={recipe}", *items]) == 0
    (made,) = set(run_folders(recipe)) - before
    return made


def run_folders(recipe: Path) -> list[Path]:
    return sorted((recipe.parent / "runs" / "tiny").glob("[0-9]*"))


def run_of(recipe: Path) -> Path:
    """The folder of the first run of the tiny pair's recipe."""
    return recipe.parent / "runs" / "tiny" / "000"


def newest_run(recipe: Path) -> RunRecords:
    """The records of the newest run of the tiny pair's recipe."""
    return read_run(run_folders(recipe)[-1])


def summary_of(folder: Path) -> dict[str, Any]:
    """A run's ``summary.json``."""
    found: dict[str, Any] = read_json(folder / "summary.json")
    return found


def losses(folder: Path) -> dict[int, float]:
    """train/loss by step, as stored."""
    with (folder / "metrics.csv").open() as file:
        return {
            int(row["step"]): float(row["train/loss"])
            for row in csv.DictReader(file)
            if row["train/loss"]
        }


def student_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student.safetensors")


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def assert_same_runs(a: Path, b: Path) -> None:
    """Two runs have the same losses and left the same student, to the last bit."""
    assert losses(a) == losses(b)
    assert_same(student_of(a), student_of(b))


def resumed(folder: Path | str, *items: str) -> None:
    """Goes on with a run in this process."""
    assert train_main([f"resume={folder}", *items]) == 0


def evaluated(folder: Path) -> dict[str, Any]:
    """What kd-eval finds of a run, on its validation pictures."""
    assert eval_main([str(folder)]) == 0
    found: dict[str, Any] = read_json(folder / "eval_val.json")
    return found


def callback(path: str, **arguments: Any) -> str:
    """The word that adds a callback by its class path."""
    return f"trainer.callbacks+={json.dumps({'class_path': path, 'init_args': arguments})}"


def disturb(name: str, **arguments: Any) -> str:
    """That adds one of :mod:`tests._stop`."""
    return callback(f"tests._stop.{name}", **arguments)


def assert_good(folder: Path, *steps: int) -> None:
    """The newest checkpoint is of this step (or one of these), and of numbers."""
    file, damaged = newest_whole(folder / "checkpoints")
    assert file is not None
    assert not damaged
    content = torch.load(file, weights_only=True)
    assert content["global_step"] in steps
    assert all(math.isfinite(float(v.float().sum())) for v in content["state_dict"].values())

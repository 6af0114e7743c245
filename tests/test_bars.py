"""Progress bars end at their totals: a total is what will really be read, also in short runs and of few pictures."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kd.cli import main
from kd.progress import WholeItems, uncounted
from tests._helpers import draw_folder, write_recipe

INHERITS = [
    "model.student.inherit=true",
    "model.distill_losses.maps={class_path: MSELoss, init_args: {standardize: variance}}",
    "model.taps.maps={student: maps, teacher: maps}",
]


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Label, number and total of each bar that was closed."""
    gc.collect()  # else a bar that another test has left may be closed in this one
    closed: list[tuple[str, int, int]] = []
    close = WholeItems.close

    def noted(self: Any) -> None:
        if not self.disable:
            closed.append((self.desc, self.n, self.total))
        close(self)

    monkeypatch.setattr(WholeItems, "close", noted)
    return closed


def test_a_part_without_a_count_says_how_long_it_has_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="broken"), uncounted("converting to x", calm=0.05):
        time.sleep(0.3)
        raise ValueError("broken")
    assert "uncounted" not in [thread.name for thread in threading.enumerate()]
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "converting to x ..."
    assert others and set(others) == {"converting to x: 0 s so far"}


def check(bars: list[tuple[str, int, int]], *labels: str) -> None:
    """All bars ended at their totals, and those of these labels are among them."""
    assert [bar for bar in bars if bar[1] != bar[2]] == []
    for label in labels:
        assert any(label in desc for desc, _, _ in bars), (label, bars)


@pytest.mark.parametrize(
    "items",
    [
        [],
        ["trainer.fast_dev_run=true"],
        ["config=debug"],
        ["trainer.limit_train_batches=2", "trainer.limit_val_batches=1"],
        ["trainer.max_steps=3"],
    ],
    ids=str,
)
def test_of_a_training(
    items: list[str], tmp_path: Path, teacher: Path, bars: list[tuple[str, int, int]]
) -> None:
    """23 training and 11 validation pictures: no multiples of a batch."""
    root = draw_folder(tmp_path / "data", train=6, val=3)
    (root / "train" / "apple" / "00.jpg").unlink()
    (root / "val" / "apple" / "00.jpg").unlink()
    recipe = write_recipe(tmp_path / "tiny.yaml", root, teacher, trainer__max_epochs=1)
    assert main("train", [f"recipe={recipe}", *INHERITS, *items]) == 0
    check(bars, "checking", "preflight", "pictures for the fits", "the student's layers", "epoch 1")
    if not items:
        totals = {desc: total for desc, _, total in bars}
        assert totals["preflight: teacher on val"] == 11
        assert totals["pictures for the fits"] == 23
        assert totals["epoch 1, validation"] == 11


def test_of_the_other_commands(
    finished: Path, tmp_path: Path, bars: list[tuple[str, int, int]]
) -> None:
    run = str(finished)
    data = finished.parents[2] / "data"
    recipe = finished.parents[2] / "tiny.yaml"
    tuned = [f"recipe={recipe}", f"model.student.checkpoint={run}", "model.teacher=null"]
    tuned += ["model.distill_losses={}", f"runs_dir={tmp_path}", "trainer.max_epochs=1"]
    other = draw_folder(tmp_path / "other", train=5, val=2, classes=("one", "two", "three"))
    assert main("train", [*tuned, f"data.source.root={other}"]) == 0
    check(bars, "a first classifier")
    assert main("eval", [run]) == 0
    assert main("predict", [run, str(data / "val"), f"out={tmp_path / 'labels.csv'}"]) == 0
    assert main("export", [run, "to=torch_export", f"out={tmp_path / 'export'}"]) == 0
    answers = tmp_path / "answers"
    cached = [f"recipe={recipe}", "model.teacher.cache=on", f"model.teacher.cache_dir={answers}"]
    assert main("cache", [*cached, "data.batch_size=10"]) == 0
    assert main("pack", [f"recipe={recipe}", f"out={tmp_path / 'packed'}"]) == 0
    check(bars, "evaluating", "predicting", "comparing", "view 1/", "packing")

"""A headspace run finds what was planted: a slow input and a slow teacher."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Callback, Trainer

from kd.cli import train_main
from kd.data.sources import ImageFolder
from kd.report.records import read_run
from tests._clock import HandClock
from tests._helpers import draw_folder, save_teacher, write_recipe


class SlowTeacher(Callback):
    """The teacher's forward takes 80 ms longer."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        whole = pl_module.teacher.model.forward

        def slow(images: Any) -> Any:
            time.sleep(0.08)
            return whole(images)

        pl_module.teacher.model.forward = slow


class SlowFolder(ImageFolder):
    """Each picture takes 10 ms to read."""

    def load(self, split: str) -> Any:
        found = super().load(split)
        read = found.read

        def slow(index: int) -> bytes:
            time.sleep(0.01)
            return read(index)

        found.read = slow  # type: ignore[method-assign]
        return found


def test_a_slow_input_and_a_slow_teacher_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hand_clock: HandClock
) -> None:
    pictures = draw_folder(tmp_path / "pictures", train=30)
    teacher = save_teacher(tmp_path / "teacher.safetensors", seed=1)
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher)
    own = json.dumps({"class_path": "tests.monitor.test_headspace.SlowTeacher"})
    source = json.dumps(
        {
            "class_path": "tests.monitor.test_headspace.SlowFolder",
            "init_args": {"root": str(pictures)},
        }
    )
    items = [
        f"recipe={recipe}",
        "config=headspace",
        "trainer.limit_train_batches=12",
        f"trainer.callbacks+={own}",
        f"data.source={source}",
    ]
    assert train_main(items) == 0
    (folder,) = (tmp_path / "runs" / "tiny").glob("0*")
    found = read_run(folder).event("headspace")
    assert found is not None
    assert found["now_ms"] - found["free_input_ms"] == pytest.approx(80, abs=1)
    assert found["free_input_ms"] - found["free_input_and_teacher_ms"] == pytest.approx(80, abs=1)
    assert "headspace: a step takes" in capsys.readouterr().out
    assert "with a free teacher as well" in (folder / "report.html").read_text()


def test_a_run_that_ends_before_its_third_epoch_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one does that a limit of the monitor, or ``max_steps``, stops."""
    pictures = draw_folder(tmp_path / "pictures", train=30)
    teacher = save_teacher(tmp_path / "teacher.safetensors", seed=1)
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher)
    items = ["config=headspace", "trainer.limit_train_batches=12", "trainer.max_steps=14"]
    assert train_main([f"recipe={recipe}", *items]) == 0
    assert (
        "headspace: the run ended before its third epoch did, or was resumed: nothing"
        in capsys.readouterr().out
    )


def test_it_needs_three_epochs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_main([f"recipe={recipe}", "config=headspace", "trainer.max_epochs=2"]) == 2
    assert "trainer.max_epochs: must be 3 in a headspace run, got 2" in capsys.readouterr().err
    assert train_main([f"recipe={recipe}", "config=headspace"]) == 2
    assert "a headspace run needs 10, got 6" in capsys.readouterr().err


def test_a_cache_is_kept_out_of_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ["model.teacher.cache=on", f"model.teacher.cache_dir={tmp_path / 'answers'}"]
    assert train_main([f"recipe={recipe}", "config=headspace", *cache]) == 2
    assert "model.teacher.cache: must be off in a headspace run" in capsys.readouterr().err
    assert not (tmp_path / "answers").exists()

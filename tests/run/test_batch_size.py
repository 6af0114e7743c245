"""A smaller batch of a run with few pictures."""

import json
from pathlib import Path
from typing import Any

import pytest

from kd.cli import train_main
from kd.run.batch_size import smaller_batch
from tests._files import read_yaml
from tests._helpers import ARCH, TINY, write_recipe
from tests._runs import resumed

ONE_CPU = {"devices": 1, "num_nodes": 1, "accelerator": "cpu"}


@pytest.mark.parametrize(("size", "pictures", "expected"), [
    (64, 48, 4), (64, 500, 32), ("auto", 500, 32), (8, 64, None), (6, 48, None), (4, 20, None), (2, 10, None),
    (6, 20, 4), ("auto", 100_000, None),
])  # fmt: skip
def test_a_batch_is_lowered_for_the_steps_of_an_epoch_and_never_raised(
    size: object, pictures: int, expected: int | None
) -> None:
    assert smaller_batch({"data": {"batch_size": size}, "trainer": ONE_CPU}, pictures) == expected


@pytest.mark.parametrize(("trainer", "expected"), [
    ({}, None), ({"devices": 2}, 32), ({"devices": [0, 3]}, 32), ({"devices": "0,1"}, 32),
    ({"devices": 8}, 8), ({"devices": 2, "num_nodes": 4}, 8), ({"devices": "auto"}, None),
])  # fmt: skip
def test_all_processes_share_the_pictures_of_an_epochs_steps(
    trainer: dict[str, Any], expected: int | None
) -> None:
    config = {"data": {"batch_size": 64}, "trainer": ONE_CPU | trainer}
    assert smaller_batch(config, 1000) == expected


def test_few_pictures_make_smaller_batches_of_trained_weights(
    pictures: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An epoch of a single step would undo what the weights have learnt, those of the teacher's layers too; from random
    weights nothing changes.
    """
    recipe = write_recipe(
        tmp_path / "own.yaml", pictures, teacher, recipe="own", data__batch_size=32
    )
    arch = {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(teacher)}
    tuned = f"model.student={json.dumps(arch)}"
    line = "data.batch_size: 4 in place of 32, for 48 training pictures\n"
    for items, expected in (
        ([tuned], (True, 4)),
        ([tuned, "data.batch_size=32"], (False, 32)),
        (["model.student.inherit=true", "data.batch_size=64"], None),
        (["model.student.inherit=true"], (True, 4)),
        ([], (False, 32)),
    ):
        status = train_main([f"recipe={recipe}", "trainer.max_epochs=1", *items])
        if expected is None:
            assert status == 2
            assert "data.batch_size=32 fits" in capsys.readouterr().err
            continue
        assert status == 0
        is_said = line in capsys.readouterr().out
        config = read_yaml(tmp_path / "runs/own/latest/config.yaml")
        assert (is_said, config["data"]["batch_size"]) == expected


def test_a_resumed_fine_tuning_keeps_its_batch(
    pictures: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typed size is not typed again with ``resume=``; so it is with a teacher's training that was stopped."""
    recipe = write_recipe(tmp_path / "own.yaml", pictures, None, recipe="own")
    arch = {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(teacher)}
    items = [f"recipe={recipe}", f"model.student={json.dumps(arch)}", "data.batch_size=16"]
    assert train_main([*items, "trainer.max_epochs=1"]) == 0
    run = tmp_path / "runs" / "own" / "000"
    resumed(run, "trainer.max_epochs=2")
    assert read_yaml(run / "config.yaml")["data"]["batch_size"] == 16
    assert "in place of" not in capsys.readouterr().out

"""The start of two processes is computed by one, and is the same on both to the bit."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import kd.distill.first_weights as first_weights
import kd.module.distillation as module_module
from kd.cli import train_main
from kd.distill.inherit import inherit_together
from kd.module.start import by_the_first
from tests._forks import run_ranks, start_ranks, status_of

TWO = [
    "model.student.inherit=true",
    "trainer.devices=2",
    "data.batch_size=4",
    "trainer.max_epochs=1",
    "preflight=off",
]


def watched(items: list[str]) -> int:
    """A rank of kd-train; leaves who fits, and what all have after it, in the folder that the last item names."""
    *settings, folder = items
    rank = os.environ["LOCAL_RANK"]

    def fits(*arguments: Any) -> None:
        Path(folder, f"fit.{rank}").touch()
        inherit_together(*arguments)

    def begun(trainer: Any, student: Any, compute: Any) -> list[str]:
        torch.rand(int(rank))  # ranks that had drawn differently draw alike from here
        messages = by_the_first(trainer, student, compute)
        state = {**student.state_dict(), "random": torch.get_rng_state()}
        torch.save({"state": state, "messages": messages}, Path(folder, f"after.{rank}"))
        return messages

    with (
        mock.patch.object(first_weights, "inherit_together", fits),
        mock.patch.object(module_module, "by_the_first", begun),
    ):
        return train_main(settings)


def test_one_process_fits_and_both_have_the_same_weights(recipe: Path, tmp_path: Path) -> None:
    run_ranks([f"recipe={recipe}", *TWO, str(tmp_path)], tmp_path / "log", program=watched)
    assert sorted(file.name for file in tmp_path.glob("fit.*")) == ["fit.0"]
    first, second = (torch.load(tmp_path / f"after.{rank}") for rank in (0, 1))
    assert first["messages"] == second["messages"]
    assert first["state"].keys() == second["state"].keys()
    for name, tensor in first["state"].items():
        assert torch.equal(tensor, second["state"][name]), name


def failing(items: list[str]) -> int:
    """A rank of kd-train whose start is not possible."""

    def fails(*_: Any) -> None:
        raise ValueError("planted")

    with mock.patch.object(first_weights, "inherit_together", fails):
        return train_main(items)


def test_a_start_that_fails_ends_both(recipe: Path, tmp_path: Path) -> None:
    """With the reason, and at once: the second does not wait for weights that never come."""
    pids = start_ranks([f"recipe={recipe}", *TWO], tmp_path / "log", program=failing)
    assert [status_of(pid, timeout_s=120) for pid in pids] == [2, 2]
    assert "model.student.inherit: planted" in (tmp_path / "log.0").read_text()

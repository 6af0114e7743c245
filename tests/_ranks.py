"""Runs of two ranks over one epoch."""

import json
from pathlib import Path

import pytest
import torch

from tests._forks import start_ranks, status_of
from tests._runs import student_of, summary_of


def train(recipe: Path, *items: str, expect: int = 0, resume: Path | None = None) -> Path:
    """Two ranks over one epoch; the run folder."""
    runs = recipe.parent / "runs" / "tiny"
    number = len(list(runs.glob("[0-9]*")))
    log = recipe.parent / f"log{number}.txt"
    source = [f"resume={resume}"] if resume else [f"recipe={recipe}", "config=audit"]
    shared = [*source, "trainer.devices=2", "data.batch_size=4", "trainer.max_epochs=1",
              "trainer.precision=32-true"]  # fmt: skip
    pids = start_ranks([*shared, *items], log)
    assert {status_of(pid) for pid in pids} == {expect}, log.with_suffix(".0").read_text()
    return resume or runs / f"{number:03d}"


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"]
        for line in (folder / "records" / "samples.rank0.jsonl").read_text().splitlines()
    ]


def check_same(plain: Path, sharded: Path, of_half: float = 0.05) -> None:
    """Two ranks in shards have learnt what whole copies have, and rank 0 holds half of the optimizer's state."""
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-4)
    a, b = (student_of(folder) for folder in (plain, sharded))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    account = summary_of(sharded)["optimizer_state"]
    assert account["sharded_over"] == 2
    assert account["rank0_mb"] == pytest.approx(account["whole_mb"] / 2, rel=of_half)


HINT = [
    'model.distill_losses={"kd": {"class_path": "KDLoss"}, "hint": {"class_path": "HintLoss"}}',
    'model.taps={"hint": {"student": "norm", "teacher": "norm"}}',
]


def said(recipe: Path) -> str:
    return max(recipe.parent.glob("log*.0")).read_text()

"""Runs of two ranks over one epoch."""

import json
from pathlib import Path

from tests._forks import start_ranks, status_of


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


HINT = [
    'model.distill_losses={"kd": {"class_path": "KDLoss"}, "hint": {"class_path": "HintLoss"}}',
    'model.taps={"hint": {"student": "norm", "teacher": "norm"}}',
]


def said(recipe: Path) -> str:
    return max(recipe.parent.glob("log*.0")).read_text()

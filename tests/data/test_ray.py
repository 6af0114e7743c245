"""The data tier: other machines make the batches, and nothing of a run changes."""

import json
from pathlib import Path
from typing import Any

import pytest

from kd.cli import main

pytest.importorskip("ray")

SHORT = ("config=audit", "trainer.max_epochs=2", "data.augment.mixup=0.8", "model.student.kwargs.drop_path_rate=0.3")


def audited(runs: Path, name: str) -> list[dict[str, Any]]:
    """Epoch, step, samples and loss of every step of a run."""
    lines = (runs / "tiny" / name / "records" / "samples.rank0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_over_the_tier_is_the_run_without(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples, order and losses to the last bit; also with mixed pairs, and chance in the student."""
    runs = recipe.parent / "runs"
    assert main("train", [f"recipe={recipe}", *SHORT, "name=torch"]) == 0
    assert main("train", [f"recipe={recipe}", *SHORT, "config=remote_data", "name=tier"]) == 0
    found = audited(runs, "tier")
    assert len(found) == 12 and found == audited(runs, "torch")

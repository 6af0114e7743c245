"""What a killed run shares with one left in peace, when it goes on in the same way or in another.

``python -m scripts.bench.resume_matrix`` kills the tests' tiny pair in the middle of the second of three epochs, lets
it go on with another number of processes, strategy or optimizer; the samples and the loss of every step and the last
weights are compared with the uninterrupted run's. Writes a dated file beside this one. Two minutes on one core.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.bench.harness import options, table, write
from tests._forks import start_ranks, status_of
from tests._helpers import tiny_recipe

STEPS, KILLED_BEFORE = 18, 9
AUDIT = {"class_path": "kd.monitor.audit.Audit"}
KILL = {"class_path": "tests._stop.KillAtStep", "init_args": {"step": KILLED_BEFORE}}


class Way(NamedTuple):
    """How a run goes: its name, processes and words of the command line. The global batch is 8 in all."""

    name: str
    ranks: int
    words: str


ONE = Way("1 process", 1, "trainer.strategy=auto optim.zero=false")
WORKERS = Way("1 process, 2 loader workers", 1, "trainer.strategy=auto data.num_workers=2 optim.zero=false")  # fmt: skip
DDP = Way("2, DDP, AdamW", 2, "trainer.strategy=ddp optim.zero=false")
ZERO = Way("2, DDP, ZeRO", 2, "trainer.strategy=ddp optim.zero=true")
FSDP = Way("2, FSDP", 2, "trainer.strategy=kd.strategies.fsdp.FSDP optim.zero=false")
CASES = [
    (ONE, ONE), (WORKERS, WORKERS), (DDP, DDP), (ZERO, ZERO), (FSDP, FSDP),
    (DDP, ONE), (ONE, DDP), (ZERO, DDP), (DDP, ZERO), (ZERO, ONE), (FSDP, DDP), (DDP, FSDP), (FSDP, ONE), (ONE, FSDP),
]  # fmt: skip


def train(recipe: Path, way: Way, resume: Path | None = None, killed: bool = False) -> Path:
    """Trains, or goes on; the run's folder."""
    log = recipe.parent / "log"
    runs = recipe.parent / "runs" / "tiny"
    folder = resume or runs / f"{len(list(runs.glob('[0-9]*'))):03d}"
    callbacks = json.dumps([AUDIT, KILL] if killed else [AUDIT])
    asked = [
        f"resume={resume}" if resume else f"recipe={recipe}", *way.words.split(), f"trainer.devices={way.ranks}",
        f"data.batch_size={8 // way.ranks}", "trainer.max_epochs=3", "trainer.precision=32-true",
        f"trainer.callbacks={callbacks}", "checkpoint.every_n_steps=1",
    ]  # fmt: skip
    ends = {status_of(pid) for pid in start_ranks(asked, log, way.ranks)}
    if (ends == {0}) == killed:
        text = log.with_suffix(".0").read_text()[-3000:]
        raise SystemExit(f"{way.name}: ended with {ends}\n{text}")
    return folder


def steps(folder: Path) -> dict[int, tuple[set[int], float]]:
    """Step -> samples and mean loss over all processes."""
    found: dict[int, list[dict]] = {}
    for file in sorted((folder / "records").glob("samples.rank*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            found.setdefault(line["step"], []).append(line)
    return {
        step: (
            {i for line in lines for i in line["index"]},
            statistics.fmean(line["loss"] for line in lines),
        )
        for step, lines in found.items()
    }


def said(difference: float) -> str:
    """A largest difference, as the table says it."""
    return "to the last bit" if difference == 0 else f"to {difference:.0e}"


def row(before: Way, after: Way, whole: Path, broken: Path) -> list[str]:
    """Compares two runs."""
    want, got = steps(whole), steps(broken)
    same = sum(got[step][0] == want[step][0] for step in want if step in got)
    losses = max(abs(got[step][1] - want[step][1]) / want[step][1] for step in want)
    a, b = (
        torch.load(f / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for f in (whole, broken)
    )
    weights = max(float((a[key] - b[key]).abs().max()) for key in a)
    return [before.name, after.name, f"{same} of {STEPS} steps", said(losses), said(weights)]


def main() -> None:
    """Runs all, prints and writes the table."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = tiny_recipe(Path(folder))
        whole = {one.name: train(recipe, one) for one in (ONE, WORKERS, DDP, ZERO, FSDP)}
        for before, after in CASES:
            broken = train(recipe, before, killed=True)
            goes_on = train(recipe, after, resume=broken)
            rows.append(row(before, after, whole[before.name], goes_on))
            print(rows[-1], flush=True)
    lines = [
        f"gloo, float32, one thread a process. The tests' tiny pair (48 pictures, global batch 8, 3 epochs): killed "
        f"before step {KILLED_BEFORE + 1} of {STEPS}, gone on from the checkpoint of the step before, and compared with "
        "the run that was never killed: samples by step, the largest relative difference of a step's loss (mean over the "
        "processes), the largest difference of a weight of the student after the last step.",
        "",
        *table(["killed as", "goes on as", "same samples", "losses", "weights"], rows),
    ]
    asked = options(__doc__)
    asked.write = True
    write(asked, "resume_matrix", "Resume, from and to", lines)


if __name__ == "__main__":
    main()

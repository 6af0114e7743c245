"""What a killed run shares with one left in peace, when it goes on in the same way or in another.

``python -m scripts.bench.resume_matrix`` kills the tests' tiny pair in the middle of the second of three epochs, lets
it go on with another number of processes, strategy or optimizer; the samples and the loss of every step and the last
weights are compared with the uninterrupted run's. A second table says what each process keeps of the optimizer's state.
Writes a dated file beside this one. Two minutes on one core.
"""

import datetime
import json
import platform
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tests._forks import start_ranks, status_of
from tests._helpers import draw_folder, save_teacher, write_recipe

HERE = Path(__file__).parent
STEPS, KILLED_BEFORE = 18, 9
WIDE = "model.student.kwargs={patch_size: 8, embed_dim: 192, depth: 6, num_heads: 3}"
AUDIT = {"class_path": "kd.monitor.audit.Audit"}
KILL = {"class_path": "tests._stop.KillAtStep", "init_args": {"step": KILLED_BEFORE}}


@dataclass(frozen=True)
class Way:
    """How a run goes: its name, processes and settings. The global batch is 8 in all."""

    name: str
    ranks: int
    items: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        """As the command line takes them."""
        return [*self.items, f"trainer.devices={self.ranks}", f"data.batch_size={8 // self.ranks}"]


PLAIN = ("optim.zero=false",)
ONE = Way("1 process", 1, ("trainer.strategy=auto", *PLAIN))
WORKERS = Way(
    "1 process, 2 loader workers", 1, ("trainer.strategy=auto", "data.num_workers=2", *PLAIN)
)
DDP = Way("2, DDP, AdamW", 2, ("trainer.strategy=ddp", *PLAIN))
ZERO = Way("2, DDP, ZeRO", 2, ("trainer.strategy=ddp", "optim.zero=true"))
FSDP = Way("2, FSDP", 2, ('trainer.strategy={"class_path": "kd.strategies.fsdp.FSDP"}', *PLAIN))
CASES = [
    (ONE, ONE), (WORKERS, WORKERS), (DDP, DDP), (ZERO, ZERO), (FSDP, FSDP),
    (DDP, ONE), (ONE, DDP), (ZERO, DDP), (DDP, ZERO), (ZERO, ONE), (FSDP, DDP), (DDP, FSDP), (FSDP, ONE), (ONE, FSDP),
]  # fmt: skip


class Runs:
    """Runs of one recipe, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.recipe = write_recipe(
            folder / "tiny.yaml",
            draw_folder(folder / "pictures"),
            save_teacher(folder / "teacher.safetensors", seed=1),
        )

    def train(
        self, way: Way, *items: str, resume: Path | None = None, killed: bool = False
    ) -> Path:
        """Trains, or goes on; the run's folder."""
        runs = self.recipe.parent / "runs" / "tiny"
        folder = resume or runs / f"{len(list(runs.glob('[0-9]*'))):03d}"
        callbacks = json.dumps([AUDIT, KILL] if killed else [AUDIT])
        asked = [
            f"resume={resume}" if resume else f"recipe={self.recipe}", *way.settings, "trainer.max_epochs=3",
            "trainer.precision=32-true", f"trainer.callbacks={callbacks}", "checkpoint.every_n_steps=1", *items,
        ]  # fmt: skip
        ends = {status_of(pid) for pid in start_ranks(asked, self.log, way.ranks)}
        if (ends == {0}) == killed:
            raise SystemExit(
                f"{way.name}: ended with {ends}\n{self.log.with_suffix('.0').read_text()[-3000:]}"
            )
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


def row(before: Way, after: Way, whole: Path, broken: Path) -> str:
    """Compares two runs."""
    want, got = steps(whole), steps(broken)
    same = sum(got[step][0] == want[step][0] for step in want if step in got)
    losses = max(abs(got[step][1] - want[step][1]) / want[step][1] for step in want)
    a, b = (
        torch.load(f / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for f in (whole, broken)
    )
    weights = max(float((a[key] - b[key]).abs().max()) for key in a)
    return f"| {before.name} | {after.name} | {same} of {STEPS} steps | {said(losses)} | {said(weights)} |"


def state_row(way: Way, folder: Path) -> str:
    """What one process keeps."""
    state = json.loads((folder / "summary.json").read_text())["optimizer_state"]
    file = (folder / "checkpoints" / "last.ckpt").stat().st_size / 1e6
    share = state["rank0_mb"] / state["whole_mb"]
    return f"| {way.name} | {state['whole_mb']:.2f} | {state['rank0_mb']:.2f} | {share:.1%} | {file:.1f} |"


def main() -> None:
    """Runs all, prints and writes the tables."""
    torch.set_num_threads(1)
    today = datetime.date.today().isoformat()
    lines = [
        f"# Resume, from and to ({today})", "",
        f"torch {torch.__version__}, {platform.machine()}, gloo, float32, one thread a process. The tests' tiny pair "
        f"(48 pictures, global batch 8, 3 epochs): killed before step {KILLED_BEFORE + 1} of {STEPS}, gone on from the "
        "checkpoint of the step before, and compared with the run that was never killed: samples by step, the largest "
        "relative difference of a step's loss (mean over the processes), the largest difference of a weight of the "
        "student after the last step.", "",
        "| killed as | goes on as | same samples | losses | weights |", "|---|---|---|---|---|",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        whole = {way: runs.train(way) for way in (ONE, WORKERS, DDP, ZERO, FSDP)}
        for before, after in CASES:
            broken = runs.train(before, killed=True)
            lines.append(row(before, after, whole[before], runs.train(after, resume=broken)))
            print(lines[-1], flush=True)
        lines += [
            "", "What a process keeps of the optimizer's state (a student of width 192 and depth 6), and the "
            "checkpoint, which is whole in each case:", "",
            "| | state MB | on rank 0 MB | share | checkpoint MB |", "|---|---|---|---|---|",
        ]  # fmt: skip
        for way in (DDP, ZERO, FSDP):
            lines.append(state_row(way, runs.train(way, WIDE, "trainer.max_epochs=1")))
            print(lines[-1], flush=True)
    (HERE / f"resume_matrix_{today}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

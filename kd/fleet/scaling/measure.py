"""Short runs of a recipe with so many processes, batch and strategy, each a ``kd-train`` of its own."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.fleet.scaling.model import PARTS, ShortRun
from kd.launch.child import reason_in, start_kd_train
from kd.report.facts import Facts
from kd.report.records import RunRecords, percentile, read_run
from kd.storage.writing import appended

STRATEGIES = {
    "ddp": ["trainer.strategy=ddp", "optim.zero=false"],
    "zero": ["trainer.strategy=ddp", "optim.zero=true"],
    "fsdp": ["trainer.strategy=kd.strategies.fsdp.FSDP", "optim.zero=false"],
}
SHORT = [
    "preflight=warn", "trainer.max_epochs=1000", "trainer.num_nodes=1", "trainer.limit_val_batches=0",
    "trainer.limit_train_batches=null", "trainer.log_every_n_steps=10", "trainer.enable_progress_bar=false",
    "optim.warmup_epochs=0", "monitor.enabled=true", "monitor.interval_s=0.2", "monitor.health_every=0",
    "monitor.rules_every_s=0", 'trainer.callbacks+={"class_path": "kd.monitor.ring.Ring"}',
]  # fmt: skip
PHASES_OF = {"teacher": ("teacher",), "forward": ("student", "loss"), "backward": ("backward",),
             "rest": ("data", "h2d", "optimizer", "logging")}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One short run: ``batch`` pictures of each of ``processes`` processes."""

    strategy: str
    """A key of :data:`STRATEGIES`."""
    processes: int
    """Training processes."""
    batch: int
    """Pictures of each process."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.strategy}-{self.processes}x{self.batch}"


@dataclass
class ScalingPlan:
    """What ``kd-scale`` measures, from its command line."""

    items: list[str]
    """Command line of the run."""
    recipe: str
    """Name of the recipe."""
    folder: Path
    """Folder of the runs, logs and pages."""
    processes: list[int]
    """Counts of processes, the first 1."""
    strategies: list[str]
    """Keys of :data:`STRATEGIES`, ``ddp`` among them."""
    batch: int
    """Pictures of each process."""
    steps: int
    """Steps of each run."""
    threads: int
    """Threads of each process, on CPUs."""

    def cases(self) -> list[Case]:
        """Weak (the batch of a process stays), and strong (that of all together stays)."""
        found = [Case("ddp", 1, self.batch)]
        for count in self.processes[1:]:
            for strategy in self.strategies:
                found += [
                    Case(strategy, count, self.batch),
                    Case(strategy, count, self.batch // count),
                ]
        return found

    def run(self, case: Case) -> RunRecords:
        """Trains for a few steps in a process of its own and reads what was recorded.

        Raises:
            UserError: the run has failed; the message has its last line.
        """
        several = (
            STRATEGIES[case.strategy]
            if case.processes > 1
            else ["trainer.strategy=auto", "optim.zero=false"]
        )
        given = [
            f"runs_dir={self.folder}",
            f"name={case.name}",
            f"trainer.max_steps={self.steps}",
            f"trainer.devices={case.processes}",
            f"data.batch_size={case.batch}",
        ]
        env = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(self.threads)}
        log = self.folder / f"{case.name}.log"
        with appended(log) as out:
            process = start_kd_train(
                [*self.items, *SHORT, *several, *given],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
            )
            try:
                status = process.wait()
            finally:
                if process.poll() is None:
                    process.terminate()
        if status:
            raise UserError(f"{case.name}: {reason_in(log)} ({log})")
        return read_run(self.folder / self.recipe / case.name)


def reading(case: Case, run: RunRecords) -> ShortRun:
    """The medians of a run's steps; the first of the process, and those that start a loader, are left out."""
    facts = Facts(run)
    steps = [s["p"] for s in facts.usual_steps[1:]]
    if not steps:
        raise UserError(f"{run.folder}: no step was recorded after the first (steps=)")
    middle = {name: percentile([p.get(name, 0.0) for p in steps], 50) for p in steps for name in p}
    parts = {part: sum(middle.get(name, 0.0) for name in PHASES_OF[part]) for part in PARTS}
    lengths = [
        sum(p.get(name, 0.0) for of in (*PHASES_OF.values(), ("communication",)) for name in of)
        for p in steps
    ]
    low, half, high = (percentile(lengths, q) for q in (16, 50, 84))
    memory: dict[str, float] = run.summary.get("memory_mb") or {}
    state = sum(memory.get(name, 0.0) for name in ("student", "gradients", "optimizer"))
    return ShortRun(
        case.strategy,
        case.processes,
        case.batch,
        parts,
        middle.get("communication", 0.0),
        sent_mb=_sent_mb(facts),
        memory_mb=run.summary.get("peak_memory_mb"),
        state_mb=state or None,
        spread=(high - low) / 2 / half if half else 0.0,
    )


def _sent_mb(facts: Facts) -> float | None:
    """MB that a process of this machine sends in a step, by its network devices."""
    if len(facts.usual_steps) < 2:
        return None
    began, ended = facts.usual_steps[0]["t"], facts.usual_steps[-1]["t"]
    within = [s for s in facts.samples if began < s["t"] <= ended and "net_w" in s]
    if len(within) < 3 or facts.processes < 2:
        return None
    rate = sum(s["net_w"] for s in within) / len(within) * 2**20 / 1e6
    return (
        rate
        * (ended - began)
        / (facts.usual_steps[-1]["step"] - facts.usual_steps[0]["step"])
        / facts.processes
    )


def ring_times(runs: Sequence[RunRecords]) -> list[tuple[int, float, float]]:
    """``(processes, MB, ms)`` of the all-reduces that the runs have timed."""
    found: list[dict[str, Any]] = [event for run in runs if (event := run.event("ring"))]
    return [(e["processes"], size / 1e6, 1000 * s) for e in found for size, s in e["times"]]

"""Short runs of a recipe with so many processes, batch and strategy, each a ``kd-train`` of its own, and their numbers."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.launch.child import reason_in, start_kd_train
from kd.report.facts import Facts
from kd.report.records import RunRecords, percentile, read_run
from kd.storage.run_urls import folder_of_recipe
from kd.storage.writing import appended

# settings of the runs, by strategy
STRATEGIES = {
    "ddp": ["trainer.strategy=ddp", "optim.zero=false"],
    "zero": ["trainer.strategy=ddp", "optim.zero=true"],
    "fsdp": ["trainer.strategy=kd.strategies.fsdp.FSDP", "optim.zero=false"],
}
# settings of every short run: nothing but steps, all recorded
SHORT = [
    "preflight=warn", "trainer.max_epochs=1000", "trainer.num_nodes=1", "trainer.limit_val_batches=0",
    "trainer.limit_train_batches=null", "trainer.log_every_n_steps=10", "trainer.enable_progress_bar=false",
    "optim.warmup_epochs=0", "monitor.enabled=true", "monitor.interval_s=0.2", "monitor.health_every=0",
    "monitor.rules_every_s=0", "labels_alone=false", 'trainer.callbacks+={"class_path": "kd.monitor.ring.Ring"}',
]  # fmt: skip
# recorded phases of a step, by part of the model
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
    """Command line of ``kd-train`` that all short runs share; :meth:`run` adds :data:`SHORT` and what differs."""
    recipe: str
    """Name of the recipe."""
    folder: Path
    """Folder of the runs, logs and pages."""
    processes: list[int]
    """Numbers of processes to measure, ascending, the first 1; each divides ``batch``."""
    strategies: list[str]
    """Keys of :data:`STRATEGIES`, ``ddp`` among them."""
    batch: int
    """Pictures of each process in weak scaling, of all processes together in strong scaling."""
    steps: int
    """Optimizer steps of each run."""
    threads: int
    """OpenMP threads of each process in all runs, unless the user has set OMP_NUM_THREADS."""

    def cases(self) -> list[Case]:
        """All short runs, in the order in which they are measured.

        One process alone is the first; then, by number of processes and strategy, weak scaling (each process keeps the
        batch) and strong scaling (all processes share that batch).

        >>> plan = ScalingPlan([], "food", Path("runs"), [1, 2, 4], ["ddp", "zero"], batch=8, steps=20, threads=1)
        >>> [case.name for case in plan.cases()]
        ['ddp-1x8', 'ddp-2x8', 'ddp-2x4', 'zero-2x8', 'zero-2x4', 'ddp-4x8', 'ddp-4x2', 'zero-4x8', 'zero-4x2']
        """
        cases = [Case("ddp", 1, self.batch)]
        for count in self.processes[1:]:
            for strategy in self.strategies:
                cases.append(Case(strategy, count, self.batch))
                cases.append(Case(strategy, count, self.batch // count))
        return cases

    def run(self, case: Case) -> RunRecords:
        """Runs ``kd-train`` for :attr:`steps` steps, waits for its end, and reads what it has recorded.

        Its output goes to ``<case>.log`` in :attr:`folder`, its run folder is ``<recipe>/<case>`` there. An interrupt
        sends it SIGTERM.

        Args:
            case: strategy, processes and batch; with one process the strategy is Lightning's own choice.

        Raises:
            UserError: the run has failed; the message has the last line of its log.
        """
        strategy = ["trainer.strategy=auto", "optim.zero=false"]
        if case.processes > 1:
            strategy = STRATEGIES[case.strategy]
        of_case = [
            f"runs_dir={self.folder}",
            f"name={case.name}",
            f"trainer.max_steps={self.steps}",
            f"trainer.devices={case.processes}",
            f"data.batch_size={case.batch}",
        ]
        env = {}
        if "OMP_NUM_THREADS" not in os.environ:
            env["OMP_NUM_THREADS"] = str(self.threads)
        log = self.folder / f"{case.name}.log"
        with appended(log) as out:
            process = start_kd_train(
                [*self.items, *SHORT, *strategy, *of_case],
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
            raise UserError(f"{case.name}: {reason_in(log)}")
        return read_run(folder_of_recipe(self.folder, self.recipe) / case.name)


def reading(case: Case, run: RunRecords) -> dict[str, Any]:
    """The medians of a run's steps. The first step of each epoch, which starts a loader, and the run's second are left out.

    Args:
        case: what was run.
        run: its records.

    Returns:
        A run as ``scale.json`` has it. Times are of the process that records (rank 0), in ms; a phase that no step has
        recorded counts as 0 ms. ``images_per_s`` is of all processes. ``memory_mb`` and ``state_mb`` (weights, gradients
        and optimizer of a process) are None where the run's summary lacks them.

    Raises:
        UserError: no step is left.
    """
    facts = Facts(run)
    steps = [step["p"] for step in facts.usual_steps[1:]]  # ms by phase
    if not steps:
        raise UserError(f"{run.folder}: no step was recorded after the first (steps=)")

    def median_ms(phase: str) -> float:
        return percentile([step.get(phase, 0.0) for step in steps], 50)

    parts = {}
    for part, phases in PHASES_OF.items():
        parts[part] = sum(map(median_ms, phases))
    communication_ms = median_ms("communication")
    step_ms = sum(parts.values()) + communication_ms
    memory: dict[str, float] = run.summary.get("memory_mb") or {}
    state_mb = sum(memory.get(name, 0.0) for name in ("student", "gradients", "optimizer"))
    return {
        "strategy": case.strategy,
        "processes": case.processes,
        "batch": case.batch,
        "step_ms": step_ms,
        "images_per_s": 1000 * case.processes * case.batch / step_ms,
        "parts_ms": parts,
        "communication_ms": communication_ms,
        "memory_mb": run.summary.get("peak_memory_mb"),
        "state_mb": state_mb or None,
    }


def all_reduces(run: RunRecords) -> list[dict[str, float]]:
    """The all-reduces that a run of several processes has timed (:mod:`kd.monitor.ring`); [] of one process.

    Each has ``processes``, ``mb`` (10^6 bytes) and ``ms``, the median.
    """
    event: dict[str, Any] = run.event("ring") or {"times": []}
    times = []
    for size, seconds in event["times"]:
        time = {
            "processes": event["processes"],
            "mb": size / 1e6,
            "ms": 1000 * seconds,
        }
        times.append(time)
    return times

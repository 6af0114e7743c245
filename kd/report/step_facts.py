"""Numbers of a run's steps, see :mod:`kd.report.facts`."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from kd.report.records import PHASES, Run, Step, percentile


def step_ms(phases: Mapping[str, float]) -> float:
    """A step's length: validation and profiling stand beside it."""
    return sum(ms for name, ms in phases.items() if name in PHASES)


def part(phases: Mapping[str, float], name: str) -> float:
    """A phase's part of the step, 0 to 1."""
    step = step_ms(phases)
    return phases.get(name, 0.0) / step if step else 0.0


def mean(values: Sequence[float]) -> float:
    """``nan`` of nothing."""
    return sum(values) / len(values) if values else math.nan


class StepFacts:
    """What the steps say. ``rank`` is the typical one: neither the straggler nor the one that waits most."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def phases_by_rank(self) -> dict[int, dict[str, float]]:
        """Mean ms a step by phase, validation too; the first step of the process left out."""
        return {rank: _mean_phases(self.run, rank) for rank in (self.run.totals or self.run.steps)}

    @cached_property
    def compute_ms(self) -> dict[int, float]:
        return {r: step_ms(p) - p.get("communication", 0.0) for r, p in self.phases_by_rank.items()}

    @cached_property
    def rank(self) -> int:
        ranks = sorted(self.compute_ms, key=lambda r: self.compute_ms[r])
        return ranks[(len(ranks) - 1) // 2] if ranks else 0

    @cached_property
    def phases(self) -> dict[str, float]:
        return self.phases_by_rank.get(self.rank, {})

    @cached_property
    def step_ms(self) -> float:
        return step_ms(self.phases)

    @cached_property
    def header(self) -> dict[str, Any]:
        return self.run.headers.get(self.rank, {})

    @cached_property
    def total(self) -> dict[str, Any]:
        return self.run.totals.get(self.rank, {})

    @cached_property
    def steps(self) -> list[Step]:
        return self.run.steps.get(self.rank, [])

    @cached_property
    def usual_steps(self) -> list[Step]:
        """Without those that start a loader."""
        return [s for s in self.steps if not s.get("first")]

    @cached_property
    def steps_ms(self) -> list[float]:
        return [s["ms"] for s in self.usual_steps]

    @cached_property
    def steps_counted(self) -> int:
        return self.total.get("steps") or max(0, len(self.steps) - 1)

    def per_step(self, key: str) -> float:
        return self.total.get(key, 0.0) / max(1, self.total.get("steps", 1))

    @cached_property
    def callbacks_ms(self) -> dict[str, float]:
        steps = max(1, self.total.get("steps", 1))
        return {name: ms / steps for name, ms in self.total.get("callbacks", {}).items()}

    @cached_property
    def swings(self) -> dict[str, tuple[float, float, float]]:
        """p5, p50 and p95 (ms) of the computing phases that take a quarter of the step or more."""
        large = [n for n in ("teacher", "student", "loss", "backward", "optimizer") if part(self.phases, n) >= 0.25]
        values = {name: [s["p"].get(name, 0.0) for s in self.usual_steps] for name in large}
        return {n: (percentile(v, 5), percentile(v, 50), percentile(v, 95)) for n, v in values.items() if len(v) >= 20}


def _mean_phases(run: Run, rank: int) -> dict[str, float]:
    total = run.totals.get(rank)
    if total and total["steps"]:
        return {name: ms / total["steps"] for name, ms in total["p"].items()}
    steps = run.steps.get(rank, [])[1:]
    names = {name for step in steps for name in step["p"]}
    return {name: sum(step["p"].get(name, 0.0) for step in steps) / len(steps) for name in names}

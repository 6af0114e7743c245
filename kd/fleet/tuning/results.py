"""What a search has found: ``best.yaml``, the table, and whether the winner stands on fresh seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kd.fleet.tuning.plan import SearchPlan
from kd.fleet.tuning.space import item, short
from kd.fleet.tuning.study import FrozenTrial, Study
from kd.proof.seeds import gain_over_seeds
from kd.report.tables import Cell, Table
from kd.run.request import translate
from kd.run.run import Run
from kd.storage.writing import write_text

BEST = "best.yaml"
"""The recipe that repeats the best trial."""
SHOWN = 10
"""Trials in the table."""


def chosen(study: Study, plan: SearchPlan) -> Any | None:
    """The best finished trial, Optuna's ``FrozenTrial``; None before any has finished.

    Of a Pareto front the one nearest to the best of each objective: by the sum of squared distances, each as a share of
    the front's range in that objective.
    """
    front = study.best()
    if not front:
        return None
    squared_distances = [0.0] * len(front)
    for i, objective in enumerate(plan.objectives):
        sign = 1 if objective.maximize else -1
        values = [sign * trial.values[i] for trial in front]  # more is better
        best = max(values)
        width = best - min(values) or 1.0
        for place, value in enumerate(values):
            share = (best - value) / width
            squared_distances[place] += share**2
    nearest = min(squared_distances)
    return front[squared_distances.index(nearest)]


def words_of(trial: FrozenTrial, plan: SearchPlan) -> list[str]:
    """The values of a finished trial as words of a command line (:meth:`~kd.fleet.tuning.study.Study.values_in`)."""
    return [item(key, value) for key, value in Study.values_in(trial, plan.space).items()]


def write_best(study: Study, plan: SearchPlan, extra: Sequence[str]) -> None:
    """Writes ``best.yaml``, a recipe that repeats the best trial; nothing before any has finished.

    It holds the settings of the search's own words and the trial's values, below comments with these.

    Args:
        study: the trials.
        plan: of the search.
        extra: words that all trials share beside the plan's.
    """
    best = chosen(study, plan)
    if best is None:
        return
    values = words_of(best, plan)
    run = Run.of(translate([*plan.items, *extra, *values]))

    reached = []
    for objective, value in zip(plan.objectives, best.values, strict=True):
        reached.append(f"{objective.name} {value:.6g}")
    ended = len(study.trials("complete"))
    where = f"trial {best.number} of {plan.folder}"
    text = f"# Best of {ended} trials: {', '.join(reached)} ({where})\n"
    text += "".join(f"#   {word}\n" for word in values)
    write_text(plan.folder / BEST, text + run.as_yaml())


def ranked(study: Study, plan: SearchPlan) -> list[Any]:
    """All ended trials of a search: finished ones, the best by the first objective first; then stopped, then failed.

    Trials are Optuna's ``FrozenTrial``.
    """
    sign = -1 if plan.objectives[0].maximize else 1

    def worst_last(trial: Any) -> float:
        return sign * trial.values[0]

    complete = sorted(study.trials("complete"), key=worst_last)
    pruned = study.trials("pruned")
    failed = study.trials("failed")
    return [*complete, *pruned, *failed]


def best_trials(study: Study, plan: SearchPlan) -> Table:
    """The best :data:`SHOWN` trials; a failed or stopped one has why, or its last value, in place of the first objective."""
    rows: list[list[Cell]] = []
    for trial in ranked(study, plan)[:SHOWN]:
        notes = trial.user_attrs
        if trial.state.name == "COMPLETE":
            results = list(trial.values)
        else:
            results = [_instead(trial), *[None] * (len(plan.objectives) - 1)]
        costs = [notes.get("epochs"), notes.get("wall_s")]
        values = [short(trial.params.get(space.key, "")) for space in plan.space]
        rows.append([trial.number, *results, *costs, *values])
    title = f"{plan.config['recipe']}: {len(study.trials())} trials in {plan.folder}"
    columns = [
        "trial",
        *(objective.name for objective in plan.objectives),
        "epochs",
        "s",
        *(space.key for space in plan.space),
    ]
    return Table(title, columns, rows)


def _instead(trial: FrozenTrial) -> str:
    """Why a trial failed, or the last value of one that was stopped."""
    if trial.state.name == "FAIL":
        return f"failed: {trial.user_attrs.get('reason', '')}"
    values = list(trial.intermediate_values.values())
    return f"stopped at {values[-1]:.4g}" if values else "stopped"


@dataclass(frozen=True)
class Confirmation:
    """The winner and the default on the same fresh seeds."""

    objective: str
    """Name of the objective."""
    maximize: bool
    """Whether more is better."""
    seeds: tuple[int, ...]
    """The fresh seeds."""
    best: tuple[float, ...]
    """The winner's values, by seed."""
    default: tuple[float, ...]
    """Values of the recipe as the user gave it, without searched settings, by seed."""

    def interval(self) -> tuple[float, float]:
        """Mean difference (winner - default) in the objective's unit, and half of its 95 % interval.

        Paired by seed (:func:`kd.proof.seeds.gain_over_seeds`); the half is infinite for one seed.
        """
        gain = gain_over_seeds(self.best, self.default)
        return gain.mean, gain.half

    def text(self) -> str:
        """The finding: both means over fresh seeds, and the 95 % interval of their difference, or that one seed has none."""
        mean, half = self.interval()
        best = statistics.mean(self.best)
        default = statistics.mean(self.default)
        values = f"the winner {best:.4g}, the default {default:.4g} (means)"
        means = f"{self.objective} on fresh seeds {self.seeds}: {values}"
        if math.isinf(half):
            return f"{means}; one seed says nothing of the spread."
        gain = mean
        if not self.maximize:
            gain = -mean
        if gain <= 0:
            verdict = "is none: the default is as good or better"
        elif gain > half:
            verdict = "survives"
        else:
            verdict = "does not survive"
        return f"{means}. The difference, {mean:+.4g} ± {round(half, 6):.2g} (95 %, paired by seed), {verdict}."

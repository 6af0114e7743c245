"""What a search has found: ``best.yaml``, and the table of its trials."""

from collections.abc import Sequence
from typing import Any

from kd.fleet.tuning.plan import SearchPlan
from kd.fleet.tuning.study import FrozenTrial, Study
from kd.report.tables import Cell, Table
from kd.run.request import as_word, translate
from kd.run.run import Run
from kd.storage.writing import write_text

BEST = "best.yaml"
"""The recipe that repeats the best trial."""
SHOWN = 10
"""Trials in the table."""


def chosen_trial(study: Study, plan: SearchPlan) -> Any | None:
    """The best finished trial by the first objective, Optuna's ``FrozenTrial``; None before any has finished."""
    return next(iter(_ranked(study.best(), plan)), None)


def _ranked(trials: Sequence[Any], plan: SearchPlan) -> list[Any]:
    """Finished trials, the best by the first objective first."""
    sign = -1 if plan.objectives[0].maximize else 1
    return sorted(trials, key=lambda trial: sign * trial.values[0])


def trial_words(trial: FrozenTrial, plan: SearchPlan) -> list[str]:
    """The values of a finished trial as words of a command line (:meth:`~kd.fleet.tuning.study.Study.values_in`)."""
    return [as_word(key, value) for key, value in Study.values_in(trial, plan.space).items()]


def write_best(study: Study, plan: SearchPlan, extra: Sequence[str]) -> None:
    """Writes ``best.yaml``, a recipe that repeats the best trial; nothing before any has finished.

    It holds all settings of the trial's run, below comments with what the trial reached and its searched values.

    Args:
        study: the trials.
        plan: of the search.
        extra: words that all trials share beside the plan's.
    """
    best = chosen_trial(study, plan)
    if best is None:
        return
    values = trial_words(best, plan)
    run = Run.of(translate([*plan.items, *extra, *values]))
    values_reached = zip(plan.objectives, best.values, strict=True)
    reached = [f"{objective.name} {value:.6g}" for objective, value in values_reached]
    ended = len(study.trials("complete"))
    where = f"trial {best.number} of {plan.folder}"
    text = f"# Best of {ended} trials: {', '.join(reached)} ({where})\n"
    for word in values:
        text += f"#   {word}\n"
    text += run.as_yaml()
    write_text(plan.folder / BEST, text)


def best_trials(study: Study, plan: SearchPlan) -> Table:
    """The best :data:`SHOWN` finished trials by the first objective, and how many were stopped or have failed."""
    objectives = [objective.name for objective in plan.objectives]
    keys = [space.key for space in plan.space]
    best = _ranked(study.trials("complete"), plan)
    rows: list[list[Cell]] = []
    for trial in best[:SHOWN]:
        searched = [trial.params.get(key, "") for key in keys]
        rows.append([trial.number, *trial.values, *searched])
    stopped = len(study.trials("pruned"))
    failed = len(study.trials("failed"))
    note = f"{len(best)} finished, {stopped} stopped early, {failed} failed"
    title = f"{plan.config['recipe']}: {plan.folder}"
    columns = ["trial", *objectives, *keys]
    return Table(title, columns, rows, note)

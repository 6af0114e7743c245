"""A search as a page: what matters, how each value did, all trials' curves, the front, the cost."""

import math
from collections.abc import Sequence
from typing import Any

from kd.fleet.tuning.plan import SearchPlan
from kd.fleet.tuning.results import chosen, columns, ranked, row
from kd.fleet.tuning.space import Space, item, short
from kd.fleet.tuning.study import FrozenTrial, Study
from kd.fleet.tuning.trials import epoch_values
from kd.report import html
from kd.report.metric import duration

PAGE = "report.html"


def write_page(study: Study, plan: SearchPlan, confirmed: str) -> None:
    """Writes ``report.html`` into the search's folder.

    Args:
        study: the trials so far.
        plan: of the search.
        confirmed: what the winner's trial on fresh seeds has shown; "" where it was not made.
    """
    sections = [
        _headline(study, plan, confirmed),
        _cards(study, plan),
        _importance(study),
        *_slices(study, plan),
        _parallel(study, plan),
        _curves(study, plan),
        *_front(study, plan),
        _table(study, plan),
        _failures(study),
    ]
    html.write_page(
        plan.folder / PAGE, f"{plan.config['recipe']}: search {plan.folder.name}", sections
    )


def _name(trial: FrozenTrial) -> str:
    return f"trial {trial.number}"


def _headline(study: Study, plan: SearchPlan, confirmed: str) -> dict[str, Any]:
    """The page's verdict: the best trial's values, and how far they can be trusted.

    Args:
        study: the trials.
        plan: of the search.
        confirmed: what fresh seeds have shown, in words; "": they were not tried.
    """
    best = chosen(study, plan)
    if best is None:
        return {
            "kind": "verdict",
            "bound": "search",
            "text": "No trial has ended well yet.",
            "others": [],
        }
    pairs = zip(plan.objectives, best.values, strict=True)
    values = ", ".join(f"{objective.name} {value:.4g}" for objective, value in pairs)
    chosen_values = ", ".join(f"{key}={short(value)}" for key, value in best.params.items())
    caution = (
        f"The best of {len(study.trials('complete'))} on one validation set is optimistic, more so with more trials: "
        "confirm=3 runs it and the default on fresh seeds."
    )
    return {
        "kind": "verdict",
        "bound": "search",
        "text": f"Best: {values}, with {chosen_values} ({_name(best)}).",
        "others": [confirmed or caution, f"kd-train {plan.folder / 'best.yaml'} repeats it."],
    }


def _cards(study: Study, plan: SearchPlan) -> dict[str, Any]:
    """How many trials have ended in which way or still run, and the time that they took, as cards.

    The time is the sum over all trials that have ended, also those that ran beside each other. What stopping early has
    saved is a share of the epochs of those that were stopped or ended well.
    """
    states = ("complete", "pruned", "failed", "running")
    counts = {state: len(study.trials(state)) for state in states}
    seconds = sum(trial.user_attrs.get("wall_s") or 0.0 for trial in study.trials())
    epochs = _epochs(study.trials())
    epochs_without_pruning = plan.epochs * (counts["complete"] + counts["pruned"])
    saved = ""
    if counts["pruned"] and epochs_without_pruning:
        share = 1 - _epochs(study.trials("complete", "pruned")) / epochs_without_pruning
        saved = f"{share:.0%} of the epochs saved by stopping early"
    where = "under Ray"
    if isinstance(plan.jobs, int):
        where = f"of {plan.jobs} at a time"
    return {
        "kind": "cards",
        "cards": [
            [
                "trials",
                str(sum(counts.values())),
                f"of {plan.trials}; {plan.sampler}, {plan.pruner}",
            ],
            ["to the end", str(counts["complete"]), ""],
            ["stopped early", str(counts["pruned"]), saved],
            ["failed", str(counts["failed"]), ""],
            ["cost", duration(seconds), f"{where}; {epochs} epochs"],
        ],
    }


def _epochs(trials: Sequence[FrozenTrial]) -> int:
    """Epochs that trials have trained, together; one that has not ended counts as 0."""
    return sum(trial.user_attrs.get("epochs") or 0 for trial in trials)


def _importance(study: Study) -> dict[str, Any] | None:
    """The share of each key in what decides the first objective, as a table; None where it can't be computed."""
    shares = study.importance()
    if not shares:
        return None
    return {
        "kind": "table",
        "title": "What decides",
        "columns": ["key", "share"],
        "long": True,
        "rows": [[key, f"{share:.0%}"] for key, share in shares.items()],
        "note": "PED-ANOVA over the trials and the keys that all have; with few trials a guess.",
    }


def _slices(study: Study, plan: SearchPlan) -> list[dict[str, Any]]:
    """For each searched key a chart of the first objective over its values; the best trial is marked.

    A point is ``[x, y, name, marked]``; x is the value, or of choices the place in ``labels``.
    """
    best = chosen(study, plan)
    marked = None
    if best is not None:
        marked = best.number
    objective = plan.objectives[0]
    charts = []
    for space in plan.space:
        labels = [str(label) for label in space.labels]
        points = []
        for trial in study.trials("complete"):
            if space.key in trial.params:
                x = trial.params[space.key]
                if labels:
                    x = labels.index(str(x))
                points.append([x, trial.values[0], _name(trial), trial.number == marked])
        if not points:
            continue
        charts.append(
            {
                "kind": "points",
                "title": f"{objective.name} over {space.key}",
                "points": points,
                "log": space.log,
                "labels": labels or None,
                "x_name": space.key.split(".")[-1],
                "y_name": objective.name,
            }
        )
    return charts


def _place(space: Space, value: Any) -> float | None:
    """Where on its axis in parallel coordinates a value lies, in 0..1; None: the trial has none.

    Args:
        space: of the axis: choices at even distances in their order, a range from its low to its high end.
        value: as Optuna stores it: of choices the label.
    """
    if value is None:
        return None
    if space.choices is not None:
        last = len(space.labels) - 1
        return space.labels.index(value) / max(1, last)
    scale = math.log if space.log else float
    low = scale(space.low)
    high = scale(space.high)
    return (scale(value) - low) / (high - low)


def _parallel(study: Study, plan: SearchPlan) -> dict[str, Any] | None:
    """All finished trials in parallel coordinates: an axis for each searched key, the last of the first objective.

    None for fewer than two of them.
    """
    trials = study.trials("complete")
    objective = plan.objectives[0]
    if len(trials) < 2:
        return None
    values = [trial.values[0] for trial in trials]
    low = min(values)
    high = max(values)
    rows = []  # name, brightness in 0..1, places on the axes
    for trial in sorted(trials, key=lambda t: t.values[0], reverse=not objective.maximize):
        value = (trial.values[0] - low) / ((high - low) or 1.0)
        brightness = value
        if not objective.maximize:
            brightness = 1 - value
        places = [_place(space, trial.params.get(space.key)) for space in plan.space]
        chosen_values = ", ".join(item(key, v) for key, v in trial.params.items())
        name = f"{_name(trial)}: {objective.name} {trial.values[0]:.4g} ({chosen_values})"
        rows.append([name, brightness, [*places, value]])
    axes = []  # key, and labels of both ends
    for space in plan.space:
        if space.choices:
            first = space.labels[0]
            last = space.labels[-1]
            axes.append([space.key, str(first), str(last)])
        else:
            axes.append([space.key, short(space.low), short(space.high)])
    axes.append([objective.name, f"{low:.4g}", f"{high:.4g}"])
    return {
        "kind": "parallel",
        "title": "All trials",
        "axes": axes,
        "rows": rows,
        "note": "A line is a trial; the brighter, the better.",
    }


def _curves(study: Study, plan: SearchPlan) -> dict[str, Any] | None:
    """The first objective by epoch, a line a trial, the best drawn last; None for an objective without epochs, or
    where no trial has a line.

    Read from the trials' ``metrics.csv``: a trial whose folder was deleted has no line.
    """
    objective = plan.objectives[0]
    if not objective.name.startswith("val/"):
        return None
    best = chosen(study, plan)
    curves = []  # name, values by epoch, state
    for trial in study.trials("complete", "pruned"):
        run = plan.run_of(trial.user_attrs.get("revived", trial.number))
        values = epoch_values(run, objective.name)
        if trial.state.name == "PRUNED":
            state = "stopped"
        elif best and trial.number == best.number:
            state = "best"
        else:
            state = "done"
        if values:
            curves.append([_name(trial), values, state])
    if not curves:
        return None
    curves.sort(key=lambda curve: curve[2] == "best")  # drawn last, above the others
    return {"kind": "curves", "title": f"{objective.name} by epoch", "curves": curves}


def _front(study: Study, plan: SearchPlan) -> list[dict[str, Any]]:
    """With several objectives a chart of the first over the second; [] with one, or before any trial has ended well."""
    best = chosen(study, plan)
    if len(plan.objectives) < 2 or best is None:
        return []
    first, second = plan.objectives[:2]
    front = {trial.number for trial in study.best()}
    points = []  # x, y, name, marked
    for trial in study.trials("complete"):
        name = _name(trial)
        if trial.number in front:
            name += ", on the front"
        y, x = trial.values[:2]
        points.append([x, y, name, trial.number == best.number])
    numbers = ", ".join(str(number) for number in sorted(front))
    return [
        {
            "kind": "points",
            "title": f"{first.name} against {second.name}",
            "points": points,
            "log": False,
            "labels": None,
            "x_name": second.name,
            "y_name": first.name,
            "note": f"On the front: trials {numbers}. Marked: {_name(best)}, nearest to the best of each.",
        }
    ]


def _table(study: Study, plan: SearchPlan) -> dict[str, Any]:
    """All trials that have ended without failing, the best by the first objective first, as a table."""
    rows = []
    for t in ranked(study, plan):
        if t.state.name != "FAIL":
            rows.append(row(t, plan))
    return {
        "kind": "table",
        "title": "Trials",
        "empty": "none yet",
        "rows": rows,
        "columns": columns(plan),
    }


def _failures(study: Study) -> dict[str, Any] | None:
    """The trials that failed, and why, as a table; None without any."""
    failed = study.trials("failed")
    if not failed:
        return None
    rows = []
    for trial in failed:
        values = " ".join(item(key, value) for key, value in trial.params.items())
        rows.append([str(trial.number), trial.user_attrs.get("reason", ""), values])
    return {
        "kind": "table",
        "title": "Failed trials",
        "columns": ["trial", "why", "with"],
        "rows": rows,
        "long": True,
    }

"""A search as a page: what matters, how each value did, all trials' curves, the front, the cost."""

import math
from pathlib import Path
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
    best = chosen(study, plan)
    if best is None:
        return {
            "kind": "verdict",
            "bound": "search",
            "text": "No trial has ended well yet.",
            "others": [],
        }
    done = len(study.trials("complete"))
    found = ", ".join(
        f"{o.name} {v:.4g}" for o, v in zip(plan.objectives, best.values, strict=True)
    )
    with_ = ", ".join(f"{key}={short(value)}" for key, value in best.params.items())
    honest = confirmed or (
        f"The best of {done} on one validation set is optimistic, more so with more trials: confirm=3 runs it "
        "and the default on fresh seeds."
    )
    return {
        "kind": "verdict",
        "bound": "search",
        "text": f"Best: {found}, with {with_} ({_name(best)}).",
        "others": [honest, f"kd-train {plan.folder / 'best.yaml'} repeats it."],
    }


def _cards(study: Study, plan: SearchPlan) -> dict[str, Any]:
    counts = {
        state: len(study.trials(state)) for state in ("complete", "pruned", "failed", "running")
    }
    seconds = sum(t.user_attrs.get("wall_s") or 0.0 for t in study.trials())
    epochs = sum(t.user_attrs.get("epochs") or 0 for t in study.trials())
    whole = plan.epochs * (counts["complete"] + counts["pruned"])
    saved = (
        f"{1 - epochs / whole:.0%} of the epochs saved by stopping early"
        if whole and counts["pruned"]
        else ""
    )
    where = f"of {plan.jobs} at a time" if isinstance(plan.jobs, int) else "under Ray"
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


def _importance(study: Study) -> dict[str, Any] | None:
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
    best, objective, made = chosen(study, plan), plan.objectives[0], []
    for space in plan.space:
        trials = [t for t in study.trials("complete") if space.key in t.params]
        if not trials:
            continue
        labels = [str(label) for label in space.labels]
        x = [
            labels.index(str(t.params[space.key])) if labels else t.params[space.key]
            for t in trials
        ]
        marked = best.number if best is not None else None
        points = [
            [v, t.values[0], _name(t), t.number == marked] for v, t in zip(x, trials, strict=True)
        ]
        made.append(
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
    return made


def _place(space: Space, value: Any) -> float | None:
    if value is None:
        return None
    if space.choices is not None:
        return space.labels.index(value) / max(1, len(space.labels) - 1)
    scale = math.log if space.log else float
    return (scale(value) - scale(space.low)) / (scale(space.high) - scale(space.low))


def _parallel(study: Study, plan: SearchPlan) -> dict[str, Any] | None:
    done, objective = study.trials("complete"), plan.objectives[0]
    if len(done) < 2:
        return None
    values = [t.values[0] for t in done]
    low, high = min(values), max(values)
    rows = []
    for trial in sorted(done, key=lambda t: t.values[0], reverse=not objective.maximize):
        value = (trial.values[0] - low) / ((high - low) or 1.0)
        places = [_place(space, trial.params.get(space.key)) for space in plan.space]
        with_ = ", ".join(item(key, v) for key, v in trial.params.items())
        name = f"{_name(trial)}: {objective.name} {trial.values[0]:.4g} ({with_})"
        rows.append([name, value if objective.maximize else 1 - value, [*places, value]])
    ends = [
        (str(s.labels[0]), str(s.labels[-1])) if s.choices else (short(s.low), short(s.high))
        for s in plan.space
    ]
    axes = [[s.key, *end] for s, end in zip(plan.space, ends, strict=True)]
    return {
        "kind": "parallel",
        "title": "All trials",
        "axes": [*axes, [objective.name, f"{low:.4g}", f"{high:.4g}"]],
        "rows": rows,
        "note": "A line is a trial; the brighter, the better.",
    }


def _curves(study: Study, plan: SearchPlan) -> dict[str, Any] | None:
    objective = plan.objectives[0]
    if not objective.name.startswith("val/"):
        return None
    best, curves = chosen(study, plan), []
    for trial in study.trials("complete", "pruned"):
        values = epoch_values(Path(trial.user_attrs["folder"]), objective.name)
        done = "best" if best and trial.number == best.number else "done"
        state = "stopped" if trial.state.name == "PRUNED" else done
        if values:
            curves.append([_name(trial), values, state])
    curves.sort(key=lambda curve: curve[2] == "best")
    return (
        {"kind": "curves", "title": f"{objective.name} by epoch", "curves": curves}
        if curves
        else None
    )


def _front(study: Study, plan: SearchPlan) -> list[dict[str, Any]]:
    best, done = chosen(study, plan), study.trials("complete")
    if len(plan.objectives) < 2 or best is None:
        return []
    first, second = plan.objectives[:2]
    front = {t.number for t in study.best()}
    names = [f"{_name(t)}{', on the front' if t.number in front else ''}" for t in done]
    points = [
        [t.values[1], t.values[0], name, t.number == best.number]
        for t, name in zip(done, names, strict=True)
    ]
    numbers = ", ".join(str(n) for n in sorted(front))
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
    rows = [row(t, plan) for t in ranked(study, plan) if t.state.name != "FAIL"]
    return {
        "kind": "table",
        "title": "Trials",
        "empty": "none yet",
        "rows": rows,
        "columns": columns(plan),
    }


def _failures(study: Study) -> dict[str, Any] | None:
    failed = study.trials("failed")
    if not failed:
        return None
    given = [" ".join(item(key, value) for key, value in t.params.items()) for t in failed]
    rows = [
        [str(t.number), t.user_attrs.get("reason", ""), text]
        for t, text in zip(failed, given, strict=True)
    ]
    return {
        "kind": "table",
        "title": "Failed trials",
        "columns": ["trial", "why", "with"],
        "rows": rows,
        "long": True,
    }

"""What a search has found: ``best.yaml``, the table, and whether the winner stands on fresh seeds."""

import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kd.fleet.tuning.plan import SearchPlan
from kd.fleet.tuning.space import item, short
from kd.fleet.tuning.study import FrozenTrial, Study
from kd.report import terminal
from kd.storage.elsewhere import text_of, yaml_of
from kd.storage.writing import write_text

BEST = "best.yaml"
SHOWN = 10
# Student's t: half a 95 % interval in standard errors, by degrees of freedom
T95 = (0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def chosen(study: Study, plan: SearchPlan) -> Any | None:
    """The best trial; of a Pareto front the one nearest to the best of each objective. None before any has ended."""
    front = study.best()
    if len(front) < 2:
        return front[0] if front else None
    signs = [1 if objective.maximize else -1 for objective in plan.objectives]
    columns = [[s * t.values[i] for t in front] for i, s in enumerate(signs)]
    ranges = [max(c) - min(c) or 1.0 for c in columns]

    def distance(t: FrozenTrial) -> float:
        gaps = [
            (max(c) - s * v) / r
            for c, s, v, r in zip(columns, signs, t.values, ranges, strict=True)
        ]
        return sum(gap**2 for gap in gaps)

    return min(front, key=distance)


def write_best(study: Study, plan: SearchPlan) -> None:
    """Writes ``best.yaml``, a recipe that repeats the best trial; nothing before any has ended."""
    best = chosen(study, plan)
    if best is None:
        return
    config = yaml_of(text_of(Path(best.user_attrs["folder"]) / "config.yaml"))
    config["runs_dir"] = plan.config["runs_dir"]
    config["trainer"]["enable_progress_bar"] = plan.config["trainer"]["enable_progress_bar"]
    found = ", ".join(
        f"{o.name} {v:.6g}" for o, v in zip(plan.objectives, best.values, strict=True)
    )
    head = f"# Best of {len(study.trials('complete'))} trials: {found} (trial {best.number} of {plan.folder})\n"
    head += "".join(f"#   {item(key, value)}\n" for key, value in best.params.items())
    write_text(plan.folder / BEST, head + yaml.safe_dump(config, sort_keys=False))


def ranked(study: Study, plan: SearchPlan) -> list[Any]:
    """Finished trials, the best first; then those stopped early, then those that failed."""
    sign = 1 if plan.objectives[0].maximize else -1
    done = sorted(study.trials("complete"), key=lambda t: -sign * t.values[0])
    return done + study.trials("pruned") + study.trials("failed")


def print_table(study: Study, plan: SearchPlan) -> None:
    """Prints the best :data:`SHOWN` trials, and how many there are."""
    title = f"{plan.config['recipe']}: {len(study.trials())} trials in {plan.folder}"
    rows = [row(trial, plan) for trial in ranked(study, plan)[:SHOWN]]
    width = max(100, shutil.get_terminal_size().columns)
    terminal.print_table(
        title, columns(plan), rows, left=[space.key for space in plan.space], width=width
    )


def columns(plan: SearchPlan) -> list[str]:
    """The table's column names; :func:`row` gives the cells."""
    return [
        "trial",
        *(o.name for o in plan.objectives),
        "epochs",
        "s",
        *(space.key for space in plan.space),
    ]


def row(trial: FrozenTrial, plan: SearchPlan) -> list[str]:
    """A trial's cells: number, objectives (or why it has none), epochs, seconds, values."""
    attrs = trial.user_attrs
    values = [""] * len(plan.objectives)
    if trial.state.name == "FAIL":
        values[0] = f"failed: {attrs.get('reason', '')}"
    elif trial.state.name == "PRUNED":
        last = list(trial.intermediate_values.values())[-1:]
        values[0] = f"stopped at {last[0]:.4g}" if last else "stopped"
    else:
        values = [f"{v:.4g}" for v in trial.values]
    number = f"{attrs['revived']}, to its end" if "revived" in attrs else str(trial.number)
    cells = ["" if attrs.get(name) is None else str(attrs[name]) for name in ("epochs", "wall_s")]
    return [
        number,
        *values,
        *cells,
        *(short(trial.params.get(space.key, "")) for space in plan.space),
    ]


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
    """Values of the recipe without the search, by seed."""

    def interval(self) -> tuple[float, float]:
        """Mean difference (winner - default) and half of its 95 % interval, paired by seed."""
        gaps = [b - d for b, d in zip(self.best, self.default, strict=True)]
        if len(gaps) < 2:
            return gaps[0], float("inf")
        t = T95[len(gaps) - 1] if len(gaps) <= len(T95) else 2.0
        return statistics.mean(gaps), t * statistics.stdev(gaps) / len(gaps) ** 0.5

    def text(self) -> str:
        """The finding in two sentences: both means over fresh seeds, and the 95 % interval of their difference."""
        mean, half = self.interval()
        best, default = statistics.mean(self.best), statistics.mean(self.default)
        values = f"the winner {best:.4g}, the default {default:.4g} (means)"
        means = f"{self.objective} on fresh seeds {self.seeds}: {values}"
        if half == float("inf"):
            return f"{means}; one seed says nothing of the spread."
        better = (mean if self.maximize else -mean) > 0
        survived = "survives" if abs(mean) > half else "does not survive"
        verdict = survived if better else "is none: the default is as good or better"
        return f"{means}. The difference, {mean:+.4g} ± {round(half, 6):.2g} (95 %, paired by seed), {verdict}."

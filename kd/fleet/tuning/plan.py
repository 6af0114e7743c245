"""A search by its command line, checked as a whole before anything is written."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kd.errors import UserError, did_you_mean
from kd.fleet.tuning.space import Space, item, parse
from kd.fleet.tuning.trials import TrialShare
from kd.machine import cores
from kd.report.metric import less_is_better
from kd.run import files, keys, typed
from kd.run.build import metrics_of
from kd.run.files import flatten
from kd.run.own_keys import positive, take, whole_number
from kd.run.paths import folder
from kd.run.request import Request
from kd.run.run import Run
from kd.run.trust import check_file
from kd.storage.elsewhere import json_of, text_of
from kd.storage.run_urls import folder_of_runs

# what a run's summary.json says beside its validation metrics
OF_THE_SUMMARY = ("params", "images_per_s", "step_ms_median", "peak_memory_mb", "wall_s")
LATENCY = "latency_ms"  # of one picture on one thread, measured by kd-latency after the run
SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("none", "asha", "hyperband", "median")
KEYS = ("trials", "jobs", "hours", "trial_hours", "objective", "sampler", "pruner", "name", "confirm", "revive", "tune",
        "cores", "gpus")  # fmt: skip


@dataclass(frozen=True)
class SearchObjective:
    """What a search makes as large, or as small, as it can."""

    name: str
    """``val/acc1``, or one of :data:`OF_THE_SUMMARY`."""
    maximize: bool
    """Whether more is better."""

    @property
    def direction(self) -> str:
        """``maximize`` or ``minimize``, as samplers spell it."""
        return "maximize" if self.maximize else "minimize"

    def value(self, run: Path) -> float:
        """Of a finished run: of validation metrics the best epoch's, whose student is kept."""
        if self.name == LATENCY:
            rows = json_of(text_of(run / "export" / "latency.json"))["rows"]
            return float(next(row["median_ms"] for row in rows if row["model"] == "student"))
        summary = json_of(text_of(run / "summary.json"))
        student = summary["student"]
        if self.name.startswith("val/"):
            return float((student["best_val"] or student["val"])[self.name.removeprefix("val/")])
        return float(student["params"] if self.name == "params" else summary[self.name])


@dataclass(frozen=True)
class SearchPlan:
    """A search by its command line, checked."""

    items: list[str]
    """Command line of a run, without what is searched."""
    config: dict[str, Any]
    """The resolved settings."""
    space: tuple[Space, ...]
    """What is searched, in this order: a key before those below it."""
    objectives: tuple[SearchObjective, ...]
    """The first one decides which trials are stopped early."""
    trials: int
    """How many trials in all, of all machines."""
    jobs: int | TrialShare
    """Trials at a time on this machine; or a trial's share of a Ray cluster."""
    hours: float | None
    """Hours of this command; None: as long as it takes."""
    trial_hours: float | None
    """Hours after which a trial has failed; None: no limit."""
    sampler: str
    """Chooses the values."""
    pruner: str
    """Stops trials early."""
    folder: Path
    """Folder of the search."""
    confirm: int
    """Fresh seeds for the winner and the default."""
    revive: str | None
    """A stopped trial to be trained to its end: its number, or ``best``."""

    @property
    def wants_latency(self) -> bool:
        """Whether finished runs are to be timed."""
        return any(objective.name == LATENCY for objective in self.objectives)

    @property
    def epochs(self) -> int:
        """Epochs of a trial that is not stopped early."""
        return self.config["trainer"]["max_epochs"] or 1

    def settings(self) -> dict[str, Any]:
        """What must be the same for a search to go on."""
        config = {k: v for k, v in flatten(self.config).items() if k not in ("runs_dir", "resume")}
        spaces = {f"search.{space.key}": space.text() for space in self.space}
        return {**config, **spaces, "objective": [[o.name, o.maximize] for o in self.objectives]}


def plan(request: Request) -> SearchPlan:
    """Checks a command line and plans its search; nothing is written.

    Raises:
        UserError: a key or value that no run accepts, nothing to search, or an objective that no run reports.
    """
    own: dict[str, Any] = {**take(request, *KEYS)}
    spaces_typed = take(
        request, *(text.split("=")[0] for text in request.overrides if text.startswith("search."))
    )
    searched = {key.removeprefix("search."): text for key, text in spaces_typed.items()}
    given = own | {k: v for k, v in _from_file(request, own, searched).items() if k not in own}
    spaces = [parse(key, text) for key, text in (given.pop("search", None) or searched).items()]
    if not spaces:
        raise UserError("nothing to search: give search.KEY=SPACE, or tune=FILE (kd-tune --help)")
    args = request.parser_args()
    run = Run(args)
    config = run.config
    if config["students"]:
        raise UserError("students: a search trains one student a trial; set students=null")
    items = [
        f"recipe={request.recipe}",
        *(f"config={o}" for o in request.overlays),
        *request.trusted,
    ]
    objectives = _objectives(given.get("objective"), config, run.cli.trusted)
    several = len(objectives) > 1
    pruner = str(
        given.get("pruner")
        or ("none" if several or not objectives[0].name.startswith("val/") else "asha")
    )
    _check_pruner(pruner, objectives)
    sampler = _one_of("sampler", given.get("sampler") or "tpe", SAMPLERS)
    space = _search_space(spaces, args)
    if sampler == "grid" and (
        floats := [s.key for s in space if s.choices is None and not s.integer]
    ):
        raise UserError(f"sampler: a grid needs choices or integers; search.{floats[0]} is neither")
    name = str(given.get("name") or "search")
    typed.check_values([("name", name)], keys.schema())
    limits = {
        key: positive(key, str(given[key]))
        for key in ("hours", "trial_hours")
        if given.get(key) is not None
    }
    return SearchPlan(
        items=[*items, *request.overrides],
        config=config,
        space=space,
        objectives=objectives,
        trials=whole_number(given, "trials", 20),
        jobs=_jobs(given),
        hours=limits.get("hours"),
        trial_hours=limits.get("trial_hours"),
        sampler=sampler,
        pruner=pruner,
        folder=folder_of_runs(config["runs_dir"], "kd-tune") / config["recipe"] / "tune" / name,
        confirm=whole_number(given, "confirm", 0, low=0),
        revive=str(given["revive"]) if "revive" in given else None,
    )


def _from_file(request: Request, own: dict[str, Any], searched: dict[str, str]) -> dict[str, Any]:
    shipped = folder("recipes") / "tune" / f"{request.recipe}.yaml"
    if "tune" not in own and (searched or not shipped.is_file()):
        return {}
    file = Path(own.pop("tune", shipped))
    try:
        content = files.read(file)
    except UserError as error:
        raise UserError(f"tune: {error}") from error
    if not isinstance(content.get("search", {}), dict):
        raise UserError(f"tune: {file} must hold settings, and under search: keys and their spaces")
    files.check_text(content, f"tune: {file}: ")
    for key in content:
        if key not in KEYS and key != "search":
            raise UserError(
                f"tune: {file}: no key '{key}'{did_you_mean(str(key), [*KEYS, 'search'], 0.5)}"
            )
    spaces = {
        key: space for key, space in flatten(content.get("search", {})).items() if space != {}
    }
    if "trust" not in request.flags:
        check_file(file, spaces, request.trust)
    return {**content, "search": {**spaces, **searched}}


def _objectives(
    text: str | None, config: dict[str, Any], trusted: Sequence[str]
) -> tuple[SearchObjective, ...]:
    known = [f"val/{name}" for name in metrics_of(config, trusted)]
    if text is None:
        sign = {"min": "-", "max": "+", None: ""}[config["checkpoint"]["mode"]]
        text = f"{sign}{config['checkpoint']['monitor'] or known[0]}"
    found = tuple(_objective(part.strip()) for part in str(text).split(","))
    for objective in found:
        if objective.name not in (allowed := [*known, *OF_THE_SUMMARY, LATENCY]):
            raise UserError(
                f"objective: no run reports '{objective.name}'; it may be {', '.join(allowed)} (- before "
                "it: less is better, +: more is), several with commas"
            )
    if len({o.name for o in found}) < len(found):
        raise UserError(f"objective: '{text}' names one twice")
    return found


def _objective(text: str) -> SearchObjective:
    name = text.lstrip("+-")
    return SearchObjective(name, text.startswith("+") if text != name else not less_is_better(name))


def _check_pruner(pruner: str, objectives: Sequence[SearchObjective]) -> None:
    _one_of("pruner", pruner, PRUNERS)
    if pruner == "none":
        return
    if len(objectives) > 1:
        raise UserError(f"pruner: {pruner} needs one objective, got several; pruner=none")
    if not objectives[0].name.startswith("val/"):
        name = objectives[0].name
        raise UserError(
            f"pruner: {pruner} reads every epoch, but {name} is known at the end; pruner=none"
        )


def _one_of(key: str, value: object, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise UserError(f"{key} must be one of {', '.join(allowed)}, got '{value}'")
    return str(value)


def _jobs(given: dict[str, Any]) -> int | TrialShare:
    share = {
        key: whole_number(given, key, 0, low=int(key == "cores"))
        for key in ("cores", "gpus")
        if key in given
    }
    if given.get("jobs") == "ray":
        return TrialShare(**share)
    if share:
        raise UserError(
            f"{next(iter(share))}: is a trial's share of a cluster (jobs=ray); jobs=K deals this machine's"
        )
    jobs = whole_number(given, "jobs", 1)
    if jobs > cores():
        raise UserError(f"jobs: must be <= {cores()}, the number of cores, got {jobs}")
    return jobs


def _search_space(spaces: Sequence[Space], args: list[str]) -> tuple[Space, ...]:
    """Checks that a run takes every value, and finds the keys that only some choices of another key bring about."""
    ordered: list[Space] = []
    for space in sorted(spaces, key=lambda space: space.key.count(".")):
        above = next(
            (s for s in reversed(ordered) if space.key.startswith(f"{s.key}.") and s.choices), None
        )
        if above is None:
            taken = _taken(args, [], space)
        else:
            under, taken = _under(above, space, args)
            space = replace(space, above=above.key, under=under)
        if space.integer and any(isinstance(value, float) for value in taken):
            space = replace(
                space, low=float(space.low), high=float(space.high)
            )  # 0..1 of a number that is no integer
        ordered.append(space)
    return tuple(ordered)


def _under(above: Space, space: Space, args: list[str]) -> tuple[tuple[Any, ...], list[Any]]:
    """The choices of ``above`` under which ``space`` exists, and its examples as a run takes them."""
    allowed, taken, refused = [], list[Any](), None
    for choice in above.choices or ():
        try:
            taken = _taken(args, [(above.key, choice)], space)
            allowed.append(choice)
        except UserError as error:
            refused = error
    if not allowed:
        raise UserError(f"search.{space.key}: no choice of search.{above.key} takes it: {refused}")
    return tuple(allowed), taken


def _taken(args: list[str], chosen: Sequence[tuple[str, Any]], space: Space) -> list[Any]:
    """The examples of a space as a run's configuration holds them."""
    taken = []
    for example in space.examples():
        items = [f"--{item(key, value)}" for key, value in [*chosen, (space.key, example)]]
        config = flatten(Run([*args, *items]).config)
        taken.append(
            {key.replace(".init_args.", "."): value for key, value in config.items()}.get(space.key)
        )
    return taken


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first setting that was changed since a search was begun; empty for none."""
    before, now = json_of(json.dumps(before)), json_of(json.dumps(now))
    changed = (key for key in {**before, **now} if before.get(key) != now.get(key))
    return next((f"{key}={before.get(key)}, now {now.get(key)}" for key in changed), "")

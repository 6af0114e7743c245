"""A search by its command line, checked as a whole before anything is written.

A *trial* is a run with one choice of the searched settings; the *space* is what they may be; an *objective* is a metric
that the search makes as large, or as small, as it can; ``jobs`` is how many trials run at a time.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from kd.config.kinds import Range
from kd.config.suggest import near
from kd.config.trees import flatten
from kd.errors import UserError
from kd.fleet.tuning.space import Space, space_of
from kd.machine import cores
from kd.report.metric import less_is_better
from kd.run import files, keys
from kd.run.gate import check_foreign
from kd.run.needs import check_present
from kd.run.options import CommandOptions, names_of, options_of, take
from kd.run.paths import part_of
from kd.run.request import Request, as_word
from kd.run.run import Run
from kd.run.trust import Trust, is_own
from kd.storage.elsewhere import json_of, text_of, yaml_of
from kd.storage.of_weights import LATENCY as LATENCY_FILE
from kd.storage.of_weights import on_stderr, read_of_weights
from kd.storage.run_urls import folder_of_recipe, folder_of_runs
from kd.storage.shown import masked

OF_THE_SUMMARY = ("params", "images_per_s", "step_ms_median", "peak_memory_mb", "wall_s")
"""Objectives that a run's ``summary.json`` has beside its validation metrics."""
LATENCY = "latency_ms"
"""Objective: of one picture on one thread, measured by ``kd-latency`` after the run."""
Hours = Annotated[float, Range("> 0")]


class TuneOptions(CommandOptions):
    """The settings of a search, on the command line or in the file of ``tune=``."""

    tune: str | None = None
    """FILE: settings of the search and, under search:, its spaces, as YAML."""
    trials: Annotated[int, Range(">= 1")] = 20
    """Number of trials in all."""
    jobs: Annotated[int, Range(">= 1")] = 1
    """Trials at a time; they share out the machine's cores and GPUs."""
    trial_hours: Hours | None = None
    """A trial that takes longer has failed."""
    objective: str | None = None
    """val/acc1, latency_ms, params, ...: less of a cost or loss is better, more of any other number; - before it: less is
    better, +: more is; several with commas."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """tpe, random or grid."""
    pruner: Literal["none", "asha", "median"] | None = None
    """asha (default for one objective), median, none: stops poor trials after an epoch."""
    confirm: Annotated[int, Range(">= 0")] = 0
    """N: the winner and the recipe as it was, each again on N fresh seeds."""
    name: Annotated[str, keys.schema()["name"].kind] = "search"
    """Of the search, several for one recipe."""


@dataclass(frozen=True)
class SearchObjective:
    """What a search makes as large, or as small, as it can."""

    name: str
    """A validation metric (``val/acc1``), one of :data:`OF_THE_SUMMARY`, or :data:`LATENCY`."""
    maximize: bool
    """Whether more is better."""

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        """``maximize`` or ``minimize``, as samplers spell it."""
        return "maximize" if self.maximize else "minimize"

    def value(self, run: Path) -> float:
        """The objective's value of a finished run, from its files.

        Of validation metrics the best epoch's, whose student is exported (the last one's where no best is noted); of
        ``latency_ms`` the median in ``export/latency.json``; else the number in ``summary.json``. NaN where that lacks it.

        Args:
            run: the run's folder.
        """
        if self.name == LATENCY:
            rows = read_of_weights(run, LATENCY_FILE, on_stderr)["rows"]
            student_row = next(row for row in rows if row["model"] == "student")
            return float(student_row["median_ms"])
        summary = json_of(text_of(run / "summary.json"))
        student = summary["student"]
        if self.name.startswith("val/"):
            metrics = student["best_val"] or student["val"]
            return float(metrics.get(self.name.removeprefix("val/"), math.nan))
        numbers = {**summary, "params": student["params"]}
        return float(numbers[self.name] or math.nan)  # None: no step was timed


@dataclass(frozen=True)
class SearchPlan:
    """A search by its command line, checked."""

    options: TuneOptions
    """The settings of the search."""
    items: list[str]
    """Words of ``kd-train``'s command line that all trials share, without what is searched."""
    config: dict[str, Any]
    """All settings of a run without what is searched, resolved."""
    space: tuple[Space, ...]
    """What is searched, in this order: a key before those below it."""
    objectives: tuple[SearchObjective, ...]
    """At least one; the first ranks the trials."""
    folder: Path
    """Folder of the search."""
    trusted: Trust
    """What the user trusts in the settings."""

    @property
    def wants_latency(self) -> bool:
        """Whether finished runs are to be timed."""
        return any(objective.name == LATENCY for objective in self.objectives)

    @property
    def is_known_by_epoch(self) -> bool:
        """Whether a pruner can read the objective at each epoch: the only one, a validation metric."""
        return len(self.objectives) == 1 and self.objectives[0].name.startswith("val/")

    @property
    def pruner(self) -> str:
        """Which of :data:`~kd.fleet.tuning.study.PRUNERS` stops trials early."""
        return self.options.pruner or ("asha" if self.is_known_by_epoch else "none")

    @property
    def epochs(self) -> int:
        """Epochs of a trial that is not stopped early; 1 where ``trainer.max_epochs`` is not set."""
        return self.config["trainer"]["max_epochs"] or 1

    def folder_of(self, number: int) -> Path:
        """The folder of trial ``number``."""
        return self.folder / "trials" / f"{number:04d}"

    def settings(self) -> dict[str, Any]:
        """What must be the same to resume a search, by key: stored with the search, and compared with a later one's.

        All settings of a run but ``runs_dir`` and ``resume``, secrets as ``...``, the spaces, and the objectives, as JSON
        has them. The numbers of trials, jobs and hours, the sampler and the pruner may change.
        """
        settings = flatten(masked(self.config))
        for key in ("runs_dir", "resume"):
            settings.pop(key, None)
        for space in self.space:
            settings[f"search.{space.key}"] = space.text()
        settings["objective"] = [[o.name, o.maximize] for o in self.objectives]
        return json_of(json.dumps(settings))


def plan(request: Request) -> SearchPlan:
    """Checks a command line and plans its search; nothing is written.

    Args:
        request: the search's own keys and its spaces are taken out; what is left is the trials' command line.

    Raises:
        UserError: a key or value that no run accepts, nothing to search, or an objective that no run reports.
    """
    typed = take(request, *names_of(TuneOptions))
    names = [text.split("=")[0] for text in request.overrides if text.startswith("search.")]
    searched = {name.removeprefix("search."): text for name, text in take(request, *names).items()}
    from_file = _from_file(request, typed.pop("tune", None), bool(searched))
    spaces = [
        space_of(key, text) for key, text in {**from_file.pop("search", {}), **searched}.items()
    ]
    if not spaces:
        raise UserError("nothing to search: give search.KEY=SPACE, or tune=FILE (kd-tune --help)")
    run = Run.of(request)
    config = run.config
    options = options_of(TuneOptions, from_file | typed)
    if options.jobs > cores():
        raise UserError(f"jobs: must be <= {cores()}, the number of cores, got {options.jobs}")
    check_present(config)
    runs_dir = folder_of_runs(config["runs_dir"], "kd-tune")
    planned = SearchPlan(
        options=options,
        items=request.named(),
        config=config,
        space=(),
        objectives=_objectives(options.objective, config, run.trusted),
        folder=folder_of_recipe(runs_dir, config["recipe"]) / "tune" / options.name,
        trusted=run.trusted,
    )
    if planned.pruner != "none" and not planned.is_known_by_epoch:
        raise UserError(
            f"pruner: {planned.pruner} needs one objective that each epoch reports (val/...); pruner=none"
        )
    planned = replace(planned, space=_search_space(spaces, request))
    for space in planned.space if options.sampler == "grid" else ():
        if space.choices is None and not space.integer:
            raise UserError(
                f"sampler: a grid needs choices or integers; search.{space.key} is neither"
            )
    return planned


def _from_file(request: Request, given: str | None, searches: bool) -> dict[str, Any]:
    """The settings of a search in a file: in the one that ``tune`` names, else in the recipe's shipped one.

    Args:
        request: names the recipe.
        given: ``tune``; None: not given.
        searches: the command line has spaces, so the shipped file does not count.

    Returns:
        The file's settings by key, and under ``search`` its spaces by the key that is searched; {} without a file.

    Raises:
        UserError: a file that can't be read, has a key of no search, or names code that the user does not trust.
    """
    shipped = [] if searches else part_of("tune", request.recipe or "")
    if given is None and not shipped:
        return {}
    file = shipped[0] if given is None else Path(given)
    try:
        content = files.read_settings(file)
    except UserError as error:
        raise UserError(f"tune: {error}") from error
    files.check_text(content, f"tune: {file}: ")
    known = [*names_of(TuneOptions), "search"]
    for key in content:
        if key not in known:
            hint = near(key, known)
            raise UserError(f"tune: {file}: no key '{key}'{hint}")
    if not isinstance(content.get("search", {}), dict):
        raise UserError(f"tune: {file} must hold settings, and under search: keys and their spaces")
    spaces = {
        key: space for key, space in flatten(content.get("search", {})).items() if space != {}
    }
    if "trust" not in request.flags and not is_own(file):
        # they become words of the trials, which would be the user's own
        layers = [{key: choice} for key, space in spaces.items() for choice in _choices(space)]
        check_foreign(file, layers, request.trust, typed=())
    return {**content, "search": spaces}


def _choices(space: object) -> list[object]:
    """The choices of a space, each as a trial's command line reads it, for the check of the code that they name; a range is
    one choice.
    """
    if isinstance(space, str):
        with suppress(ValueError):  # the trial says what is wrong
            space = yaml_of(space)
    if isinstance(space, list):
        return [inner for choice in space for inner in _choices(choice)]
    return [space]


def _objectives(
    text: str | None, config: dict[str, Any], trusted: Trust
) -> tuple[SearchObjective, ...]:
    """The objectives that ``text`` names, ``-val/loss,latency``; None: what the recipe's checkpoints are chosen by.

    Args:
        text: names with commas; "-" before one: less is better, "+": more is.
        config: of a trial.
        trusted: classes that the user trusts.

    Raises:
        UserError: one that no run reports.
    """
    from kd.run.build import metrics_of  # torch: what does not need it is checked before

    metrics = [f"val/{name}" for name in metrics_of(config, trusted)]
    if text is None:
        sign = {"min": "-", "max": "+", None: ""}[config["checkpoint"]["mode"]]
        text = f"{sign}{config['checkpoint']['monitor'] or metrics[0]}"
    objectives = tuple(_objective(word.strip()) for word in str(text).split(","))
    allowed = [*metrics, *OF_THE_SUMMARY, LATENCY]
    for objective in objectives:
        if objective.name not in allowed:
            raise UserError(
                f"objective: no run reports '{objective.name}'; it may be {', '.join(allowed)} (- before "
                "it: less is better, +: more is), several with commas"
            )
    return objectives


def _objective(text: str) -> SearchObjective:
    """``+NAME``: more is better, ``-NAME``: less is, ``NAME``: as usual for it.

    >>> [_objective(n).direction for n in ("val/acc1", "-val/acc1", "val/kd_loss", "+val/kd_loss", "images_per_s")]
    ['maximize', 'minimize', 'minimize', 'maximize', 'maximize']
    >>> {_objective(n).direction for n in ("params", "-params", "latency_ms", "step_ms_median", "peak_memory_mb", "wall_s")}
    {'minimize'}
    """
    name = text.lstrip("+-")
    if text == name:
        return SearchObjective(name, maximize=not less_is_better(name))
    return SearchObjective(name, maximize=text.startswith("+"))


def _search_space(spaces: Sequence[Space], request: Request) -> tuple[Space, ...]:
    """Checks that a run takes each choice and both ends of each range, and finds the keys that only some choices of
    another key bring about.

    Args:
        spaces: as parsed, in any order.
        request: the trials' command line; each choice and each end is resolved with it.

    Returns:
        The spaces, a key before those below it; ``above`` and ``under`` are set where a key lies below another searched key
        with choices. A range of integers becomes one of floats where the setting is a float.

    Raises:
        UserError: a choice, or an end of a range, that no run takes.
    """
    ordered: list[Space] = []
    words: dict[str, list[str]] = {}  # by key: words of a command line under which it exists
    for space in sorted(spaces, key=lambda space: space.key.count(".")):
        over = [s for s in ordered if s.choices and space.key.startswith(f"{s.key}.")]
        if not over:
            words[space.key] = []
            values = _as_resolved(request, [], space)
        else:
            above = over[-1]  # the nearest searched key whose choices this key lies below
            under = []
            values = []
            refusal = None
            for choice in above.choices or ():
                tried = [*words[above.key], as_word(above.key, choice)]
                try:
                    values = _as_resolved(request, tried, space)
                except UserError as error:
                    refusal = error
                    continue
                under.append(choice)
                words[space.key] = tried
            if not under:
                raise UserError(
                    f"search.{space.key}: no choice of search.{above.key} takes it: {refusal}"
                )
            space = replace(space, above=above.key, under=tuple(under))
        if space.integer and any(isinstance(value, float) for value in values):
            # 0..1 of a key whose value is a float
            space = replace(space, low=float(space.low), high=float(space.high))
        ordered.append(space)
    return tuple(ordered)


def _as_resolved(request: Request, words: list[str], space: Space) -> list[Any]:
    """The examples of a space (all choices, or both ends) as a run's configuration has them, resolved one by one.

    None stands for an example under which the configuration has no such key.

    Args:
        request: the run's command line.
        words: settings under which the key exists.
        space: of the key.

    Raises:
        UserError: a run refuses an example.
    """
    resolved = []
    for example in space.examples():
        given = [*request.overrides, *words, as_word(space.key, example)]
        run = Run.of(replace(request, overrides=given))
        value = None
        for key, of_key in flatten(run.config).items():
            if key.replace(".init_args.", ".") == space.key:
                value = of_key
        resolved.append(value)
    return resolved


def first_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first setting that differs between ``before``, when the search was begun, and ``now``, as ``KEY=8, now 4``; ""
    where none does.
    """
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            return f"{key}={before.get(key)}, now {now.get(key)}"
    return ""

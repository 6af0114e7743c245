"""A search from its beginning to its result, and the winner's second trial on fresh seeds."""

from collections.abc import Sequence
from typing import Any

from kd.data.sources import ImageFolder
from kd.errors import UserError
from kd.fleet.tuning.page import write_page
from kd.fleet.tuning.plan import LATENCY, SearchObjective, SearchPlan
from kd.fleet.tuning.results import Confirmation, chosen, print_table, words_of, write_best
from kd.fleet.tuning.search import Search, say
from kd.fleet.tuning.study import FrozenTrial
from kd.fleet.tuning.trials import TrialPlace, TrialRun, deal, gpus_of, lock_trial, split_metrics
from kd.storage.elsewhere import text_of
from kd.storage.writing import write_text

CONFIRMED = "confirm.txt"
"""File of a search's folder that holds the confirmation's text."""
TEST = "test"
"""The split that a confirmation also measures, where the pictures have one."""


def search_and_confirm(plan: SearchPlan) -> int:
    """Searches (or revives a trial), writes what was found after each trial, prints the table, confirms the winner.

    Returns the exit status, 1 without a result.

    Trials run on shares of this machine, or of a Ray cluster (``jobs=ray``), which is joined for as long as this takes.
    """
    jobs = plan.jobs
    accelerator = plan.config["trainer"]["accelerator"]
    if isinstance(jobs, int):
        return _search_and_confirm(plan, deal(jobs, gpus_of(accelerator)))
    from kd.fleet.tuning.ray_cluster import joined

    with joined(jobs, accelerator) as free:
        return _search_and_confirm(plan, free)


def _search_and_confirm(plan: SearchPlan, free: Sequence[TrialPlace]) -> int:
    """Runs or revives a search, prints its table and confirms the winner; returns the exit code, 1 without a result.

    Args:
        plan: of the search.
        free: the places that trials may use.
    """
    search = Search(plan, free, changed=_write)
    if plan.revive is not None:
        revive(search)
    else:
        say(f"kd-tune: {plan.folder}: {search.progress()}")
        search.run()
    _write(search)
    print_table(search.study, plan)
    if chosen(search.study, plan) is None:
        print("kd-tune: no trial has ended well")
        return 1
    if plan.confirm:
        text = "\n".join(confirmation.text() for confirmation in confirm(search, plan))
        print(text)
        write_text(plan.folder / CONFIRMED, f"{text}\n")
        _write(search)
    print(f"best: kd-train {plan.folder / 'best.yaml'}")
    return 0


def _write(search: Search) -> None:
    """Writes ``best.yaml`` and the page as they are now, the page with an earlier confirmation where there is one."""
    write_best(search.study, search.plan, search.extra)
    saved = search.plan.folder / CONFIRMED
    write_page(search.study, search.plan, text_of(saved) if saved.is_file() else "")


def revive(search: Search) -> None:
    """Trains to its end the trial that ``revive`` names, from its last checkpoint; its result is added as a trial, once.

    Raises:
        UserError: no trial was stopped early, or not this one; or it is running already, or fails.
    """
    objectives = search.plan.objectives
    trial = _stopped_trial(search)
    folder = search.plan.folder_of(trial.number)
    owner = lock_trial(folder)
    if owner is None:
        raise UserError(f"revive: trial {trial.number} is running already")
    job = TrialRun(folder, search.plan.config["recipe"], search.free[0], owner)
    search.wait([job], [[]])
    summary = job.summary()
    if summary.get("status") != "done":
        raise UserError(f"revive: trial {trial.number} failed: {job.reason()}")
    values = [objective.value(job.run) for objective in objectives]
    notes = {
        "folder": str(job.run),
        "wall_s": summary["wall_s"],
        "epochs": summary["epochs"],
        "revived": trial.number,
    }
    if all(t.user_attrs.get("revived") != trial.number for t in search.study.trials("complete")):
        search.study.add(trial, values, notes)
    say(f"trial {trial.number}, trained to its end: {objectives[0].name} {values[0]:.4g}")


def _stopped_trial(search: Search) -> FrozenTrial:
    """The trial that ``revive`` names, by its number or as the best by its last metric.

    Raises:
        UserError: no trial was stopped early, or not this one.
    """
    name = search.plan.revive
    sign = -1
    if search.plan.objectives[0].maximize:
        sign = 1
    stopped = {str(trial.number): trial for trial in search.study.trials("pruned")}

    def last_metric(trial: FrozenTrial) -> float:
        return sign * list(trial.intermediate_values.values())[-1]

    if name == "best" and stopped:
        return max(stopped.values(), key=last_metric)
    if name in stopped:
        return stopped[name]
    allowed = "none was stopped early"
    if stopped:
        allowed = f"those are {', '.join(stopped)}"
    raise UserError(
        f"revive: must be best, or a trial that was stopped early, got '{name}'; {allowed}"
    )


def confirm(search: Search, plan: SearchPlan) -> list[Confirmation]:
    """Runs the winner and the default on the same fresh seeds; on a test split too, where the data have one.

    Returns:
        The comparison by the first objective, and by the same metric on the test split, where there is one and all runs
        could be measured on it.

    Raises:
        UserError: the first objective is ``latency_ms``, or a run is being trained elsewhere, or fails.
    """
    objective = plan.objectives[0]
    if objective.name == LATENCY:
        raise UserError(f"confirm: {LATENCY} does not depend on the seed; name an accuracy first")
    first_seed = plan.config["seed"] + 1
    seeds = tuple(range(first_seed, first_seed + plan.confirm))
    jobs = _train_on_seeds(search, plan, seeds)

    name = objective.name
    values = [objective.value(job.run) for job in jobs]
    confirmations = [_compared(objective, name, seeds, values)]
    metric = name.removeprefix("val/")
    if metric != name and has_test_split(plan):
        tested = []
        for job in jobs:
            metrics = split_metrics(job.run, TEST, job.slot)
            tested.append(metrics.get(metric))
        if None not in tested:
            confirmations.append(_compared(objective, f"{TEST}/{metric}", seeds, tested))
    return confirmations


def _train_on_seeds(search: Search, plan: SearchPlan, seeds: Sequence[int]) -> list[TrialRun]:
    """Trains the winner on each seed, and the default on each; runs that have ended well are not trained again.

    Returns:
        The runs in their folders below ``confirm/``: the winner's by seed, then the default's by seed.

    Raises:
        UserError: one is being trained by another process, or has failed.
    """
    best = chosen(search.study, plan)
    assert best is not None
    shared = [*plan.items, *search.extra]
    command_lines = {
        f"trial-{best.number}": [*shared, *words_of(best, plan)],
        "default": shared,
    }
    jobs = []
    items = []
    for name, command_line in command_lines.items():
        for seed in seeds:
            folder = plan.folder / "confirm" / f"{name}-seed-{seed}"
            owner = lock_trial(folder)
            if owner is None:
                raise UserError(f"confirm: {folder} is being trained by another process")
            jobs.append(TrialRun(folder, plan.config["recipe"], search.free[0], owner))
            items.append([*command_line, f"seed={seed}"])
    search.wait(jobs, items)
    for job in jobs:
        if job.summary().get("status") != "done":
            raise UserError(f"confirm: {job.folder} failed: {job.reason()}")
    return jobs


def _compared(
    objective: SearchObjective, name: str, seeds: tuple[int, ...], values: list[Any]
) -> Confirmation:
    """One objective of the winner and of the default, on the same seeds.

    Args:
        objective: whether more is better.
        name: of the number for people.
        seeds: that both were trained on.
        values: the winner's, then the default's.
    """
    of_winner = tuple(values[: len(seeds)])
    of_default = tuple(values[len(seeds) :])
    return Confirmation(name, objective.maximize, seeds, of_winner, of_default)


def has_test_split(plan: SearchPlan) -> bool:
    """Whether the data are a folder (``ImageFolder``) that has a ``test`` beside ``train`` and ``val``."""
    source = plan.config["data"]["source"] or {}
    class_path = str(source.get("class_path", ""))
    arguments = source.get("init_args") or {}
    root = arguments.get("root")
    if not root or not class_path.endswith(".ImageFolder"):
        return False
    return ImageFolder(str(root)).has(TEST)

"""A search from its beginning to its result, and the winner's second trial on fresh seeds."""

from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from kd.data.sources import ImageFolder
from kd.errors import UserError
from kd.fleet.tuning.plan import LATENCY, SearchPlan
from kd.fleet.tuning.results import Confirmation, best_trials, chosen, words_of, write_best
from kd.fleet.tuning.search import Search, say
from kd.fleet.tuning.study import JOURNAL
from kd.fleet.tuning.trials import Pool, Slot, TrialRun, deal, gpus_of, lock_trial, split_metrics
from kd.report.terminal import print_parts
from kd.run.trust import made_here, remember_made
from kd.storage.writing import write_text

CONFIRMED = "confirm.txt"
"""File of a search's folder that holds the confirmation's text."""
TEST = "test"
"""The split that a confirmation also measures, where the pictures have one."""


def search_and_confirm(plan: SearchPlan) -> int:
    """Searches on shares of this machine, writes ``best.yaml`` after each trial, prints the table, confirms the winner.

    Returns the exit status, 1 without a result.
    """
    search = Search(plan, deal(plan.jobs, gpus_of(plan.config["trainer"]["accelerator"])), _write)
    say(f"kd-tune: {plan.folder}: {search.progress()}")
    search.run()
    _write(search)
    print_parts([best_trials(search.study, plan)])
    if chosen(search.study, plan) is None:
        print("kd-tune: no trial has ended well")
        return 1
    if plan.confirm:
        text = "\n".join(confirmation.text() for confirmation in confirm(search, plan))
        print(text)
        write_text(plan.folder / CONFIRMED, f"{text}\n")
    elif plan.trials > 1:
        print(
            "The best of many trials on one validation set is optimistic: confirm=3 runs it and the default on fresh seeds."
        )
    print("all trials as charts, by the package optuna-dashboard:")
    print(f"  optuna-dashboard {plan.folder / JOURNAL}")
    print(f"best: kd-train {plan.folder / 'best.yaml'}")
    return 0


def _write(search: Search) -> None:
    """Writes ``best.yaml`` as it is now."""
    write_best(search.study, search.plan, search.extra)


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

    def compared(name: str, values: list[float]) -> Confirmation:
        """The winner's values, then the default's."""
        of_winner = tuple(values[: len(seeds)])
        of_default = tuple(values[len(seeds) :])
        return Confirmation(name, objective.maximize, seeds, of_winner, of_default)

    validated = [objective.value(job.run) for job in jobs]
    confirmations = [compared(objective.name, validated)]
    metric = objective.name.removeprefix("val/")
    is_metric = metric != objective.name
    if is_metric and has_test_split(plan):
        tested = []
        for job in jobs:
            metrics = split_metrics(job.run, TEST, job.slot)
            if metric in metrics:
                tested.append(metrics[metric])
        if len(tested) == len(jobs):
            on_test = compared(f"{TEST}/{metric}", tested)
            confirmations.append(on_test)
    return confirmations


def _train_on_seeds(search: Search, plan: SearchPlan, seeds: Sequence[int]) -> list[TrialRun]:
    """Trains the winner on each seed, and the default on each; runs that have ended well are not trained again.

    Returns:
        The runs in their folders below ``confirm/``: the winner's by seed, then the default's by seed.

    Raises:
        UserError: one is being trained by another process, was not begun on this machine, or has failed.
    """
    best = chosen(search.study, plan)
    assert best is not None
    shared = [*plan.items, *search.extra]
    command_lines = {
        f"trial-{best.number}": [*shared, *words_of(best, plan)],
        "default": shared,
    }
    jobs = []
    waiting = []
    for name, command_line in command_lines.items():
        for seed in seeds:
            folder = plan.folder / "confirm" / f"{name}-seed-{seed}"
            owner = lock_trial(folder)
            if owner is None:
                raise UserError(f"confirm: {folder} is being trained by another process")
            check_began_here(folder)
            job = TrialRun(folder, plan.config["recipe"], search.pool.free[0], owner)
            jobs.append(job)
            waiting.append((job, [*command_line, f"seed={seed}"]))

    def begin(slot: Slot) -> TrialRun | None:
        if not waiting:
            return None
        job, items = waiting.pop(0)
        job.slot = slot
        job.begin(items)
        return job

    Pool(search.pool.free).run(begin, lambda job: job.status is not None)
    for job in jobs:
        if job.summary().get("status") != "done":
            raise UserError(f"confirm: {job.folder} failed: {job.reason()}")
    return jobs


def check_began_here(folder: Path) -> None:
    """Checks that a folder of a confirmation holds no run, or one that this machine began: the folder of a search may be a
    stranger's. The first time it leaves a random word there, which the cache folder notes.

    Raises:
        UserError: names the folder.
    """
    mark = folder / "began"
    if mark.is_file() and made_here(mark):
        return
    if any(folder.glob("*/")):
        raise UserError(
            f"confirm: {folder} holds a run that this machine did not begin; remove it to train it anew"
        )
    text = uuid4().hex
    write_text(mark, text)
    remember_made(text.encode())


def has_test_split(plan: SearchPlan) -> bool:
    """Whether the data are a folder (``ImageFolder``) that has a ``test`` beside ``train`` and ``val``."""
    source = plan.config["data"]["source"] or {}
    class_path = str(source.get("class_path", ""))
    arguments = source.get("init_args") or {}
    root = arguments.get("root")
    if not root or not class_path.endswith(".ImageFolder"):
        return False
    return ImageFolder(str(root)).has(TEST)

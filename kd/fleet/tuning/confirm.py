"""A search from its beginning to its result, and the winner's second trial on fresh seeds."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

from kd.errors import UserError
from kd.fleet.tuning.plan import LATENCY, SearchPlan
from kd.fleet.tuning.results import best_trials, chosen_trial, trial_words
from kd.fleet.tuning.search import Search, say
from kd.fleet.tuning.study import JOURNAL
from kd.fleet.tuning.trials import Pool, Slot, TrialRun, deal, lock_trial, usable_gpus
from kd.proof.seeds import gain_over_seeds
from kd.report.terminal import print_parts
from kd.run.trust import made_here, remember_made
from kd.storage.writing import write_text


def search_and_confirm(plan: SearchPlan) -> int:
    """Searches on shares of this machine, prints the table, and with ``confirm=N`` confirms the winner.

    Returns:
        The exit status: 1 where no trial has ended well.

    Raises:
        UserError: as of :class:`Search`, :meth:`Search.run` and :func:`confirm`.
        Stopped: as of :meth:`Search.run`.
    """
    search = Search(
        plan, deal(plan.options.jobs, usable_gpus(plan.config["trainer"]["accelerator"]))
    )
    say(f"kd-tune: {plan.folder}: {search.progress()}")
    search.run()
    print_parts([best_trials(search.study, plan)])
    if chosen_trial(search.study, plan) is None:
        print("kd-tune: no trial has ended well")
        return 1
    if plan.options.confirm:
        print(confirm(search))
    elif plan.options.trials > 1:
        print(
            "The best of many trials on one validation set is optimistic: confirm=3 runs it and the default on fresh seeds."
        )
    print(f"charts, by that package: optuna-dashboard {plan.folder / JOURNAL}")
    print(f"best: kd-train {plan.folder / 'best.yaml'}")
    return 0


def confirm(search: Search) -> str:
    """Trains the winner and the default on the same fresh seeds; runs that have ended well are not trained again.

    Returns:
        The comparison by the first objective (:func:`compared`).

    Raises:
        UserError: the first objective is ``latency_ms``; or a run is being trained by another process, was not begun on
            this machine, or has failed.
        Stopped: by a signal; the runs have saved.
    """
    plan = search.plan
    objective = plan.objectives[0]
    if objective.name == LATENCY:
        raise UserError(f"confirm: {LATENCY} does not depend on the seed; name an accuracy first")
    best = chosen_trial(search.study, plan)
    assert best is not None
    shared = [*plan.items, *search.extra]
    ways = {f"trial-{best.number}": [*shared, *trial_words(best, plan)], "default": shared}
    first_seed = plan.config["seed"] + 1
    seeds = range(first_seed, first_seed + plan.options.confirm)
    jobs = []
    waiting = []
    for way, words in ways.items():
        for seed in seeds:
            folder = plan.folder / "confirm" / f"{way}-seed-{seed}"
            owner = lock_trial(folder)
            if owner is None:
                raise UserError(f"confirm: {folder} is being trained by another process")
            check_began_here(folder)
            job = TrialRun(folder, plan.config["recipe"], search.pool.slots[0], owner)
            jobs.append(job)
            waiting.append((job, job.train([*words, f"seed={seed}"])))

    def begin(slot: Slot) -> tuple[TrialRun, Iterator[None]] | None:
        if not waiting:
            return None
        waiting[0][0].slot = slot
        return waiting.pop(0)

    Pool(search.pool.slots).run(begin)
    for job in jobs:
        if not job.is_done:
            raise UserError(f"confirm: {job.folder} failed: {job.reason()}")
    values = [objective.value(job.run) for job in jobs]
    of_winner, of_default = values[: plan.options.confirm], values[plan.options.confirm :]
    return compared(objective.name, objective.maximize, list(seeds), of_winner, of_default)


def compared(
    objective: str,
    maximize: bool,
    seeds: Sequence[int],
    best: Sequence[float],
    default: Sequence[float],
) -> str:
    """The winner and the default on the same fresh seeds, in words: both means, and the 95 % interval of their difference.

    The interval is paired by seed (:func:`kd.proof.seeds.gain_over_seeds`); one seed has none. The difference "survives"
    where the winner is better by more than half of the interval.

    Args:
        objective: its name.
        maximize: whether more is better.
        seeds: the fresh seeds.
        best: the winner's values, by seed.
        default: those of the recipe as the user gave it, without searched settings.
    """
    means = (
        f"{objective} on fresh seeds {tuple(seeds)}: the winner {statistics.mean(best):.4g}, "
        f"the default {statistics.mean(default):.4g} (means)"
    )
    difference = gain_over_seeds(best, default)
    if math.isinf(difference.half):
        return f"{means}; one seed says nothing of the spread."
    gain = difference.mean if maximize else -difference.mean
    verdict = "survives" if gain > difference.half else "does not survive"
    if gain <= 0:
        verdict = "is none: the default is as good or better"
    interval = f"{difference.mean:+.4g} ± {round(difference.half, 6):.2g} (95 %, paired by seed)"
    return f"{means}. The difference, {interval}, {verdict}."


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

"""A search from its beginning to its result, and the winner's second trial on fresh seeds."""

from collections.abc import Sequence
from typing import Any

from kd.data.sources import ImageFolder
from kd.errors import UserError
from kd.fleet.tuning.page import write_page
from kd.fleet.tuning.plan import LATENCY, SearchObjective, SearchPlan
from kd.fleet.tuning.results import BEST, Confirmation, chosen, print_table, write_best
from kd.fleet.tuning.search import Search, say
from kd.fleet.tuning.trials import TrialPlace, TrialRun, deal, gpus_of, lock_trial, split_metrics
from kd.storage.elsewhere import text_of
from kd.storage.writing import write_text

CONFIRMED = "confirm.txt"
TEST = "test"


def search_and_confirm(plan: SearchPlan) -> int:
    """Searches, writes what was found after each trial, prints the table; returns the exit status."""
    jobs, accelerator = plan.jobs, plan.config["trainer"]["accelerator"]
    if isinstance(jobs, int):
        return _search_and_confirm(plan, deal(jobs, gpus_of(accelerator)))
    from kd.fleet.tuning.ray_cluster import joined

    with joined(jobs, accelerator) as free:
        return _search_and_confirm(plan, free)


def _search_and_confirm(plan: SearchPlan, free: Sequence[TrialPlace]) -> int:
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
        text = "\n".join(found.text() for found in confirm(search, plan))
        print(text)
        write_text(plan.folder / CONFIRMED, f"{text}\n")
        _write(search)
    print(f"best: kd-train {plan.folder / 'best.yaml'}")
    return 0


def _write(search: Search) -> None:
    write_best(search.study, search.plan)
    saved = search.plan.folder / CONFIRMED
    write_page(search.study, search.plan, text_of(saved) if saved.is_file() else "")


def revive(search: Search) -> None:
    """Trains to its end the trial that ``revive`` names; its result counts as a trial of its own.

    Raises:
        UserError: no trial was stopped early, or not this one.
    """
    objectives, wanted = search.plan.objectives, search.plan.revive
    sign = 1 if objectives[0].maximize else -1
    pruned = {str(t.number): t for t in search.study.trials("pruned")}
    if wanted == "best" and pruned:
        like = max(pruned.values(), key=lambda t: sign * list(t.intermediate_values.values())[-1])
    elif wanted in pruned:
        like = pruned[wanted]
    else:
        had = f"those are {', '.join(pruned)}" if pruned else "none was stopped early"
        raise UserError(
            f"revive: must be best, or a trial that was stopped early, got '{wanted}'; {had}"
        )
    owner = lock_trial(search.folder_of(like.number))
    if owner is None:
        raise UserError(f"revive: trial {like.number} is running already")
    job = TrialRun(
        search.folder_of(like.number), search.plan.config["recipe"], search.free[0], owner
    )
    search.wait([job], [[]])
    summary = job.summary()
    if summary.get("status") != "done":
        raise UserError(f"revive: trial {like.number} failed: {job.reason()}")
    values = [objective.value(job.run) for objective in objectives]
    notes = {
        "folder": str(job.run),
        "wall_s": summary["wall_s"],
        "epochs": summary["epochs"],
        "revived": like.number,
    }
    search.study.add(like, values, notes)
    say(f"trial {like.number}, trained to its end: {objectives[0].name} {values[0]:.4g}")


def confirm(search: Search, plan: SearchPlan) -> list[Confirmation]:
    """Runs the winner and the default on the same fresh seeds; on a test split too, where the data have one."""
    objective = plan.objectives[0]
    if objective.name == LATENCY:
        raise UserError(f"confirm: {LATENCY} does not depend on the seed; name an accuracy first")
    seeds = tuple(plan.config["seed"] + i for i in range(1, plan.confirm + 1))
    best = chosen(search.study, plan)
    assert best is not None
    jobs, items = [], []
    winner = [f"recipe={plan.folder / BEST}", "--trust"]
    for name, begin in (
        (f"trial-{best.number}", winner),
        ("default", [*plan.items, *search.extra]),
    ):
        for seed in seeds:
            folder = plan.folder / "confirm" / f"{name}-seed-{seed}"
            owner = lock_trial(folder)
            if owner is None:
                raise UserError(f"confirm: {folder} is being trained by another process")
            jobs.append(TrialRun(folder, plan.config["recipe"], search.free[0], owner))
            items.append([*begin, f"seed={seed}"])
    search.wait(jobs, items)
    for job in jobs:
        if job.summary().get("status") != "done":
            raise UserError(f"confirm: {job.folder} failed: {job.reason()}")
    confirmed = [
        _compared(objective, objective.name, seeds, [objective.value(job.run) for job in jobs])
    ]
    metric = objective.name.removeprefix("val/")
    if metric != objective.name and has_test_split(plan):
        found = [split_metrics(job.run, TEST, job.slot).get(metric) for job in jobs]
        if all(value is not None for value in found):
            confirmed.append(_compared(objective, f"{TEST}/{metric}", seeds, found))
    return confirmed


def _compared(
    objective: SearchObjective, name: str, seeds: tuple[int, ...], values: list[Any]
) -> Confirmation:
    half = len(seeds)
    return Confirmation(name, objective.maximize, seeds, tuple(values[:half]), tuple(values[half:]))


def has_test_split(plan: SearchPlan) -> bool:
    """Whether the pictures' folder has a ``test`` beside ``train`` and ``val``."""
    source = plan.config["data"]["source"] or {}
    root = str((source.get("init_args") or {}).get("root") or "")
    return (
        str(source.get("class_path", "")).endswith(".ImageFolder")
        and bool(root)
        and ImageFolder(root).has(TEST)
    )

"""A trial that was stopped early, trained to its end."""

from kd.errors import UserError
from kd.fleet.tuning.search import Search
from kd.fleet.tuning.trials import Job, Owner


def revive(search: Search) -> None:
    """Trains the trial that ``revive`` names; what it reaches counts as a trial of its own.

    Raises:
        UserError: no such trial.
    """
    objectives, wanted = search.plan.objectives, search.plan.revive
    pruned = search.study.trials("pruned")
    sign = 1 if objectives[0].maximize else -1
    numbers = {str(t.number): t for t in pruned}
    if wanted == "best" and pruned:
        like = max(pruned, key=lambda t: sign * list(t.intermediate_values.values())[-1])
    elif wanted in numbers:
        like = numbers[wanted]
    else:
        had = f"stopped early were {', '.join(numbers)}" if numbers else "none was stopped early"
        raise UserError(f"revive: '{wanted}' is not best and no such trial; {had}")
    owner = Owner.take(search.folder_of(like.number))
    if owner is None:
        raise UserError(f"revive: trial {like.number} runs already")
    job = Job(search.folder_of(like.number), search.plan.config["recipe"], search.free[0], owner)
    search.wait([job], [[]])
    summary = job.summary()
    if summary.get("status") != "done":
        raise UserError(f"revive: trial {like.number} failed: {job.reason()}")
    values = [objective.value(job.run) for objective in objectives]
    notes = {"folder": str(job.run), "wall_s": summary["wall_s"], "epochs": summary["epochs"], "revived": like.number}
    search.study.add(like, values, notes)
    search.say(f"trial {like.number}, trained to its end: {objectives[0].name} {values[0]:.4g}")

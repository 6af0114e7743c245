"""What a run takes and costs, as it is and with a change: ``kd-report RUN --what-if``, and the page's tables of costs.

:func:`predict` is the one function that predicts; the tables list what it says of several changes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

from kd.config.kinds import Checked, Range, checked_group
from kd.errors import UserError
from kd.report.facts import DATA_WAIT_AT, Facts
from kd.report.limits import cores_needed
from kd.report.metric import short
from kd.report.ratio import times
from kd.report.records import PHASES
from kd.report.step_facts import phase_share
from kd.report.tables import Cell, Table

WAITS = 0.05  # share of the step that waits for its batch: below it, those who make batches keep up
# the worst of followed advice against prediction in scripts/bench/truth_cpu_2026-11-22.md
ERROR = 0.23
BY_PICTURE = ("data", "h2d", "teacher", "student", "forward", "loss", "backward")
"""Phases whose time grows with the batch."""


# -- what is to be different -------------------------------------------------------------------------------------------
@checked_group
class Change(Checked):
    """What is to be different; ``None`` stays as it was."""

    cache: bool | None = None
    """The teacher's answers are kept (on) or computed each time (off)."""
    pixels: bool | None = None
    """The pixels of cached views are kept too, or made each time."""
    workers: Annotated[int, Range(">= 0")] | None = None
    """Loader processes of each training process."""
    gpus: Annotated[int, Range(">= 1")] | None = None
    """Training processes."""
    machines: Annotated[int, Range(">= 1")] | None = None
    """Training machines, each with as many processes as now."""
    batch_size: Annotated[int, Range(">= 1")] | None = None
    """Pictures of a training process's batch."""
    epochs: Annotated[int, Range(">= 1")] | None = None
    """Epochs of the run."""
    price: Annotated[float, Range(">= 0")] | None = None
    """Price of an hour of the whole changed job."""

    @property
    def of_the_step(self) -> bool:
        """Whether it changes anything but the price."""
        return any(
            getattr(self, one.name) is not None for one in fields(Change) if one.name != "price"
        )

    def processes(self, facts: Facts) -> int:
        """Training processes of the changed run."""
        if self.machines:
            return self.machines * facts.processes
        return self.gpus or facts.devices

    def larger(self, facts: Facts) -> float:
        """How many times as large the changed run's batch is."""
        return (self.batch_size or facts.header["batch_size"]) / facts.header["batch_size"]


# -- a step when other processes make its batches ----------------------------------------------------------------------
def waits(facts: Facts) -> bool:
    """Whether the step waits for its batch for long enough that other makers could help."""
    return phase_share(facts.phases, "data") >= WAITS


def batch_ms(facts: Facts) -> float:
    """Ms that one loader process takes to make a batch; an upper bound where loader processes keep up. Without any it is
    the step's wait.

    Where the step waits, ``n`` processes deliver one batch each in ``n`` steps. Where they keep up, their CPU time a
    step is known: the cores that they use times the step, over the share of the time in which they compute. Where these
    were not sampled either, it is the step without its wait.
    """
    wait_ms = facts.phases.get("data", 0.0)
    if facts.workers == 0:
        return wait_ms
    if waits(facts):
        return facts.workers * facts.step_ms
    if not facts.loading_cores:
        return facts.step_ms - wait_ms
    return facts.loading_cores / facts.processes * facts.step_ms / max(0.05, facts.loading_busy)


def maker_ms(facts: Facts) -> float:
    """Ms that one process of a data tier would take for a batch, on its own core.

    It is estimated from a loader process: the part of its time for a batch in which it computes; where the
    step waits and waits for a core were recorded, in which it has a core. Without loader processes it is the step's wait.
    """
    loader_ms = batch_ms(facts)
    if facts.workers == 0:
        return loader_ms
    if not waits(facts) or facts.loader_wait is None:
        return facts.loading_busy * loader_ms
    return (1 - facts.loader_wait) * loader_ms


def _tier_step(facts: Facts, phases: Mapping[str, float], change: Change) -> float:
    """Ms of a step of a run with a data tier, whose machines stay: where the step waits for them, they make as many
    pictures a second as now.
    """
    if not waits(facts):
        return sum(phases.values())
    more_processes = change.processes(facts) / facts.devices
    made = facts.step_ms * more_processes * change.larger(facts)
    return max(_without_data(phases), made)


def _without_data(phases: Mapping[str, float]) -> float:
    """Ms of a step without its wait for data."""
    return sum(ms for name, ms in phases.items() if name != "data")


def _local_step(facts: Facts, phases: Mapping[str, float], change: Change) -> float:
    """Ms of a step with loader processes on the training machines.

    The longest of the rest of the step, a loader's time for a batch over the number of loaders, and, where training
    computes on the same cores or there are more loaders than cores, the CPU time of both over the cores. Without loader
    processes the batch's time is added.
    """
    rest = _without_data(phases)
    if change.workers is None and facts.workers == 0:
        return rest + phases.get("data", 0.0)
    cores = facts.cores / facts.processes
    loader_ms = batch_ms(facts)
    busy = facts.loading_busy
    count = facts.workers
    if change.workers is not None:
        count = change.workers
    loader_ms *= change.larger(facts)
    if count == 0:
        return rest + loader_ms
    cpu_limit = 0.0
    if facts.cpu or count > cores:
        cpu_ms = busy * loader_ms + facts.threads * rest
        cpu_limit = cpu_ms / cores
    of_loaders = loader_ms / count
    return max(rest, of_loaders, cpu_limit)


# -- the run -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outlook:
    """A run's time and cost."""

    step_ms: float
    """Milliseconds of a mean step over the run."""
    images_per_s: float
    """Pictures a second, of all processes."""
    hours: float
    """Hours of the whole run, start-up and validation included."""
    cost: float | None
    """Price of the whole run; None: not known."""


def predict(facts: Facts, change: Change) -> Outlook:
    """Time and cost of the run with ``change``; with none, of the run as it is.

    More processes share an epoch's batches. The part of an all-reduce that is not hidden grows as the traffic of a
    ring's, ``(n - 1) / n`` for ``n`` processes. Computing grows with the batch. Every process brings as many cores as now;
    a data tier stays as it is.

    Raises:
        UserError: too little is recorded to predict from, or the change contradicts the run.
    """
    _check_known(facts, change)
    epochs = change.epochs or facts.length
    if not facts.step_ms or not epochs or not math.isfinite(facts.batches_per_epoch):
        raise UserError(f"{facts.run.folder}: too few records to predict from")
    more_processes = change.processes(facts) / facts.devices
    more = more_processes * change.larger(facts)  # pictures a step
    step = facts.step_ms
    if change.of_the_step:
        step = _mean_step(facts, change, epochs)
    steps = facts.batches_per_epoch * epochs / more

    # Seconds of the run that its records do not explain, where it is not longer than it was.
    unexplained_s = 0.0
    if facts.length == facts.epochs_done:
        wall_s = 3600 * (facts.hours or 0.0)
        unexplained_s = max(0.0, wall_s - facts.recorded_s)
    validation_ms = facts.phases.get("validation", 0.0)
    steps_s = steps * (step + validation_ms) / 1000
    seconds = facts.startup_s + steps_s + unexplained_s
    hours = seconds / 3600
    pictures = facts.header["batch_size"] * facts.devices * more
    images_per_s = 1000 * pictures / step
    price = _price(facts, change)
    cost = None
    if price is not None:
        cost = price * hours
    return Outlook(step, images_per_s, hours, cost)


def _check_known(facts: Facts, change: Change) -> None:
    """Refuses changes of what a training has not, or of what its records do not say.

    Raises:
        UserError: a cache without a teacher; makers of a data tier; loader processes of a loader that does not say how many
            it has.
    """
    folder = facts.run.folder
    if change.cache and not facts.has_teacher:
        raise UserError(f"cache: {folder} has no teacher whose answers could be kept")
    if change.workers is not None and facts.tier is not None:
        raise UserError(f"workers: {folder} had a data tier, whose machines can't be predicted")
    if change.workers is not None and not facts.workers_known:
        raise UserError(f"workers: the loader of {folder} does not say how many processes it has")


def _mean_step(facts: Facts, change: Change, epochs: float) -> float:
    """Ms of the mean step over all epochs, of three kinds.

    The first ``views`` epochs compute the teacher's answers; later ones read them from a cache, if there is one; and
    where the cache holds the pixels too, those also make no views. What was cached before the run counts as read.

    Raises:
        UserError: no recorded step shows what the changed run would do, or pixels without a cache.
    """
    folder = facts.run.folder
    larger = change.larger(facts)
    phases = {}
    for name, ms in facts.phases.items():
        if name in PHASES:
            phases[name] = ms * larger if name in BY_PICTURE else ms
    ring = _ring(change.processes(facts)) / (_ring(facts.devices) or 1.0)
    phases["communication"] = phases.get("communication", 0.0) * ring

    cached = facts.cached if change.cache is None else change.cache
    computed = epochs  # epochs that compute the teacher's answers
    if cached:
        computed = min(max(0.0, facts.views - facts.views_before), epochs)
    if computed and facts.teacher_ms is None:
        raise UserError(f"{folder}: its cache was full, so that no step shows the teacher's time")
    teacher_ms = (facts.teacher_ms or 0.0) * larger
    computed_ms = _step(facts, {**phases, "teacher": teacher_ms}, change)
    read_ms = _step(facts, {**phases, "teacher": 0.0}, change)
    if change.pixels and not cached:
        raise UserError("pixels: are kept beside a cache's answers; cache=on pixels=on")
    if facts.has_pixels and change.pixels is False:
        raise UserError(
            f"{folder}: its views' pixels were cached, so that no step shows their cost"
        )
    made = epochs  # epochs that decode and augment pictures
    if change.pixels and not facts.has_pixels:
        made = min(facts.views, epochs)
    ready_ms = sum(ms for name, ms in phases.items() if name not in ("teacher", "data"))
    all_ms = computed * computed_ms + (made - computed) * read_ms + (epochs - made) * ready_ms
    return all_ms / epochs


def _ring(processes: int) -> float:
    """The share of the gradients that each process sends twice in a ring all-reduce (Patarasuk and Yuan, 2009)."""
    return (processes - 1) / processes


def _step(facts: Facts, phases: dict[str, float], change: Change) -> float:
    """Ms of a step with these phases, by the loader processes or the data tier that make its batches."""
    if facts.tier is None:
        return _local_step(facts, phases, change)
    return _tier_step(facts, phases, change)


def _price(facts: Facts, change: Change) -> float | None:
    """Price of an hour of the changed job, which grows with its processes; None: not known."""
    if change.price is not None or facts.price is None:
        return change.price
    return facts.price * change.processes(facts) / facts.devices


def outlook_table(facts: Facts, change: Change) -> Table:
    """The run as it is, and as it would be with ``change``; the note says what that assumes.

    Raises:
        UserError: see :func:`predict`.
    """
    now, then = predict(facts, Change()), predict(facts, change)
    numbers = {
        "step ms": (now.step_ms, then.step_ms),
        "images/s": (now.images_per_s, then.images_per_s),
        "hours": (now.hours, then.hours),
        "cost": (now.cost, then.cost),
    }
    rows = []
    for name, (before, after) in numbers.items():
        if before is not None or after is not None:
            rows.append([name, short(before), short(after), times(before, after)])
    notes = []
    if change.batch_size:
        notes.append("assumed: computing and loading grow with the batch")
    if change.processes(facts) > 1 == facts.devices:
        notes.append(
            "assumed: no step waits for gradients. A run of one process measures no communication, so how far this is "
            "from the truth is not known: kd-scale measures it"
        )
    else:
        notes.append(
            f"give or take {ERROR:.0%}: the worst error of followed advice in the truth bench"
        )
    return Table("", ["", "as it is", "what if", ""], rows, "\n".join(notes))


# -- the page's tables -------------------------------------------------------------------------------------------------
def input_costs(facts: Facts) -> Table | None:
    """What other inputs would cost: their step, price and saving; None where no GPU waits for want of cores.

    The first row is measured, the others are at best: views made on the device; machines without GPUs beside that make
    all batches, so many that no step waits. What a row saves is of the cost where prices are known, else of the time.
    """
    needed, cores = cores_needed(facts), facts.cores / facts.processes
    waiting = phase_share(facts.phases, "data") >= DATA_WAIT_AT
    if facts.run.tier or facts.cpu or not waiting or needed <= cores:
        return None
    rest = facts.step_ms - facts.phases["data"]
    makers_of_process = maker_ms(facts) / rest
    makers = facts.devices * math.ceil(round(makers_of_process, 6))
    ways = [
        ("as it is", facts.step_ms, facts.price),
        ("data.engine=device, or dali", rest, facts.price),
    ]
    for name, machine in (facts.header.get("input_machines") or {}).items():
        if machine.get("gpus"):
            continue
        count = max(1, math.ceil(makers / machine["vcpus"]))
        price = None
        if facts.price is not None:
            price = facts.price + count * machine["price"]
        way = f"data.engine=ray on {count} {name} beside"
        ways.append((way, rest, price))

    rows: list[list[Cell]] = []
    for name, step_ms, price in ways:
        part = step_ms / facts.step_ms
        cost = None
        if price is not None:
            cost = price * step_ms / 3600
        if price and facts.price:
            part *= price / facts.price
        saved = ""
        if rows:
            percent = 100 * (1 - part)
            saved = f"{percent:.0f}"
        shown_ms = round(step_ms, 1)
        rows.append([name, shown_ms, short(price), short(cost), saved])
    note = (
        f"{needed} cores a GPU needed, {cores:g} there; {makers} of other machines would make all batches "
        "(data.engine=ray). The first row is measured, the others are at best."
    )
    saves = f"saves ({'cost' if facts.price else 'time'}, %)"
    columns = ["input", "ms a step", "an hour", "1000 steps", saves]
    return Table("What another input would cost", columns, rows, note)


def tier_table(facts: Facts) -> Table | None:
    """What each machine of the data tier has made, and below it the queue; None without a tier."""
    tier = facts.tier
    if tier is None:
        return None
    rows: list[list[Cell]] = []
    for machine in tier.machines.values():
        name = f"{machine['name']} ({machine['node']})"
        if machine["gone"]:
            name += " gone"
        seconds = tier.seconds or math.inf
        rates = [round(machine[what] / seconds, 2) for what in ("batches", "mb", "busy_s")]
        rows.append([name, machine["cores"], machine["makers"], machine["batches"], *rates])
    note = (
        f"{tier.ready:.1f} batches were ready on average, of {tier.may_ask} that a training process may ask for ahead "
        f"(data.tier.queue_mb); {tier.made_again} were made again after an end, {tier.made_twice} twice."
    )
    columns = ["machine", "cores", "makers", "batches", "batches/s", "MB/s", "cores at work"]
    return Table("Data tier", columns, rows, note)

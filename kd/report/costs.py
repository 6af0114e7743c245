"""What a run takes and costs, as it is and with a change: ``kd-report RUN --what-if``, and the page's tables of costs.

:func:`outlook_of` is the one function that predicts; the tables list what it says of several changes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

from kd.config.kinds import Checked, Range
from kd.errors import UserError
from kd.report.facts import DATA_WAIT_AT, Facts
from kd.report.limits import batch_ms, cores_needed, step_with, waits
from kd.report.metric import short
from kd.report.ratio import Number, times
from kd.report.records import PHASES
from kd.report.step_facts import phase_share
from kd.report.tables import Cell, Table

# the worst of followed advice against prediction in scripts/bench/truth_cpu_2026-11-22.md
ERROR = 0.23
BY_PICTURE = ("data", "h2d", "teacher", "student", "forward", "loss", "backward")
"""Phases whose time grows with the batch."""


# -- what is to be different -------------------------------------------------------------------------------------------
class Change(Checked):
    """What is to be different; ``None`` stays as it was."""

    cache: bool | None = None
    """The teacher's answers are kept (on) or computed each time (off)."""
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
def maker_ms(facts: Facts) -> float:
    """Ms that one process of a data tier would take for a batch, on its own core.

    It is estimated from a loader process: its time for a batch, times the share of that time in which it computes. Where the
    step waits for batches, and waits for a core were recorded, that is the share in which the process has a core. Without
    loader processes it is the step's wait.
    """
    if facts.workers == 0:
        return batch_ms(facts)
    if not waits(facts) or facts.loader_wait is None:
        return facts.loading_busy * batch_ms(facts)
    return (1 - facts.loader_wait) * batch_ms(facts)


def _step(facts: Facts, phases: Mapping[str, float], change: Change) -> float:
    """Ms of a changed run's step, with its wait for data worked out anew.

    A data tier stays: where the step waits for the tier now, the tier makes as many pictures a second as now.

    Args:
        facts: of the run as it is.
        phases: ms of the changed step by phase; ``data``, its wait so far, counts only where a tier keeps up.
        change: what is to be different.
    """
    rest = sum(ms for name, ms in phases.items() if name != "data")
    larger = change.larger(facts)
    if facts.tier is None:
        workers = facts.workers if change.workers is None else change.workers
        return step_with(facts, workers, rest, larger * batch_ms(facts))
    if not waits(facts):
        return sum(phases.values())
    more_processes = change.processes(facts) / facts.devices
    return max(rest, facts.step_ms * more_processes * larger)


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
    cost: Number
    """Price of the whole run; None: not known."""


def outlook_of(facts: Facts, change: Change) -> Outlook:
    """Time and cost of the run with ``change``; with ``Change()``, of the run as it is.

    More processes share an epoch's batches. The part of an all-reduce that is not hidden grows as the traffic of a
    ring's, ``(n - 1) / n`` for ``n`` processes. Computing grows with the batch; an epoch's validation takes as long with any
    batch. Every process brings as many cores as now; a data tier stays as it is.

    Raises:
        UserError: too little is recorded to predict from, or the change contradicts the run.
    """
    _check_known(facts, change)
    epochs = change.epochs or facts.length
    if not facts.step_ms or not epochs or not math.isfinite(facts.batches_per_epoch):
        raise UserError(f"{facts.run.folder}: too few records to predict from")
    processes = change.processes(facts) / facts.devices
    more = processes * change.larger(facts)  # pictures a step
    step = facts.step_ms
    if change.of_the_step:
        step = _mean_step(facts, change, epochs)
    validation_ms = change.larger(facts) * facts.phases.get("validation", 0.0)
    steps_s = facts.batches_per_epoch * epochs / more * (step + validation_ms) / 1000

    # Seconds that the records do not explain: known of a run that has trained its whole length.
    unexplained_s = 0.0
    if facts.length == facts.epochs_done:
        unexplained_s = max(0.0, 3600 * (facts.hours or 0.0) - facts.recorded_s)
    hours = (facts.startup_s + steps_s + unexplained_s) / 3600
    images_per_s = 1000 * facts.header["batch_size"] * facts.devices * more / step
    price = change.price
    if price is None and facts.price is not None:
        price = facts.price * processes
    return Outlook(step, images_per_s, hours, None if price is None else price * hours)


def _check_known(facts: Facts, change: Change) -> None:
    """Refuses a change of something that the training lacks, or that its records do not say.

    Raises:
        UserError: the change wants a cache, and there is no teacher; or it wants another number of loader processes, and a
            data tier makes the batches, or the loader does not say how many processes it has.
    """
    folder = facts.run.folder
    if change.cache and not facts.has_teacher:
        raise UserError(f"cache: {folder} has no teacher whose answers could be kept")
    if change.workers is not None and facts.tier is not None:
        raise UserError(f"workers: {folder} had a data tier, whose machines can't be predicted")
    if change.workers is not None and not facts.workers_known:
        raise UserError(f"workers: the loader of {folder} does not say how many processes it has")


def _mean_step(facts: Facts, change: Change, epochs: float) -> float:
    """Ms of the changed run's mean step over all ``epochs``.

    Without a cache all epochs compute the teacher's answers. With one the first epochs compute them, one epoch for each view
    that the cache lacked before the run, and the later epochs read them.

    Raises:
        UserError: no recorded step shows what the changed run would do.
    """
    larger = change.larger(facts)
    phases = {name: ms for name, ms in facts.phases.items() if name in PHASES}
    for name in phases.keys() & set(BY_PICTURE):
        phases[name] *= larger
    ring = _ring(change.processes(facts)) / (_ring(facts.devices) or 1.0)
    phases["communication"] = phases.get("communication", 0.0) * ring

    cached = facts.cached if change.cache is None else change.cache
    computed = epochs  # epochs that compute the teacher's answers
    if cached:
        computed = min(max(0.0, facts.views - facts.views_before), epochs)
    if computed and facts.teacher_ms is None:
        full = "its cache was full, so that no step shows the teacher's time"
        raise UserError(f"{facts.run.folder}: {full}")
    teacher_ms = (facts.teacher_ms or 0.0) * larger
    computed_ms = _step(facts, {**phases, "teacher": teacher_ms}, change)
    read_ms = _step(facts, {**phases, "teacher": 0.0}, change)
    return (computed * computed_ms + (epochs - computed) * read_ms) / epochs


def _ring(processes: int) -> float:
    """The share of the gradients that each process sends twice in a ring all-reduce (Patarasuk and Yuan, 2009)."""
    return (processes - 1) / processes


def outlook_table(facts: Facts, change: Change) -> Table:
    """The run as it is, and as it would be with ``change``; the note says what that assumes.

    Raises:
        UserError: see :func:`outlook_of`.
    """
    now = outlook_of(facts, Change())
    then = outlook_of(facts, change)
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
    note = f"give or take {ERROR:.0%}: the worst error of followed advice in the truth bench"
    if change.processes(facts) > 1 == facts.devices:
        note = (
            "assumed: no step waits for gradients. A run of one process measures no communication, so how far this is "
            "from the truth is not known: kd-scale measures it"
        )
    if change.batch_size:
        note = f"assumed: computing and loading grow with the batch\n{note}"
    return Table("", ["", "as it is", "what if", ""], rows, note)


# -- the page's tables -------------------------------------------------------------------------------------------------
def input_costs(facts: Facts) -> Table | None:
    """What other inputs would cost: their step, price and saving.

    None on CPUs, with a data tier, and where the step does not wait for data or the GPUs have cores enough.

    The first row is measured, the others are at best: views made on the device; machines without GPUs beside that make
    all batches, so many that no step waits. What a row saves is of the cost where prices are known, else of the time.
    """
    needed = cores_needed(facts)
    cores = facts.cores / facts.processes
    waiting = phase_share(facts.phases, "data") >= DATA_WAIT_AT
    if facts.run.tier or facts.cpu or not waiting or needed <= cores:
        return None
    rest = facts.step_ms - facts.phases["data"]
    makers = facts.devices * math.ceil(round(maker_ms(facts) / rest, 6))
    price = facts.price
    ways = {"as it is": (facts.step_ms, price), "data.engine=device, or dali": (rest, price)}
    for name, machine in (facts.header.get("input_machines") or {}).items():
        if not machine.get("gpus"):
            count = max(1, math.ceil(makers / machine["vcpus"]))
            beside = None if price is None else price + count * machine["price"]
            ways[f"data.engine=ray on {count} {name} beside"] = rest, beside

    rows: list[list[Cell]] = []
    for name, (step_ms, of_way) in ways.items():
        part = step_ms / facts.step_ms
        if of_way and price:
            part *= of_way / price
        cost = None if of_way is None else of_way * step_ms / 3600
        saved = f"{100 * (1 - part):.0f}" if rows else ""
        rows.append([name, round(step_ms, 1), short(of_way), short(cost), saved])
    note = (
        f"{needed} cores a GPU needed, {cores:g} there; {makers} of other machines would make all batches "
        "(data.engine=ray). The first row is measured, the others are at best."
    )
    saves = f"saves ({'cost' if price else 'time'}, %)"
    columns = ["input", "ms a step", "an hour", "1000 steps", saves]
    return Table("What another input would cost", columns, rows, note)

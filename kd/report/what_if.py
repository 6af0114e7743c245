"""What a changed run would take and cost, from the records of one that has run: ``kd-report RUN --what-if``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kd.errors import UserError
from kd.report.facts import BUSY, Facts
from kd.report.metric import short
from kd.report.prices import machines_of
from kd.report.ratio import times
from kd.report.records import PHASES
from kd.report.step_facts import phase_share

KEYS = (
    "cache=on|off, pixels=on|off, workers=N, gpus=N, epochs=N, price=PER_HOUR, "
    "data_machines=N, data_cores=N, data_instance=NAME[:spot]"
)
LEAST = {"workers": 0, "data_machines": 0, "gpus": 1, "epochs": 1, "data_cores": 1}
WAITS = 0.05  # share of the step that waits for its batch: below it, those who make batches keep up
# the worst of followed advice against prediction in scripts/bench/truth_cpu_2026-11-22.md
ERROR = 0.23


# -- what is to be different -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Change:
    """What is to be different; ``None`` stays as it was."""

    cache: bool | None = None
    """The teacher's answers are kept (True) or computed each time."""
    pixels: bool | None = None
    """The pixels of cached views are kept too, or made each time."""
    workers: int | None = None
    """Loader processes of each training process; with a data tier the makers of each."""
    gpus: int | None = None
    """Training processes."""
    epochs: int | None = None
    """Epochs of the run."""
    price: float | None = None
    """Price of an hour of the whole changed job."""
    data_machines: int | None = None
    """Machines of a data tier that make all batches; 0: none do."""
    data_cores: int | None = None
    """Cores of each data machine."""
    data_instance: str | None = None
    """Name of the data machines in the run's table of prices, for their cores and price."""

    def __post_init__(self) -> None:
        """Refuses changes that contradict each other; the errors name the words of the command line."""
        if self.data_cores and self.data_instance:
            raise UserError(
                "data_cores: must be left out with data_instance, whose cores are in the table of prices"
            )
        if self.data_machines == 0 and (self.data_cores or self.data_instance):
            raise UserError("data_machines: must be >= 1 with data_cores or data_instance, got 0")

    @property
    def of_the_tier(self) -> bool:
        """Whether it changes the data tier: its machines, their cores or their kind."""
        return (
            self.data_machines is not None
            or self.data_cores is not None
            or self.data_instance is not None
        )


def read_change(items: list[str]) -> Change:
    """``["cache=on", "gpus=8"]`` -> what is to be different.

    Raises:
        UserError: another key, a value that it does not take, or keys that contradict each other.
    """
    values: dict[str, Any] = {}
    for item in items:
        key, _, text = item.partition("=")
        if key in values:
            raise UserError(f"{key}: given twice")
        if key in ("cache", "pixels"):
            if text not in ("on", "off"):
                raise UserError(f"{key}: must be on or off, got '{text}'")
            values[key] = text == "on"
        elif key == "data_instance":
            values[key] = text.removesuffix(":on_demand")
        elif key == "price":
            values[key] = _number(key, text, 0, "number")
        elif key in LEAST:
            values[key] = int(_number(key, text, LEAST[key], "whole number"))
        else:
            raise UserError(f"--what-if: no key '{key}'; known: {KEYS}")
    return Change(**values)


def _number(key: str, text: str, low: int, kind: str) -> float:
    """The number in the word ``key=text`` of the command line.

    Args:
        key: of the word.
        text: its value.
        low: the least that it may be.
        kind: "number" or "whole number".

    Raises:
        UserError: anything else.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    in_range = math.isfinite(number) and number >= low
    if not in_range or (kind == "whole number" and number != int(number)):
        raise UserError(f"{key}: must be a {kind} >= {low}, got '{text}'")
    return number


@dataclass(frozen=True)
class DataMachines:
    """Machines of a data tier."""

    count: int
    """How many."""
    cores: float
    """Cores of each, on average."""
    price: float | None = None
    """Price of an hour of one; None: not known."""
    named: str = ""
    """For people: ``c5.18xlarge`` or ``72 cores each``."""

    @property
    def hourly(self) -> float | None:
        """Price of an hour of all machines; None where it is not known."""
        return None if self.price is None else self.count * self.price


# -- the machines of a data tier ---------------------------------------------------------------------------------------
def present(facts: Facts) -> DataMachines | None:
    """The run's own tier, as it was at the end; ``None`` without one, without a batch, or without a maker at the end.

    Cores and price are means over its machines; the price is 0 where they also train.
    """
    tier = facts.tier
    if tier is None or not tier.makers or not tier.total("batches"):
        return None
    count = len(tier.present)
    priced = _priced_tier(facts)
    return DataMachines(
        count=count, cores=tier.cores / count, price=None if priced is None else priced.each
    )


@dataclass(frozen=True)
class _PricedTier:
    """The data machines whose price is part of the job's: those that it began with, lost ones among them."""

    count: int
    """How many."""
    hourly: float
    """Price of an hour of all of them."""

    @property
    def each(self) -> float:
        """Price of an hour of one, on average."""
        return self.hourly / self.count


def _priced_tier(facts: Facts) -> _PricedTier | None:
    """The data machines that the job's price has, with their price; None: not known.

    The price is 0 where they also train; else as the job of ``kd-launch`` has it, or ``monitor.instances`` and the
    table of prices.
    """
    hosts = {header.get("host") for header in facts.run.headers.values()}
    present_count = len(facts.tier.present) if facts.tier else 0
    if facts.tier and all(machine["name"] in hosts for machine in facts.tier.present):
        return _PricedTier(max(1, present_count), 0.0)
    for group in facts.run.job.get("groups") or []:
        if isinstance(group, dict) and group.get("name") == "data":
            price = group.get("price_per_hour")
            if price is not None:
                number, _, _ = str(group.get("machines", "")).partition(" x ")  # 4 x c5.18xlarge
                count = int(number) if number.isdecimal() else present_count
                return _PricedTier(max(1, count), float(price))
    known = facts.header.get("input_machines") or {}
    monitor = facts.run.config.get("monitor") or {}
    total_count = 0
    hourly = 0.0
    for count, name in machines_of(monitor.get("instances") or []):
        machine = known.get(name)
        if machine is not None and not machine.get("gpus"):  # those with GPUs train
            total_count += count
            hourly += count * machine["price"]
    if not hourly:
        return None
    return _PricedTier(total_count, hourly)


def wanted(facts: Facts, change: Change) -> DataMachines | None:
    """The tier of the changed run, or ``None``. What ``change`` does not name stays as it is.

    Raises:
        UserError: the number of the machines, or their cores, are not known.
    """
    now = present(facts)
    if change.of_the_tier and facts.run.tier and now is None:
        raise UserError(f"{facts.run.folder}: too few records of its data tier to predict from")
    if change.data_machines == 0:
        return None
    if not change.of_the_tier:
        return now

    # One machine of the changed tier.
    if change.data_instance is not None:
        machine = _instance(facts, change.data_instance)
    elif change.data_cores is not None:
        machine = DataMachines(
            count=1, cores=change.data_cores, price=None, named=f"{change.data_cores} cores each"
        )
    elif now is not None:
        machine = DataMachines(
            count=1, cores=now.cores, price=now.price, named=f"{now.cores:g} cores each"
        )
    else:
        raise UserError(
            "data_machines: needs data_cores=N, or data_instance=NAME of the run's table of prices"
        )

    # How many of them.
    count = change.data_machines
    if count is None:
        if now is None:
            raise UserError(
                "data_machines: must be given (data_machines=N): the run had no data tier"
            )
        count = now.count
    return replace(machine, count=count)


def _instance(facts: Facts, name: str) -> DataMachines:
    """One machine of the run's table of prices, for its cores and price.

    Raises:
        UserError: the run has no table, or the table has no vcpus of this machine.
    """
    known = facts.header.get("input_machines") or {}
    if not known:
        raise UserError(
            "data_instance: needs a run with a table of prices and vcpus (monitor.prices=FILE); "
            "data_cores=N predicts without prices"
        )
    if name not in known:
        raise UserError(
            f"data_instance: no price and vcpus of '{name}'; known: {', '.join(list(known)[:20])}"
        )
    return DataMachines(count=1, cores=known[name]["vcpus"], price=known[name]["price"], named=name)


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
    """Ms that one process of a data tier takes for a batch, on its own core.

    Without a tier it is estimated from a loader process: the part of its time for a batch in which it computes; where the
    step waits and waits for a core were recorded, in which it has a core. Without loader processes it is the step's wait.
    """
    tier, now = facts.tier, present(facts)
    if tier is None or now is None:
        loader_ms = batch_ms(facts)
        if facts.workers == 0:
            return loader_ms
        if not waits(facts) or facts.loader_wait is None:
            return facts.loading_busy * loader_ms
        return (1 - facts.loader_wait) * loader_ms

    # With n makers for each training process, a maker has n steps for a batch.
    n_steps_ms = facts.step_ms * _makers(facts, now, facts.devices, None)
    if waits(facts) and not _waits_for_transfer(facts):
        return n_steps_ms
    return min(1000 * tier.batch_s, n_steps_ms)


def _waits_for_transfer(facts: Facts) -> bool:
    """Whether the step waits for the transfer to the training processes: makers are idle, or the queue holds fewer batches
    than there are makers.
    """
    if facts.tier is None or not waits(facts):
        return False
    return facts.tier.queue_is_short or facts.tier.busy < BUSY


def _makers(facts: Facts, machines: DataMachines, processes: int, workers: int | None) -> float:
    """Makers of a training process: one on each core, shared evenly, or ``workers`` up to the cores.

    Where ``workers`` is None, the ``data.num_workers`` of a run that has a tier counts.

    Args:
        facts: of the run.
        machines: that prepare data.
        processes: that train.
        workers: wanted for each.
    """
    cores = machines.count * machines.cores
    if workers is None and facts.tier is not None:
        data = facts.run.config.get("data") or {}
        setting = data.get("num_workers")
        if isinstance(setting, int):
            workers = setting
    if workers:
        return min(workers, cores / processes)
    return float(cores // processes or cores / processes)


def tier_step(
    facts: Facts,
    phases: Mapping[str, float],
    machines: DataMachines,
    processes: int,
    workers: int | None = None,
) -> float:
    """Ms of a step with a data tier: the longest of the rest of the step, the makers' time and the transfer.

    Args:
        facts: of the run.
        phases: ms of the step by phase; ``data`` counts only where the wait is too short for :func:`waits`.
        machines: the tier.
        processes: training processes.
        workers: makers of each of them; None: one on each core, or as the run has set.
    """
    rest = sum(phases.values())
    if waits(facts):
        rest = _without_data(phases)
    makers = _makers(facts, machines, processes, workers)
    made = maker_ms(facts) / makers
    transfer = 0.0
    if _waits_for_transfer(facts):
        transfer = facts.step_ms
    return max(rest, made, transfer)


def _without_data(phases: Mapping[str, float]) -> float:
    """Ms of a step without its wait for data."""
    return sum(ms for name, ms in phases.items() if name != "data")


def local_step(facts: Facts, phases: Mapping[str, float], workers: int | None) -> float:
    """Ms of a step with loader processes on the training machines.

    The longest of the rest of the step, a loader's time for a batch over the number of loaders, and, where training
    computes on the same cores or there are more loaders than cores, the CPU time of both over the cores. Without loader
    processes the batch's time is added.

    Args:
        facts: of the run.
        phases: ms of the step by phase.
        workers: loader processes of each training process; None: as many as now, or as the cores allow.
    """
    rest = _without_data(phases)
    if workers is None and facts.workers == 0 and facts.tier is None:
        return rest + phases.get("data", 0.0)
    cores = facts.cores / facts.processes
    if facts.tier is None:
        loader_ms = batch_ms(facts)
        busy = facts.loading_busy
        present = facts.workers
    else:
        loader_ms = 1000 * facts.tier.batch_s
        busy = 1.0
        present = max(1, int(cores - facts.threads))
    count = present if workers is None else workers
    if count == 0:
        return rest + loader_ms
    cpu_limit = 0.0
    if facts.cpu or count > cores:
        cpu_ms = busy * loader_ms + facts.threads * rest
        cpu_limit = cpu_ms / cores
    return max(rest, loader_ms / count, cpu_limit)


def machines_needed(facts: Facts, rest: float, cores: float) -> int:
    """Data machines with which no step of ``rest`` ms waits.

    Args:
        facts: of the run.
        rest: ms of a step without its wait for data.
        cores: of each machine.
    """
    makers_of_process = math.ceil(round(maker_ms(facts) / rest, 6))
    return max(1, math.ceil(facts.devices * makers_of_process / cores))


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
    ring's, ``(n - 1) / n`` for ``n`` processes. Every process brings as many cores as now; a data tier that ``change`` does
    not name stays as it is.

    Raises:
        UserError: too little is recorded to predict from, or the change contradicts the run.
    """
    _check_known(facts, change)
    epochs = change.epochs or facts.length
    if not facts.step_ms or not epochs or not math.isfinite(facts.batches_per_epoch):
        raise UserError(f"{facts.run.folder}: too few records to predict from")
    processes = int(change.gpus or facts.devices)
    step = facts.step_ms
    if replace(change, price=None) != Change():
        step = _mean_step(facts, change, epochs, processes)
    steps = facts.batches_per_epoch * epochs * facts.devices / processes

    # Seconds of the run that its records do not explain, where it is not longer than it was.
    unexplained_s = 0.0
    if facts.length == facts.epochs_done:
        run_s = 3600 * (facts.hours or 0.0)
        unexplained_s = max(0.0, run_s - facts.recorded_s)
    validation_ms = facts.phases.get("validation", 0.0)
    steps_s = steps * (step + validation_ms) / 1000
    hours = (facts.startup["s"] + steps_s + unexplained_s) / 3600
    images_per_s = 1000 * facts.header["batch_size"] * processes / step
    price = _price(facts, change)
    cost = None
    if price is not None:
        cost = price * hours
    return Outlook(step, images_per_s, hours, cost)


def _check_known(facts: Facts, change: Change) -> None:
    """Refuses changes of what a training has not, or of what its records do not say.

    Raises:
        UserError: a cache without a teacher; a data tier of a training that is not kd's; loader processes of a loader
            that does not say how many it has.
    """
    if change.cache and not facts.has_teacher:
        raise UserError(f"cache: {facts.run.folder} has no teacher whose answers could be kept")
    if facts.of_kd:
        return
    if change.of_the_tier:
        raise UserError(
            f"data_machines: needs a run of kd-train, {facts.run.folder} is another training"
        )
    if change.workers is not None and not facts.workers_known:
        raise UserError(
            f"workers: the loader of {facts.run.folder} does not say how many processes it has"
        )


def _mean_step(facts: Facts, change: Change, epochs: float, processes: int) -> float:
    """Ms of the mean step over all epochs, of three kinds.

    The first ``views`` epochs compute the teacher's answers; later ones read them from a cache, if there is one; and
    where the cache holds the pixels too, those also make no views. What was cached before the run counts as read.

    Args:
        facts: of the run.
        change: to it.
        epochs: of the changed run.
        processes: likewise.

    Raises:
        UserError: no recorded step shows what the changed run would do, or pixels without a cache.
    """
    phases = {name: ms for name, ms in facts.phases.items() if name in PHASES}
    communication = phases.get("communication", 0.0)
    phases["communication"] = communication * _ring(processes) / (_ring(facts.devices) or 1.0)

    cached = facts.cached if change.cache is None else change.cache
    computed = epochs  # epochs that compute the teacher's answers
    if cached:
        computed = min(max(0.0, facts.views - facts.views_before), epochs)
    if computed and facts.teacher_ms is None:
        raise UserError(
            f"{facts.run.folder}: its cache was full, so that no step shows the teacher's time"
        )
    computed_ms = _step(facts, {**phases, "teacher": facts.teacher_ms or 0.0}, change)
    read_ms = _step(facts, {**phases, "teacher": 0.0}, change)
    if change.pixels and not cached:
        raise UserError("pixels: are kept beside a cache's answers; cache=on pixels=on")
    if facts.has_pixels and change.pixels is False:
        raise UserError(
            f"{facts.run.folder}: its views' pixels were cached, so that no step shows their cost"
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
    """Ms of a step with these phases, by the loader processes or the data tier that make its batches.

    Args:
        facts: of the run as it was.
        phases: ms of the step by phase, as changed so far.
        change: who makes the batches, and for how many processes.

    Raises:
        UserError: a data tier without processes, or one whose machines are not known.
    """
    processes = int(change.gpus or facts.devices)
    machines = wanted(facts, change)
    if machines is None:
        return local_step(facts, phases, change.workers)
    if change.workers == 0:
        raise UserError(
            "workers: must be >= 1 with a data tier, got 0 (data_machines=0 is without one)"
        )
    return tier_step(facts, phases, machines, processes, change.workers)


def _price(facts: Facts, change: Change) -> float | None:
    """Price of an hour of the changed job; None: not known. The run's own price includes its tier, with the machines
    that were lost on the way.

    The training machines' price grows with the number of processes; the tier's is replaced.
    """
    if change.price is not None or facts.price is None:
        return change.price
    now, then = present(facts), wanted(facts, change)
    more_processes = (change.gpus or facts.devices) / facts.devices

    # What the job's price has of a tier: 0 without one; of machines of the same size by the changed tier's price.
    tier_now: float | None = 0.0
    if now is not None:
        priced = _priced_tier(facts)
        tier_now = None if priced is None else priced.hourly
    if now is not None and then is not None and tier_now is None:
        same_machines = then.cores == now.cores
        tier_now = now.count * then.price if same_machines and then.price is not None else None
    if tier_now is not None:
        training = (facts.price - tier_now) * more_processes
        if then is None:
            return training
        if then.hourly is not None:
            return training + then.hourly

    # The tier's price is not known: the job's is, as long as the tier stays as it is.
    tier_stays = not change.of_the_tier
    if now is not None and then is not None:
        tier_stays = tier_stays or (now.count, now.cores) == (then.count, then.cores)
    return facts.price * more_processes if tier_stays else None


def lines(facts: Facts, change: Change) -> list[str]:
    """For the terminal: the run as it is, and as it would be.

    Raises:
        UserError: see :func:`predict`.
    """
    now, then = predict(facts, Change()), predict(facts, change)
    rows = [("", "as it is", "what if", "")]
    numbers = {
        "step ms": (now.step_ms, then.step_ms),
        "images/s": (now.images_per_s, then.images_per_s),
        "hours": (now.hours, then.hours),
        "cost": (now.cost, then.cost),
    }
    for name, (before, after) in numbers.items():
        if before is not None or after is not None:
            rows.append((name, short(before), short(after), times(before, after)))
    text = [
        f"{name:<10} {before:>12} {after:>12} {factor:>8}" for name, before, after, factor in rows
    ]
    text.append(f"give or take {ERROR:.0%}: the worst error of followed advice in the truth bench")
    if change.gpus and facts.devices == 1 and change.gpus > 1:
        text.append("a run of one process measures no communication: the figures are the best case")
    return text

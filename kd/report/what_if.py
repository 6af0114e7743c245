"""What a changed run would take and cost, from the records of one that has run: ``kd-report RUN --what-if``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kd.errors import UserError
from kd.report.facts import BUSY, Facts
from kd.report.metric import short
from kd.report.prices import counted
from kd.report.ratio import times
from kd.report.records import PHASES
from kd.report.step_facts import phase_share

KEYS = (
    "cache=on|off, pixels=on|off, workers=N, gpus=N, epochs=N, price=PER_HOUR, "
    "data_machines=N, data_cores=N, data_instance=NAME[:spot]"
)
LEAST = {"workers": 0, "data_machines": 0, "gpus": 1, "epochs": 1, "data_cores": 1}
WAITS = 0.05  # of the step waits for its batch: below, who makes them keeps up
ERROR = (
    0.23  # the worst of followed advice against prediction in scripts/bench/truth_cpu_2026-11-22.md
)


# -- what is to be different -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Change:
    """What is to be different; ``None`` stays as it was."""

    cache: bool | None = None
    """The teacher's answers are kept (True) or computed each time."""
    pixels: bool | None = None
    """The pixels of cached views are kept too, or made each time."""
    workers: int | None = None
    """Loader processes of each training process; with a data tier its processes."""
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
        if self.data_cores and self.data_instance:
            raise UserError(
                "data_cores: must be left out with data_instance, whose cores are in the table of prices"
            )
        if self.data_machines == 0 and (self.data_cores or self.data_instance):
            raise UserError("data_machines: must be >= 1 with data_cores or data_instance, got 0")

    @property
    def of_the_tier(self) -> bool:
        """Whether it changes the data tier."""
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
    found: dict[str, Any] = {}
    for item in items:
        key, _, value = item.partition("=")
        if key in found:
            raise UserError(f"{key}: given twice")
        if key in ("cache", "pixels"):
            if value not in ("on", "off"):
                raise UserError(f"{key}: must be on or off, got '{value}'")
            found[key] = value == "on"
        elif key == "data_instance":
            found[key] = value.removesuffix(":on_demand")
        elif key == "price":
            found[key] = _number(key, value, 0, "number")
        elif key in LEAST:
            found[key] = int(_number(key, value, LEAST[key], "whole number"))
        else:
            raise UserError(f"--what-if: no key '{key}'; known: {KEYS}")
    return Change(**found)


def _number(key: str, value: str, low: int, kind: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (
        math.isfinite(number) and number >= low and (kind == "number" or number == int(number))
    ):
        raise UserError(f"{key}: must be a {kind} >= {low}, got '{value}'")
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
    """The run's own tier, as it was at the end; ``None`` without one, and where too little of it is recorded."""
    tier = facts.tier
    if tier is None or not tier.makers or not tier.total("batches"):
        return None
    count, paid = len(tier.present), _paid(facts)
    return DataMachines(count, tier.cores / count, None if paid is None else paid / count)


def _paid(facts: Facts) -> float | None:
    """Price of an hour of the run's data machines, by its job or ``monitor.instances``; 0 where they also train."""
    hosts = {header.get("host") for header in facts.run.headers.values()}
    if facts.tier and all(machine["name"] in hosts for machine in facts.tier.present):
        return 0.0
    for group in facts.run.job.get("groups") or []:
        if (
            isinstance(group, dict)
            and group.get("name") == "data"
            and group.get("price_per_hour") is not None
        ):
            return float(group["price_per_hour"])
    known, monitor = facts.header.get("input_machines") or {}, facts.run.config.get("monitor") or {}
    machines = counted(monitor.get("instances") or [])
    return (
        float(sum(count * known[name]["price"] for count, name in machines if name in known))
        or None
    )


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
    if change.data_instance is not None:
        kind = _instance(facts, change.data_instance)
    elif change.data_cores is not None:
        kind = DataMachines(1, change.data_cores, None, f"{change.data_cores} cores each")
    elif now is not None:
        kind = DataMachines(1, now.cores, now.price, f"{now.cores:g} cores each")
    else:
        raise UserError(
            "data_machines: needs data_cores=N, or data_instance=NAME of the run's table of prices"
        )
    if change.data_machines is None and now is None:
        raise UserError("data_machines: must be given (data_machines=N): the run had no data tier")
    return DataMachines(
        change.data_machines or (now.count if now else 0), kind.cores, kind.price, kind.named
    )


def _instance(facts: Facts, name: str) -> DataMachines:
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
    return DataMachines(1, known[name]["vcpus"], known[name]["price"], name)


# -- a step when other processes make its batches ----------------------------------------------------------------------
def waits(facts: Facts) -> bool:
    """Whether the step waits for its batch for long enough that other makers could help."""
    return phase_share(facts.phases, "data") >= WAITS


def batch_ms(facts: Facts) -> float:
    """Ms that one loader process takes to make a batch; where they keep up, at most."""
    wait = facts.phases.get("data", 0.0)
    if facts.workers == 0:
        return wait
    if waits(facts):
        return facts.workers * facts.step_ms
    if not facts.loading_cores:
        return facts.step_ms - wait
    return facts.loading_cores / facts.processes * facts.step_ms / max(0.05, facts.loading_busy)


def maker_ms(facts: Facts) -> float:
    """Ms that one process of a data tier takes for a batch, on its own core; without a tier by a loader process's."""
    tier, now = facts.tier, present(facts)
    if tier is None or now is None:
        cost = batch_ms(facts)
        if facts.workers == 0:
            return cost
        if not waits(facts) or facts.loader_wait is None:
            return facts.loading_busy * cost
        return (1 - facts.loader_wait) * cost
    kept_up = facts.step_ms * _makers(facts, now, facts.devices, None)
    return kept_up if waits(facts) and not _held_up(facts) else min(1000 * tier.batch_s, kept_up)


def _held_up(facts: Facts) -> bool:
    """Whether the step waits for the transfer to the training processes: makers are idle, or the queue is full."""
    return (
        facts.tier is not None
        and waits(facts)
        and (facts.tier.queue_is_short or facts.tier.busy < BUSY)
    )


def _makers(facts: Facts, machines: DataMachines, processes: int, workers: int | None) -> float:
    """Makers of a training process: one on each core, shared evenly, or ``data.num_workers`` up to the cores."""
    cores = machines.count * machines.cores
    fixed = (
        (facts.run.config.get("data") or {}).get("num_workers") if facts.tier is not None else None
    )
    if workers is None and isinstance(fixed, int):
        workers = fixed
    return (
        min(workers, cores / processes)
        if workers
        else float(cores // processes or cores / processes)
    )


def tier_step(
    facts: Facts,
    phases: Mapping[str, float],
    machines: DataMachines,
    processes: int,
    workers: int | None = None,
) -> float:
    """Ms of a step with a data tier: the longest of the rest of the step, the makers' time and the transfer."""
    rest = sum(ms for name, ms in phases.items() if name != "data")
    rest += 0.0 if waits(facts) else phases.get("data", 0.0)
    made = maker_ms(facts) / _makers(facts, machines, processes, workers)
    return max(rest, made, facts.step_ms if _held_up(facts) else 0.0)


def local_step(facts: Facts, phases: Mapping[str, float], workers: int | None) -> float:
    """Ms of a step with loader processes on the training machines, at least the CPU time over the cores."""
    rest = sum(ms for name, ms in phases.items() if name != "data")
    if workers is None and facts.workers == 0 and facts.tier is None:
        return rest + phases.get("data", 0.0)
    cores = facts.cores / facts.processes
    if facts.tier is not None:
        cost, busy, count = 1000 * facts.tier.batch_s, 1.0, workers
        count = max(1, int(cores - facts.threads)) if count is None else count
    else:
        cost, busy, count = (
            batch_ms(facts),
            facts.loading_busy,
            facts.workers if workers is None else workers,
        )
    if count == 0:
        return rest + cost
    return max(
        rest,
        cost / count,
        (busy * cost + facts.threads * rest) / cores if facts.cpu or count > cores else 0.0,
    )


def machines_needed(facts: Facts, rest: float, cores: float) -> int:
    """Data machines with which no step of ``rest`` ms waits.

    Args:
        facts: of the run.
        rest: ms of a step without its wait for data.
        cores: of each machine.
    """
    return max(1, math.ceil(facts.devices * math.ceil(round(maker_ms(facts) / rest, 6)) / cores))


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

    More processes share an epoch's batches; the part of an all-reduce that is not hidden grows as a ring's,
    ``(n - 1) / n``; every process brings as many cores as now, and a data tier stays as it is.
    """
    epochs = change.epochs or facts.length
    if not facts.step_ms or not epochs or not math.isfinite(facts.batches_per_epoch):
        raise UserError(f"{facts.run.folder}: too few records to predict from")
    processes = int(change.gpus or facts.devices)
    step = (
        facts.step_ms
        if replace(change, price=None) == Change()
        else _mean_step(facts, change, epochs, processes)
    )
    steps = facts.batches_per_epoch * epochs * facts.devices / processes
    beside = (
        max(0.0, 3600 * (facts.hours or 0.0) - facts.recorded_s)
        if facts.length == facts.epochs_done
        else 0.0
    )
    hours = (
        facts.startup["s"] + steps * (step + facts.phases.get("validation", 0.0)) / 1000 + beside
    ) / 3600
    price = _price(facts, change)
    images = 1000 * facts.header["batch_size"] * processes / step
    return Outlook(step, images, hours, None if price is None else price * hours)


def _mean_step(facts: Facts, change: Change, epochs: float, processes: int) -> float:
    """Over a run in which some epochs compute the teacher's answers, and a cache's others read them."""
    phases = {name: ms for name, ms in facts.phases.items() if name in PHASES}
    phases["communication"] = (
        phases.get("communication", 0.0) * _ring(processes) / (_ring(facts.devices) or 1.0)
    )
    cached = facts.cached if change.cache is None else change.cache
    computed = min(max(0.0, facts.views - facts.views_before), epochs) if cached else epochs
    if computed and facts.teacher_ms is None:
        raise UserError(
            f"{facts.run.folder}: its cache was full, so that no step shows the teacher's time"
        )
    live = _step(facts, {**phases, "teacher": facts.teacher_ms or 0.0}, change)
    read = _step(facts, {**phases, "teacher": 0.0}, change)
    if change.pixels and not cached:
        raise UserError("pixels: are kept beside a cache's answers; cache=on pixels=on")
    if facts.has_pixels and change.pixels is False:
        raise UserError(
            f"{facts.run.folder}: its views' pixels were cached, so that no step shows their cost"
        )
    made = (
        min(facts.views, epochs) if change.pixels and not facts.has_pixels else epochs
    )  # decoded and augmented
    ready = sum(ms for name, ms in phases.items() if name not in ("teacher", "data"))
    return (computed * live + (made - computed) * read + (epochs - made) * ready) / epochs


def _ring(processes: int) -> float:
    return (processes - 1) / processes


def _step(facts: Facts, phases: dict[str, float], change: Change) -> float:
    """Length of a step, with those who make its batches."""
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
    """Price of an hour of the changed job; that of the run includes its tier."""
    if change.price is not None or facts.price is None:
        return change.price
    now, then, more = (
        present(facts),
        wanted(facts, change),
        (change.gpus or facts.devices) / facts.devices,
    )
    hourly = now.hourly if now else 0.0
    if (
        now is not None
        and then is not None
        and hourly is None
        and then.cores == now.cores
        and then.price is not None
    ):
        hourly = now.count * then.price
    if then is not None and then.hourly is not None and hourly is not None:
        return (facts.price - hourly) * more + then.hourly
    if then is None and hourly is not None:
        return (facts.price - hourly) * more
    as_it_is = now and then and (now.count, now.cores) == (then.count, then.cores)
    return facts.price * more if as_it_is or not change.of_the_tier else None


def lines(facts: Facts, change: Change) -> list[str]:
    """For the terminal: the run as it is, and as it would be."""
    now, then = predict(facts, Change()), predict(facts, change)
    rows = [("", "as it is", "what if", "")]
    for name in ("step_ms", "images_per_s", "hours", "cost"):
        a, b = getattr(now, name), getattr(then, name)
        if a is None and b is None:
            continue
        rows.append(
            (name.replace("_per_s", "/s").replace("_", " "), short(a), short(b), times(a, b))
        )
    found = [
        f"{name:<10} {before:>12} {after:>12} {change:>8}" for name, before, after, change in rows
    ]
    found.append(f"give or take {ERROR:.0%}: the worst error of followed advice in the truth bench")
    if change.gpus and facts.devices == 1 and change.gpus > 1:
        found.append(
            "a run of one process measures no communication: the figures are the best case"
        )
    return found

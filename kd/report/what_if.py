"""What a changed run would take and cost, from the records of one that has run: ``kd-report RUN --what-if``."""

import math
from dataclasses import dataclass, replace

from kd.errors import UserError
from kd.report.change import Change
from kd.report.facts import Facts
from kd.report.loading import local_step, present, tier_step, wanted
from kd.report.metric import short
from kd.report.records import PHASES

ERROR = 0.23  # the worst of followed advice against prediction in scripts/bench/truth_cpu_2026-11-22.md


@dataclass(frozen=True)
class Outlook:
    """A run's time and cost."""

    step_ms: float  # of a mean step over the run
    images_per_s: float  # of all processes
    hours: float  # of the whole run, start-up and validation too
    cost: float | None  # where there is a price


def predict(facts: Facts, change: Change) -> Outlook:
    """Time and cost of the run with ``change``; with none, of the run as it is.

    A step is the sum of its phases. A cache computes each of its views once; all other steps go without the teacher,
    and with kept pixels without a wait for data (Amdahl). Loaders: a batch costs a process what it takes to make
    it; a step waits for the slower of both. A data tier makes all batches in the loaders' place
    (:func:`kd.report.loading.tier_step`). More processes share an epoch's batches; the part of an all-reduce that
    is not hidden grows as a ring's, ``(n - 1) / n``; every process brings as many cores as now, and a data tier
    stays as it is.
    """
    epochs = change.epochs or facts.length
    if not facts.step_ms or not epochs or not math.isfinite(facts.batches_per_epoch):
        raise UserError(f"{facts.run.folder}: too few records to predict from")
    processes = int(change.gpus or facts.devices)
    step = facts.step_ms if replace(change, price=None) == Change() else _mean_step(facts, change, epochs, processes)
    steps = facts.batches_per_epoch * epochs * facts.devices / processes
    beside = max(0.0, 3600 * (facts.hours or 0.0) - facts.recorded_s) if facts.length == facts.epochs_done else 0.0
    hours = (facts.startup["s"] + steps * (step + facts.phases.get("validation", 0.0)) / 1000 + beside) / 3600
    price = _price(facts, change)
    images = 1000 * facts.header["batch_size"] * processes / step
    return Outlook(step, images, hours, None if price is None else price * hours)


def _mean_step(facts: Facts, change: Change, epochs: float, processes: int) -> float:
    """Over a run in which some epochs compute the teacher's answers, and a cache's others read them."""
    phases = {name: ms for name, ms in facts.phases.items() if name in PHASES}
    phases["communication"] = phases.get("communication", 0.0) * _ring(processes) / (_ring(facts.devices) or 1.0)
    cached = facts.cached if change.cache is None else change.cache
    computed = min(max(0.0, facts.views - facts.views_before), epochs) if cached else epochs
    if computed and facts.teacher_ms is None:
        raise UserError(f"{facts.run.folder}: its cache was full, no step shows what the teacher takes")
    live = _step(facts, {**phases, "teacher": facts.teacher_ms or 0.0}, change)
    read = _step(facts, {**phases, "teacher": 0.0}, change)
    if change.pixels and not cached:
        raise UserError("pixels: are kept beside a cache's answers; cache=on pixels=on")
    if facts.has_pixels and change.pixels is False:
        raise UserError(f"{facts.run.folder}: its views' pixels were kept, no step shows what making them takes")
    made = min(facts.views, epochs) if change.pixels and not facts.has_pixels else epochs  # decoded and augmented
    ready = sum(ms for name, ms in phases.items() if name not in ("teacher", "data"))
    return (computed * live + (made - computed) * read + (epochs - made) * ready) / epochs


def _ring(processes: int) -> float:
    return (processes - 1) / processes


def _step(facts: Facts, phases: dict[str, float], change: Change) -> float:
    processes = int(change.gpus or facts.devices)
    machines = wanted(facts, change)
    if machines is None:
        return local_step(facts, phases, change.workers)
    if change.workers == 0:
        raise UserError("workers: must be >= 1 with a data tier, got 0 (data_machines=0 is without one)")
    return tier_step(facts, phases, machines, processes, change.workers)


def _price(facts: Facts, change: Change) -> float | None:
    """Price of an hour of the changed job: training machines by processes, data machines by number.

    ``monitor.price_per_hour`` includes the tier. Its part is known from the job, ``monitor.instances``, or a
    ``data_instance`` with as many cores.
    """
    if change.price is not None or facts.price is None:
        return change.price
    now, then, more = present(facts), wanted(facts, change), (change.gpus or facts.devices) / facts.devices
    hourly = now.hourly if now else 0.0
    if now is not None and then is not None and hourly is None and then.cores == now.cores and then.price is not None:
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
        ratio = f"{b / a:.2f}x" if a and b is not None else ""
        rows.append((name.replace("_per_s", "/s").replace("_", " "), short(a), short(b), ratio))
    found = [f"{name:<10} {a:>12} {b:>12} {ratio:>8}" for name, a, b, ratio in rows]
    found.append(f"give or take {ERROR:.0%}: the worst error of followed advice in the truth bench")
    if change.gpus and facts.devices == 1 and change.gpus > 1:
        found.append("a run of one process says nothing of communication: the figures are the best case")
    return found

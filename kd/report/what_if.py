"""What a changed run would take and cost, from the records of one that has run: ``kd-report RUN --what-if``."""

import math
from dataclasses import dataclass
from typing import Any

from kd.errors import UserError
from kd.report.facts import Facts
from kd.report.records import PHASES

ERROR = 0.23  # the worst of followed advice against prediction in scripts/bench/truth_cpu_2026-11-22.md
KEYS = "cache=on|off, workers=N, gpus=N, epochs=N, price=PER_HOUR"


@dataclass(frozen=True)
class Change:
    """What is to be different; ``None`` stays as it was.

    Attributes:
        cache: the teacher's answers are kept (True) or computed each time.
        workers: loader processes of each training process.
        gpus: training processes.
        epochs: of the run.
        price: of an hour of the whole changed job.
    """

    cache: bool | None = None
    workers: int | None = None
    gpus: int | None = None
    epochs: float | None = None
    price: float | None = None


@dataclass(frozen=True)
class Outlook:
    """A run's time and cost.

    Attributes:
        step_ms: of a mean step over the run.
        images_per_s: of all processes.
        hours: of the whole run, start-up and validation too.
        cost: where there is a price.
    """

    step_ms: float
    images_per_s: float
    hours: float
    cost: float | None


def read_change(items: list[str]) -> Change:
    """``["cache=on", "gpus=8"]`` -> what is to be different.

    Raises:
        UserError: another key, or a value that it does not take.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, _, value = item.partition("=")
        if key == "cache":
            if value not in ("on", "off"):
                raise UserError(f"cache: must be on or off, got '{value}'")
            found[key] = value == "on"
        elif key in ("workers", "gpus", "epochs", "price"):
            found[key] = _number(key, value)
        else:
            raise UserError(f"--what-if: no key '{key}'; known: {KEYS}")
    return Change(**found)


def _number(key: str, value: str) -> float:
    low = 0 if key in ("workers", "price") else 1
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    whole = key == "price" or number == int(number if math.isfinite(number) else 0)
    if not (number >= low and whole and math.isfinite(number)):
        raise UserError(f"{key}: must be a {'number' if key == 'price' else 'whole number'} >= {low}, got '{value}'")
    return number


def what_if(facts: Facts, change: Change) -> Outlook:
    """Time and cost of the run with ``change``; with none, of the run as it is.

    A step is the sum of its phases. A cache takes the teacher out of all but the first epochs (Amdahl). Loaders: a
    batch costs a process what it takes to make it; a step waits for the slower of both. More processes share an epoch's
    batches; the part of an all-reduce that is not hidden grows as a ring's, ``(n - 1) / n``; every process brings as
    many cores as now.

    Raises:
        UserError: a run without enough records.
    """
    epochs = change.epochs or (facts.epochs if math.isfinite(facts.epochs) else facts.epochs_done)
    if not facts.step_ms or not epochs or not math.isfinite(facts.batches_per_epoch):
        raise UserError(f"{facts.run.folder}: too few records to predict from")
    phases = {name: ms for name, ms in facts.phases.items() if name in PHASES}
    processes = int(change.gpus or facts.devices)
    phases["communication"] = phases.get("communication", 0.0) * _ring(processes) / (_ring(facts.devices) or 1.0)
    cached = facts.cached if change.cache is None else change.cache
    live, read = _step(facts, phases, change.workers), _step(facts, {**phases, "teacher": 0.0}, change.workers)
    computed = min(float(facts.views), epochs) if cached and not facts.cached else 0.0 if cached else epochs
    if cached and facts.cached and change.cache is None:
        computed, read = epochs, live  # as it was
    steps = facts.batches_per_epoch * facts.devices / processes
    training = steps * (computed * live + (epochs - computed) * read)
    validation = facts.phases.get("validation", 0.0) * facts.batches_per_epoch * epochs * facts.devices / processes
    hours = (facts.startup["s"] + (training + validation) / 1000) / 3600
    step = training / (steps * epochs)
    price = facts.price if change.price is None else change.price
    if change.price is None and price is not None:
        price *= processes / facts.devices
    images = 1000 * facts.header["batch_size"] * processes / step
    return Outlook(step, images, hours, None if price is None else price * hours)


def _ring(processes: int) -> float:
    return (processes - 1) / processes


def _step(facts: Facts, phases: dict[str, float], workers: int | None) -> float:
    """Length of a step with other loader processes."""
    rest = sum(ms for name, ms in phases.items() if name != "data")
    if workers is None and facts.workers == 0:
        return rest + phases.get("data", 0.0)
    cost, count = _batch_cost(facts), facts.workers if workers is None else int(workers)
    if count == 0:
        return rest + cost
    cores = facts.cores / facts.processes
    floor = (facts.loading_busy * cost + facts.threads * rest) / cores if facts.cpu or count > cores else 0.0
    return max(rest, cost / count, floor)


def _batch_cost(facts: Facts) -> float:
    """Ms that one process takes to make a batch."""
    wait = facts.phases.get("data", 0.0)
    if facts.workers == 0:
        return wait
    if wait >= 0.05 * facts.step_ms or not facts.loading_cores:
        return facts.workers * facts.step_ms if wait >= 0.05 * facts.step_ms else facts.step_ms - wait
    return facts.loading_cores / facts.processes * facts.step_ms / max(0.05, facts.loading_busy)


def lines(facts: Facts, change: Change) -> list[str]:
    """For the terminal: the run as it is, and as it would be."""
    now, then = what_if(facts, Change()), what_if(facts, change)
    rows = [("", "as it is", "what if", "")]
    for name in ("step_ms", "images_per_s", "hours", "cost"):
        a, b = getattr(now, name), getattr(then, name)
        if a is None and b is None:
            continue
        ratio = f"{b / a:.2f}x" if a and b is not None else ""
        rows.append((name.replace("_per_s", "/s").replace("_", " "), _short(a), _short(b), ratio))
    found = [f"{name:<10} {a:>12} {b:>12} {ratio:>8}" for name, a, b, ratio in rows]
    found.append(f"give or take {ERROR:.0%}: the worst error of followed advice in the truth bench")
    if change.gpus and facts.devices == 1 and change.gpus > 1:
        found.append("a run of one process says nothing of communication: the figures are the best case")
    return found


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

"""How long a step is when other processes make its batches: here, or on the machines of a data tier."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kd.errors import UserError
from kd.report.change import Change
from kd.report.facts import Facts
from kd.report.prices import INSTANCE
from kd.report.step_facts import part
from kd.report.tier_facts import BUSY

WAITS = 0.05  # of the step waits for its batch: below, who makes them keeps up


@dataclass(frozen=True)
class DataMachines:
    """Machines of a data tier."""

    count: int  # of them
    cores: float  # of each, on average
    price: float | None = None  # of an hour of one of them; ``None``: not known
    named: str = ""  # for people, ``c5.18xlarge`` or ``72 cores each``

    @property
    def hourly(self) -> float | None:
        return None if self.price is None else self.count * self.price


# -- which machines ---------------------------------------------------------------------------------------------------
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
        if isinstance(group, dict) and group.get("name") == "data" and group.get("price_per_hour") is not None:
            return float(group["price_per_hour"])
    known, total = facts.header.get("input_machines") or {}, 0.0
    for item in (facts.run.config.get("monitor") or {}).get("instances") or []:
        match = INSTANCE.fullmatch(str(item))
        name = f"{match[2]}{':spot' * (match[3] == 'spot')}" if match else ""
        total += int(match[1] or 1) * known[name]["price"] if match and name in known else 0.0
    return total or None


def wanted(facts: Facts, change: Change) -> DataMachines | None:
    """The tier of the changed run, or ``None``. What ``change`` does not name stays as it is."""
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
        raise UserError("data_machines: of how many cores each? data_cores=N, or data_instance=NAME of the run's "
                        "table of prices")  # fmt: skip
    if change.data_machines is None and now is None:
        raise UserError("data_machines: how many? The run had no tier: data_machines=N")
    return DataMachines(change.data_machines or (now.count if now else 0), kind.cores, kind.price, kind.named)


def _instance(facts: Facts, name: str) -> DataMachines:
    known = facts.header.get("input_machines") or {}
    if not known:
        raise UserError("data_instance: the run knows no prices of machines that make batches (monitor.prices=FILE "
                        "with vcpus, when it ran); data_cores=N asks without prices")  # fmt: skip
    if name not in known:
        raise UserError(f"data_instance: no price and vcpus of '{name}'; known: {', '.join(list(known)[:20])}")
    return DataMachines(1, known[name]["vcpus"], known[name]["price"], name)


# -- how long ---------------------------------------------------------------------------------------------------------
def waits(facts: Facts) -> bool:
    """Whether the step waits for its batch for long enough that other makers could help."""
    return part(facts.phases, "data") >= WAITS


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
    """Ms that one process of a data tier takes for a batch, on its own core.

    With a tier: as recorded, with the overhead of sending where the step waits for busy makers. Without one: a loader
    process's time less its wait for a core.
    """
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
    """Whether the way to the training processes is what the step waits for: makers have time, or may not go on."""
    return facts.tier is not None and waits(facts) and (facts.tier.queue_is_short or facts.tier.busy < BUSY)


def _makers(facts: Facts, machines: DataMachines, processes: int, workers: int | None) -> float:
    """Makers of a training process: one on each core, shared evenly, or ``data.num_workers`` up to the cores."""
    cores = machines.count * machines.cores
    fixed = (facts.run.config.get("data") or {}).get("num_workers") if facts.tier is not None else None
    if workers is None and isinstance(fixed, int):
        workers = fixed
    return min(workers, cores / processes) if workers else float(cores // processes or cores / processes)


def tier_step(
    facts: Facts, phases: Mapping[str, float], machines: DataMachines, processes: int, workers: int | None = None
) -> float:
    """Ms of a step with a data tier: the longest of what runs at the same time.

    1. The step without its wait for data (with it, where the run hardly waits).
    2. The makers' time for a batch of each process.
    3. The transfer to the training processes, where the run has measured it.
    """
    rest = sum(ms for name, ms in phases.items() if name != "data")
    rest += 0.0 if waits(facts) else phases.get("data", 0.0)
    made = maker_ms(facts) / _makers(facts, machines, processes, workers)
    return max(rest, made, facts.step_ms if _held_up(facts) else 0.0)


def local_step(facts: Facts, phases: Mapping[str, float], workers: int | None) -> float:
    """Ms of a step with loader processes on the training machines, at least the CPU time over the cores.

    A run that had a tier gets as many loader processes as its training leaves cores, unless ``workers`` is given.
    """
    rest = sum(ms for name, ms in phases.items() if name != "data")
    if workers is None and facts.workers == 0 and facts.tier is None:
        return rest + phases.get("data", 0.0)
    cores = facts.cores / facts.processes
    if facts.tier is not None:
        cost, busy, count = 1000 * facts.tier.batch_s, 1.0, workers
        count = max(1, int(cores - facts.threads)) if count is None else count
    else:
        cost, busy, count = batch_ms(facts), facts.loading_busy, facts.workers if workers is None else workers
    if count == 0:
        return rest + cost
    return max(rest, cost / count, (busy * cost + facts.threads * rest) / cores if facts.cpu or count > cores else 0.0)


def machines_needed(facts: Facts, rest: float, cores: float) -> int:
    """Data machines with which no step of ``rest`` ms waits."""
    return max(1, math.ceil(facts.devices * math.ceil(round(maker_ms(facts) / rest, 6)) / cores))

"""What a run costs by kind of price; what another input would cost and save where GPUs wait for the CPUs' batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kd.report.facts import Facts
from kd.report.limits import cores_needed
from kd.report.loading import batch_ms, machines_needed
from kd.report.metric import short
from kd.report.prices import INSTANCE
from kd.report.step_facts import part

AT = 0.1  # of the step waits for data


@dataclass(frozen=True)
class Way:
    """One way to feed the GPUs."""

    name: str  # what to do
    step_ms: float  # of a mean step then; of the ways that are not measured at best
    price: float | None  # of an hour of the whole job; ``None``: not known

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.price * self.step_ms / 3600


def cores_wanted(facts: Facts) -> tuple[int, float] | None:
    """Cores a GPU that would keep up, and those that are there; ``None``: these cores hold no GPU up."""
    if facts.run.tier or facts.cpu or part(facts.phases, "data") < AT:
        return None
    needed = cores_needed(facts)
    there = facts.cores / facts.processes
    return (needed, there) if needed > there else None


def ways(facts: Facts) -> list[Way]:
    """As it is; views on the device; larger machines; machines beside that make all batches."""
    rest, price = facts.step_ms - facts.phases["data"], facts.price
    found = [Way("as it is", facts.step_ms, price), Way("data.engine=device, or dali", rest, price)]
    found += _larger(facts, rest)
    for name, machine in (facts.header.get("input_machines") or {}).items():
        if machine.get("gpus"):
            continue
        count = machines_needed(facts, rest, machine["vcpus"])
        dearer = None if price is None else price + count * machine["price"]
        found.append(Way(f"data.engine=ray on {count} {name} beside", rest, dearer))
    return found


def _larger(facts: Facts, rest: float) -> Iterator[Way]:
    """Instances of the training machines' family with as many GPUs and more cores, all with loader processes."""
    known, monitor = facts.header.get("input_machines") or {}, facts.run.config.get("monitor") or {}
    items = [match for item in monitor.get("instances") or [] if (match := INSTANCE.fullmatch(str(item)))]
    counts = {f"{match[2]}{':spot' * (match[3] == 'spot')}": int(match[1] or 1) for match in items}
    own = next((name for name in counts if known.get(name, {}).get("gpus")), None)
    if own is None:
        return
    kinds = {n: (n.rpartition(".")[0], n.endswith(":spot"), machine["gpus"]) for n, machine in known.items()}
    for name, machine in known.items():
        if kinds[name] != kinds[own] or machine["vcpus"] <= known[own]["vcpus"]:
            continue
        made = facts.processes * (facts.loading_busy * batch_ms(facts) + facts.threads * rest) / machine["vcpus"]
        dearer = None if facts.price is None else facts.price + counts[own] * (machine["price"] - known[own]["price"])
        workers = int(machine["vcpus"] // facts.processes) - facts.threads
        yield Way(f"{name} with data.num_workers={workers}", max(rest, made), dearer)


def costs_by_kind(facts: Facts) -> dict[str, Any] | None:
    """The table of the page: on demand, on spot, and half of the hours on each."""
    prices = facts.header.get("prices")
    if not prices:
        return None
    seconds = (facts.step_ms, facts.epoch_s, facts.planned_s)  # 1000 steps take as many seconds as one takes ms
    rows = [[kind, short(hour), *(short(hour * s / 3600 if s else None) for s in seconds)]
            for kind, hour in prices.items()]  # fmt: skip
    note = "An interrupted machine repeats what came after the last checkpoint; that is not counted."
    return {"kind": "table", "title": "Cost by price", "columns": ["", "an hour", "1000 steps", "an epoch", "the run"],
            "rows": rows, "note": note}  # fmt: skip


def input_costs(facts: Facts) -> dict[str, Any] | None:
    """The table of the page."""
    wanted = cores_wanted(facts)
    if wanted is None:
        return None
    now, *_ = found = ways(facts)
    rows = [[w.name, round(w.step_ms, 1), short(w.price), short(w.cost), _saved(now, w)] for w in found]
    note = f"{wanted[0]} cores a GPU needed, {wanted[1]:g} there. The first row is measured, the others are at best."
    if now.price:
        worth = now.price * (now.step_ms / found[1].step_ms - 1)
        note += f" Feeding the GPUs pays while it costs less than {worth:.3g} an hour more."
    columns = ["input", "ms a step", "an hour", "1000 steps", f"saves ({'cost' if now.cost else 'time'}, %)"]
    return {"kind": "table", "title": "What another input would cost", "columns": columns, "rows": rows, "note": note}


def _saved(now: Way, way: Way) -> str:
    if way is now:
        return ""
    priced = now.cost and way.cost is not None
    return f"{100 * (1 - (way.cost / now.cost if priced else way.step_ms / now.step_ms)):.0f}"  # type: ignore[operator]

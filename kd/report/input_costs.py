"""What another input would cost and save, of a run whose GPUs wait for batches that the CPUs can't make in time."""

from dataclasses import dataclass
from typing import Any

from kd.report.facts import Facts
from kd.report.limits import cores_needed
from kd.report.loading import machines_needed
from kd.report.metric import short
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
    """As it is; views on the device; machines beside, as many as make all batches (a tier makes them all)."""
    rest, price = facts.step_ms - facts.phases["data"], facts.price
    found = [Way("as it is", facts.step_ms, price), Way("data.engine=device, or dali", rest, price)]
    for name, machine in (facts.header.get("input_machines") or {}).items():
        count = machines_needed(facts, rest, machine["vcpus"])
        dearer = None if price is None else price + count * machine["price"]
        found.append(Way(f"data.engine=ray on {count} {name} beside", rest, dearer))
    return found


def input_costs(facts: Facts) -> dict[str, Any] | None:
    """The table of the page."""
    wanted = cores_wanted(facts)
    if wanted is None:
        return None
    now, *_ = found = ways(facts)
    rows = [[w.name, round(w.step_ms, 1), short(w.price), short(w.cost), _saved(now, w)] for w in found]
    note = f"{wanted[0]} cores a GPU needed, {wanted[1]:g} there. Steps but for the first row at best: none waits."
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

"""A run's data tier: what its machines made, and how many more would be needed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kd.report.limits import Limit
from kd.report.records import Run
from kd.report.step_facts import part, step_ms

AT = 0.1  # of the step waits for its batch
BUSY = 0.7  # makers that work for less of the time are held up by something else


@dataclass(frozen=True)
class TierFacts:
    """The tier over a run, of all training processes together.

    Attributes:
        machines: there at the end, by node: name, cores, makers, batches, busy_s, mb.
        seconds: between the first reading and the last.
        ready: batches that waited to be used, on average and a training process.
        may_ask: that one may have asked for and not used, at the end.
        ranks: training processes.
        made_again: batches that had to be made again, for a process or its machine had ended.
        made_twice: batches that a second machine made as well, for the first was late.
    """

    machines: dict[str, dict[str, Any]]
    seconds: float
    ready: float
    may_ask: int
    ranks: int
    made_again: int
    made_twice: int

    @property
    def makers(self) -> int:
        """At work at the end."""
        return sum(machine["makers"] for machine in self.machines.values() if not machine["gone"])

    def total(self, what: str) -> float:
        """``batches``, ``busy_s`` or ``mb`` of all machines."""
        return sum(machine[what] for machine in self.machines.values())

    @property
    def batch_s(self) -> float:
        """Seconds of one maker a batch."""
        return self.total("busy_s") / self.total("batches") if self.total("batches") else 0.0

    @property
    def busy(self) -> float:
        """Share of the time that makers worked."""
        given = self.makers * self.seconds
        return min(1.0, self.total("busy_s") / given) if given else 0.0


def tier_of(run: Run) -> TierFacts | None:
    """The tier's readings of all ranks together; None where there are too few."""
    whole = [readings for readings in run.tier.values() if len(readings) > 1]
    if not whole:
        return None
    machines: dict[str, dict[str, Any]] = {}
    for readings in whole:
        before = {m["node"]: m for m in readings[0]["machines"]}
        for machine in readings[-1]["machines"]:
            known = machines.setdefault(machine["node"], {**machine, "makers": 0, "batches": 0, "busy_s": 0.0, "mb": 0})
            known["makers"] += machine["makers"]
            for what in ("batches", "busy_s", "mb"):
                known[what] += machine[what] - before.get(machine["node"], {}).get(what, 0)
    ready = [reading["ready"] for readings in whole for reading in readings]
    return TierFacts(
        machines, max(r[-1]["t"] - r[0]["t"] for r in whole), sum(ready) / len(ready), whole[0][-1]["may_ask"],
        len(whole), sum(r[-1]["made_again"] for r in whole), sum(r[-1]["made_twice"] for r in whole),
    )  # fmt: skip


def tier_bound(phases: Mapping[str, float], tier: TierFacts | None) -> Limit | None:
    """The step stands still for a batch that the tier makes too slowly.

    Makers that work all the time are too few; where they don't, the way to the training process holds batches up: the
    network, or a queue that takes fewer batches than there are makers.

    Args:
        phases: mean ms a step.
        tier: of the run.
    """
    step, wait = step_ms(phases), phases.get("data", 0.0)
    if tier is None or not tier.makers or part(phases, "data") < AT:
        return None
    rest = max(step - wait, 0.01 * step)
    text = f"the step waits {wait:.0f} of its {step:.0f} ms ({wait / step:.0%}) for a batch of the data tier, whose "
    text += f"{tier.makers} makers work {tier.busy:.0%} of the time"
    if tier.may_ask < tier.makers / tier.ranks:
        return Limit("data", text, f"a larger data.tier.queue_mb ({tier.may_ask} batches fit): at most", step / rest)
    if tier.busy < BUSY:
        rate = tier.total("mb") / tier.seconds if tier.seconds else 0.0
        text += f", and send {rate:,.0f} MB/s"
        return Limit("data", text, "a faster network to the data machines, smaller pictures: at most", step / rest)
    needed = math.ceil(1000 * tier.batch_s * tier.ranks / rest)
    there = [machine for machine in tier.machines.values() if not machine["gone"]]
    each = sum(machine["cores"] for machine in there) / len(there)
    more = max(1, math.ceil((needed - tier.makers) / each))
    gain = step / max(rest, 1000 * tier.batch_s * tier.ranks / (tier.makers + more * each))
    return Limit("data", text, f"{more} more data machine{'s' * (more > 1)} of {each:.0f} cores", gain)


def tier_table(run: Run) -> dict[str, Any] | None:
    """The table of the page: each machine, and the queue."""
    tier = tier_of(run)
    if tier is None:
        return None
    rows = [
        [
            f"{machine['name']} ({machine['node']})" + (" gone" if machine["gone"] else ""), machine["cores"],
            machine["makers"], machine["batches"], _rate(machine["batches"], tier.seconds),
            _rate(machine["mb"], tier.seconds), _rate(machine["busy_s"], tier.seconds),
        ]
        for machine in tier.machines.values()
    ]  # fmt: skip
    note = (
        f"{tier.ready:.1f} batches were ready on average, of {tier.may_ask} that a training process may ask for ahead "
        f"(data.tier.queue_mb); {tier.made_again} were made again after an end, {tier.made_twice} twice."
    )
    columns = ["machine", "cores", "makers", "batches", "batches/s", "MB/s", "cores at work"]
    return {"kind": "table", "title": "Data tier", "columns": columns, "rows": rows, "note": note}


def _rate(value: float, seconds: float) -> float:
    return round(value / seconds, 2) if seconds else 0.0

"""Numbers of a run's data tier, see :mod:`kd.report.facts`."""

from dataclasses import dataclass
from typing import Any

from kd.report.records import Run

AT = 0.1  # of the step waits for its batch
BUSY = 0.7  # makers that work for less of the time are held up by something else


@dataclass(frozen=True)
class TierFacts:
    """The tier over a run, of all training processes together."""

    machines: dict[str, dict[str, Any]]  # there at the end, by node: name, cores, makers, batches, busy_s, mb
    seconds: float  # between the first reading and the last
    ready: float  # batches that waited to be used, on average and a training process
    may_ask: int  # that one may have asked for and not used, at the end
    ranks: int  # training processes
    made_again: int  # batches that had to be made again, for a process or its machine had ended
    made_twice: int  # batches that a second machine made as well, for the first was late

    @property
    def makers(self) -> int:
        return sum(machine["makers"] for machine in self.present)

    @property
    def present(self) -> list[dict[str, Any]]:
        return [machine for machine in self.machines.values() if not machine["gone"]]

    @property
    def cores(self) -> int:
        return sum(machine["cores"] for machine in self.present)

    @property
    def queue_is_short(self) -> bool:
        """A training process may ask for fewer batches than it has makers."""
        return self.may_ask < self.makers / self.ranks

    def total(self, what: str) -> float:
        return sum(machine[what] for machine in self.machines.values())

    @property
    def batch_s(self) -> float:
        return self.total("busy_s") / self.total("batches") if self.total("batches") else 0.0

    @property
    def busy(self) -> float:
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

"""What limits a run: one sentence with evidence, a lever, and the gain that it predicts."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kd.report import host_limits as host
from kd.report import limits
from kd.report.facts import OWN, Facts
from kd.report.limits import LEADS, WORTH, Limit
from kd.report.records import PHASES
from kd.report.step_facts import part
from kd.report.tier import tier_bound

BOUNDS = ("data", "teacher", "student", "communication", "host", "startup", "checkpoint", "precision")
NAMES = {**{name: f"{name}-bound" for name in BOUNDS}, "startup": "start-up-bound", "none": "balanced"}
FEWEST = 20  # steps: of fewer nothing is said
STAYS = 1.15  # a headline that is shown already stays down to this gain
AHEAD = 1.1  # and gives way to another from this multiple of its gain


def limits_of(facts: Facts, shown: str = "") -> list[Limit]:
    """All limits of a run, largest gain first; ``shown`` stays the first unless another is clearly larger."""
    if not facts.phases:
        return []
    found = [limit for limit in _candidates(facts) if limit is not None and (limit.gain or 0) >= WORTH / 1.05]
    found.sort(key=lambda limit: -(limit.gain or 0))
    leader = next((limit for limit in found if (limit.gain or 0) >= (STAYS if limit.bound == shown else LEADS)), None)
    held = next((limit for limit in found if limit.bound == shown and (limit.gain or 0) >= STAYS), None)
    if held and leader and (leader.gain or 0) < AHEAD * (held.gain or 0):
        leader = held
    if leader:
        return [leader, *(limit for limit in found if limit is not leader)]
    return [limits.student_bound(facts, alone=not found) or _largest(facts), *found]


def _largest(facts: Facts) -> Limit:
    groups = {name: part(facts.phases, name) for name in PHASES if name not in OWN}
    groups["the student's own training"] = sum(part(facts.phases, name) for name in OWN)
    name = max(groups, key=lambda group: groups[group])
    named = f"the {name}" if name in PHASES else name
    return Limit("none", f"no part of the step stands out; most of it ({groups[name]:.0%}) is {named}", "", None)


def _candidates(facts: Facts) -> list[Limit | None]:
    return [
        host.cpu_contention(facts) or host.launch_bound(facts),  # a host that gets no core launches slowly
        tier_bound(facts) if facts.run.tier else limits.data_bound(facts),
        limits.teacher_bound(facts),
        limits.communication_bound(facts),
        host.bookkeeping_bound(facts),
        limits.optimizer_bound(facts),
        limits.precision_bound(facts),
        limits.checkpoint_bound(facts),
        limits.startup_bound(facts),
    ]


def verdict_of(facts: Facts, found: Sequence[Limit]) -> dict[str, Any]:
    """The headline of a run's limits; of fewer than :data:`FEWEST` steps nothing is said."""
    phases = {name: round(ms, 3) for name, ms in facts.phases.items() if name in PHASES}
    if not found or facts.steps_counted < FEWEST:
        text = f"too few steps were recorded to find the limit of the speed ({facts.steps_counted} of {FEWEST})"
        return {"bound": "none", "text": text, "lever": "", "predicted_speedup": None, "phases_ms": phases}
    first, *others = found
    return {
        "bound": first.bound,
        "text": sentence(first),
        "lever": first.lever,
        "predicted_speedup": round(first.gain, 2) if first.gain else None,
        "phases_ms": phases,
        "others": [asdict(limit) for limit in others],
    }


def sentence(limit: Limit) -> str:
    """``data-bound: <evidence>; <lever> <gain>x``."""
    head = f"{NAMES[limit.bound]}: {limit.text}"
    if not limit.gain:
        return head
    return f"{head}; {limit.lever} {'' if 'at most' in limit.lever else 'would give '}{limit.gain:.1f}x"

"""A run's data tier: what its machines made, and how many more would be needed."""

import math
from typing import Any

from kd.report.facts import Facts
from kd.report.limits import Limit
from kd.report.step_facts import part
from kd.report.tier_facts import AT, BUSY


def tier_bound(facts: Facts) -> Limit | None:
    """The step waits for a data tier: for too few makers, or for the network or the queue where makers are idle."""
    step, wait, tier = facts.step_ms, facts.phases.get("data", 0.0), facts.tier
    if tier is None or not tier.makers or part(facts.phases, "data") < AT:
        return None
    rest = max(step - wait, 0.01 * step)
    text = f"the step waits {wait:.0f} of its {step:.0f} ms ({wait / step:.0%}) for a batch of the data tier, whose "
    text += f"{tier.makers} makers work {tier.busy:.0%} of the time"
    if tier.queue_is_short:
        return Limit("data", text, f"a larger data.tier.queue_mb ({tier.may_ask} batches fit): at most", step / rest)
    if tier.busy < BUSY:
        rate = tier.total("mb") / tier.seconds if tier.seconds else 0.0
        text += f", and send {rate:,.0f} MB/s"
        return Limit("data", text, "a faster network to the data machines, smaller pictures: at most", step / rest)
    needed = math.ceil(1000 * tier.batch_s * tier.ranks / rest)
    each = tier.cores / len(tier.present)
    more = max(1, math.ceil((needed - tier.makers) / each))
    gain = step / max(rest, 1000 * tier.batch_s * tier.ranks / (tier.makers + more * each))
    return Limit("data", text, f"{more} more data machine{'s' * (more > 1)} of {each:.0f} cores", gain)


def tier_table(facts: Facts) -> dict[str, Any] | None:
    """The table of the page: each machine, and the queue."""
    tier = facts.tier
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

"""Whether a data tier pays: ``kd-report RUN --what-if data_machines=N``, in sentences."""

from bisect import bisect_left
from dataclasses import replace

from kd.report.change import Change
from kd.report.facts import Facts
from kd.report.loading import DataMachines, present, waits, wanted
from kd.report.step_facts import part
from kd.report.what_if import Outlook, predict

MANY = 100_000  # machines: more than any job has
MOST = 1000  # of which the cheapest number is looked for
NOTHING = 1.02  # a step this much faster is no gain


def tier_pays(facts: Facts, change: Change) -> list[str]:
    """Sentences over the tier that ``change`` asks about, beside the same run without that part of the change."""
    if not change.of_the_tier:
        return []
    before = replace(change, data_machines=None, data_cores=None, data_instance=None, price=None)
    if facts.tier is None and change.workers is not None:
        before = replace(before, workers=None)  # of the tier
    now, then = predict(facts, before), predict(facts, change)
    machines, had = wanted(facts, change), present(facts)
    if machines is None:
        return _without(now, then) if had else ["the run has no data tier: nothing is different"]
    best = predict(facts, replace(change, data_machines=MANY))
    if had is None and now.step_ms < NOTHING * best.step_ms:
        text = f"a data tier would bring nothing: {part(facts.phases, 'data'):.0%} of the step waits for data"
        return [text + ("" if waits(facts) else ", and loading keeps up")]
    found = [_speed(facts, change, machines, had, now, then)]
    found += [_cost(now, then)] if now.cost is not None and then.cost is not None else []
    found += _counts(facts, change, machines, had, now)
    return found + _price(facts, before, machines, had, now, then) + _network(facts, then)


def _without(now: Outlook, then: Outlook) -> list[str]:
    text = f"without its data tier a step would take {_ms(then)} instead of {_ms(now)}"
    if now.cost is None or then.cost is None:
        return [text]
    pays = "the tier pays" if then.cost > now.cost else "the tier does not pay"
    return [text, f"{pays}: the run costs {now.cost:.4g} with it and {then.cost:.4g} without"]


def _speed(
    facts: Facts, change: Change, machines: DataMachines, had: DataMachines | None, now: Outlook, then: Outlook
) -> str:
    instead = f" instead of {had.count} of {had.cores:g} cores" if had else ""
    few = fewest(facts, change)
    text = (
        f"with {_count(machines.count)} ({machines.named}){instead} a step would take {_ms(then)} instead of {_ms(now)}"
    )
    if few > machines.count:
        return f"{text}, and still wait for batches up to {few} machines"
    return f"{text}; {'as few as' if few < machines.count else ''} {few} would do".replace("  ", " ")


def fewest(facts: Facts, change: Change) -> int:
    """Data machines from which on more make no step shorter."""
    least = predict(facts, replace(change, data_machines=MANY)).step_ms * (1 + 1e-9)
    counts = range(1, MANY)
    return counts[
        bisect_left(counts, True, key=lambda n: predict(facts, replace(change, data_machines=n)).step_ms <= least)
    ]


def _cost(now: Outlook, then: Outlook) -> str:
    assert now.cost is not None and then.cost is not None
    saved = 1 - then.cost / now.cost if now.cost else 0.0
    if saved > 0:
        return f"it pays: the run costs {saved:.0%} less"
    faster = f", and is {now.step_ms / then.step_ms:.2g}x as fast" if then.step_ms < now.step_ms else ""
    return f"it does not pay: the run costs {-saved:.0%} more{faster}"


def _counts(facts: Facts, change: Change, machines: DataMachines, had: DataMachines | None, now: Outlook) -> list[str]:
    """From which number on it pays; beyond the fewest that do each more only costs more."""
    if change.price is not None or machines.price is None or now.cost is None:
        return []
    few = min(MOST, fewest(facts, change))
    costs = ((n, predict(facts, replace(change, data_machines=n)).cost) for n in range(1, few + 1))
    known = {n: cost for n, cost in costs if cost is not None}
    if had is not None:
        return [f"of all numbers of them {min(known, key=known.__getitem__)} would cost least"] if known else []
    paying = [n for n, cost in known.items() if cost < now.cost]
    if not paying:
        return [f"no number of these machines pays, at {machines.price:.4g} an hour each"]
    cheapest = min(paying, key=known.__getitem__)
    return [f"it pays from {_count(paying[0])} on; {cheapest} cost{'s' * (cheapest == 1)} least"]


def _price(
    facts: Facts, before: Change, machines: DataMachines, had: DataMachines | None, now: Outlook, then: Outlook
) -> list[str]:
    """The price of one machine at which the run costs as much as before."""
    more = machines.count - (had.count if had else 0)
    if more == 0 or (had is not None and had.cores != machines.cores):
        return []
    worth = now.hours / then.hours - 1
    if more > 0 and worth <= 0:
        return ["it pays at no price: the run would be no shorter"]
    whose = f"a{'nother' * (had is not None)} machine" if more > 0 else "a machine"
    pays = "it pays while" if more > 0 else "it pays where"
    than = "less" if more > 0 else "more"
    if now.cost is not None:
        price = now.cost / now.hours * worth / more
        return [f"{pays} {whose} costs {than} than {max(0.0, price):.3g} an hour"]
    share = f"{abs(worth):.0%} of what the whole job costs now"
    return [
        f"{pays} {'they' if more > 1 else 'it'} cost{'s' * (abs(more) == 1)} {than} than {share} (together, an hour)"
    ]


def _network(facts: Facts, then: Outlook) -> list[str]:
    """What each training machine receives: whether its network takes that is not in the records."""
    size = (facts.run.config.get("data") or {}).get("img_size")
    if facts.tier is not None:
        batches = facts.tier.total("batches")
        megabytes = facts.tier.total("mb") / batches if batches else 0.0
    elif isinstance(size, int) or (isinstance(size, list) and len(size) == 2):
        height, width = (size, size) if isinstance(size, int) else size
        megabytes = facts.header["batch_size"] * 3 * height * width / 1e6
    else:
        return []
    rate = 1000 * megabytes * facts.processes / then.step_ms
    return [f"a training machine would receive {rate:,.0f} MB/s of batches: its network must take that"]


def _count(number: int) -> str:
    return f"{number} data machine{'s' * (number != 1)}"


def _ms(outlook: Outlook) -> str:
    return f"{outlook.step_ms:.4g} ms"

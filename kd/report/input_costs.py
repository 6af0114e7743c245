"""What a run costs by kind of price; what made its batches; whether another input, or a data tier, would pay."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kd.report.charts import Section, table
from kd.report.facts import DATA_WAIT_AT, Facts
from kd.report.limits import cores_needed
from kd.report.metric import short
from kd.report.prices import counted
from kd.report.step_facts import phase_share
from kd.report.what_if import (
    Change,
    DataMachines,
    Outlook,
    batch_ms,
    machines_needed,
    predict,
    present,
    waits,
    wanted,
)

MANY = 100_000  # machines: more than any job has
MOST = 1000  # of which the cheapest number is looked for
NOTHING = 1.02  # a step this much faster is no gain


@dataclass(frozen=True)
class Way:
    """One way to feed the GPUs."""

    name: str
    """What to change."""
    step_ms: float
    """Milliseconds of a mean step then; at best, where it was not measured."""
    price: float | None
    """Price of an hour of the whole job; None: not known."""

    @property
    def cost(self) -> float | None:
        """Price of 1000 steps; None where an hour's price is not known."""
        return None if self.price is None else self.price * self.step_ms / 3600


def cores_wanted(facts: Facts) -> tuple[int, float] | None:
    """Cores a GPU that would keep up, and those that are there; ``None``: these cores hold no GPU up."""
    if facts.run.tier or facts.cpu or phase_share(facts.phases, "data") < DATA_WAIT_AT:
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
    counts = {name: count for count, name in counted(monitor.get("instances") or [])}
    own = next((name for name in counts if known.get(name, {}).get("gpus")), None)
    if own is None:
        return
    kinds = {
        n: (n.rpartition(".")[0], n.endswith(":spot"), machine["gpus"])
        for n, machine in known.items()
    }
    for name, machine in known.items():
        if kinds[name] != kinds[own] or machine["vcpus"] <= known[own]["vcpus"]:
            continue
        made = (
            facts.processes
            * (facts.loading_busy * batch_ms(facts) + facts.threads * rest)
            / machine["vcpus"]
        )
        dearer = (
            None
            if facts.price is None
            else facts.price + counts[own] * (machine["price"] - known[own]["price"])
        )
        workers = int(machine["vcpus"] // facts.processes) - facts.threads
        yield Way(f"{name} with data.num_workers={workers}", max(rest, made), dearer)


def costs_by_kind(facts: Facts) -> Section | None:
    """The table of the page: on demand, on spot, and half of the hours on each."""
    prices = facts.header.get("prices")
    if not prices:
        return None
    seconds = (
        facts.step_ms,
        facts.epoch_s,
        facts.planned_s,
    )  # 1000 steps take as many seconds as one takes ms
    rows = [
        [kind, short(hour), *(short(hour * s / 3600 if s else None) for s in seconds)]
        for kind, hour in prices.items()
    ]
    note = (
        "An interrupted machine repeats what came after the last checkpoint; that is not counted."
    )
    return table(
        "Cost by price", ["", "an hour", "1000 steps", "an epoch", "the run"], rows, note=note
    )


def input_costs(facts: Facts) -> Section | None:
    """The page's table of other inputs: their step, price and saving; None where the input does not limit the run."""
    wanted = cores_wanted(facts)
    if wanted is None:
        return None
    now, *_ = found = ways(facts)
    rows = [
        [w.name, round(w.step_ms, 1), short(w.price), short(w.cost), _saved(now, w)] for w in found
    ]
    note = f"{wanted[0]} cores a GPU needed, {wanted[1]:g} there. The first row is measured, the others are at best."
    if now.price:
        worth = now.price * (now.step_ms / found[1].step_ms - 1)
        note += f" Feeding the GPUs pays while it costs less than {worth:.3g} an hour more."
    columns = [
        "input",
        "ms a step",
        "an hour",
        "1000 steps",
        f"saves ({'cost' if now.cost else 'time'}, %)",
    ]
    return table("What another input would cost", columns, rows, note=note)


def _saved(now: Way, way: Way) -> str:
    if way is now:
        return ""
    priced = now.cost and way.cost is not None
    return f"{100 * (1 - (way.cost / now.cost if priced else way.step_ms / now.step_ms)):.0f}"  # type: ignore[operator]


def tier_table(facts: Facts) -> Section | None:
    """The table of the page: each machine, and the queue."""
    tier = facts.tier
    if tier is None:
        return None
    rows = [
        [
            f"{machine['name']} ({machine['node']})" + (" gone" if machine["gone"] else ""),
            machine["cores"],
            machine["makers"],
            machine["batches"],
            _rate(machine["batches"], tier.seconds),
            _rate(machine["mb"], tier.seconds),
            _rate(machine["busy_s"], tier.seconds),
        ]
        for machine in tier.machines.values()
    ]
    note = (
        f"{tier.ready:.1f} batches were ready on average, of {tier.may_ask} that a training process may ask for ahead "
        f"(data.tier.queue_mb); {tier.made_again} were made again after an end, {tier.made_twice} twice."
    )
    columns = ["machine", "cores", "makers", "batches", "batches/s", "MB/s", "cores at work"]
    return table("Data tier", columns, rows, note=note)


def _rate(value: float, seconds: float) -> float:
    return round(value / seconds, 2) if seconds else 0.0


# -- whether a data tier pays: ``kd-report RUN --what-if data_machines=N`` --------------------------------------------
def tier_pays(facts: Facts, change: Change) -> list[str]:
    """Sentences that compare the tier of ``change`` with the same run without that part of the change.

    Raises:
        UserError: see :func:`kd.report.what_if.what_if`.
    """
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
        text = f"a data tier would bring nothing: {phase_share(facts.phases, 'data'):.0%} of the step waits for data"
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
    facts: Facts,
    change: Change,
    machines: DataMachines,
    had: DataMachines | None,
    now: Outlook,
    then: Outlook,
) -> str:
    instead = f" instead of {had.count} of {had.cores:g} cores" if had else ""
    few = fewest(facts, change)
    text = f"with {_count(machines.count)} ({machines.named}){instead} a step would take {_ms(then)} instead of {_ms(now)}"
    if few > machines.count:
        return f"{text}, and still wait for batches up to {few} machines"
    return f"{text}; {'as few as' if few < machines.count else ''} {few} would do".replace(
        "  ", " "
    )


def fewest(facts: Facts, change: Change) -> int:
    """Data machines from which on more make no step shorter."""
    least = predict(facts, replace(change, data_machines=MANY)).step_ms * (1 + 1e-9)
    counts = range(1, MANY)
    return counts[
        bisect_left(
            counts,
            True,
            key=lambda n: predict(facts, replace(change, data_machines=n)).step_ms <= least,
        )
    ]


def _cost(now: Outlook, then: Outlook) -> str:
    assert now.cost is not None and then.cost is not None
    saved = 1 - then.cost / now.cost if now.cost else 0.0
    if saved > 0:
        return f"it pays: the run costs {saved:.0%} less"
    faster = (
        f", and is {now.step_ms / then.step_ms:.2g}x as fast" if then.step_ms < now.step_ms else ""
    )
    return f"it does not pay: the run costs {-saved:.0%} more{faster}"


def _counts(
    facts: Facts, change: Change, machines: DataMachines, had: DataMachines | None, now: Outlook
) -> list[str]:
    """From which number on it pays; beyond the fewest that do each more only costs more."""
    if change.price is not None or machines.price is None or now.cost is None:
        return []
    few = min(MOST, fewest(facts, change))
    costs = ((n, predict(facts, replace(change, data_machines=n)).cost) for n in range(1, few + 1))
    known = {n: cost for n, cost in costs if cost is not None}
    if had is not None:
        return (
            [f"of all numbers of them {min(known, key=known.__getitem__)} would cost least"]
            if known
            else []
        )
    paying = [n for n, cost in known.items() if cost < now.cost]
    if not paying:
        return [f"no number of these machines pays, at {machines.price:.4g} an hour each"]
    cheapest = min(paying, key=known.__getitem__)
    return [f"it pays from {_count(paying[0])} on; {cheapest} cost{'s' * (cheapest == 1)} least"]


def _price(
    facts: Facts,
    before: Change,
    machines: DataMachines,
    had: DataMachines | None,
    now: Outlook,
    then: Outlook,
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
    return [
        f"a training machine would receive {rate:,.0f} MB/s of batches: its network must take that"
    ]


def _count(number: int) -> str:
    return f"{number} data machine{'s' * (number != 1)}"


def _ms(outlook: Outlook) -> str:
    return f"{outlook.step_ms:.4g} ms"

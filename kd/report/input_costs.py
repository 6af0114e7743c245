"""What a run costs by kind of price; what made its batches; whether another input, or a data tier, would pay."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kd.report.charts import Section, table
from kd.report.facts import DATA_WAIT_AT, Facts
from kd.report.limits import cores_needed
from kd.report.metric import short
from kd.report.prices import machines_of
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
        if self.price is None:
            return None
        return self.price * self.step_ms / 3600


def cores_wanted(facts: Facts) -> tuple[int, float] | None:
    """Cores a GPU that would keep up, and those that are there.

    None where loading does not hold a GPU up: on CPUs, with a data tier, where the step hardly waits, or where there
    are enough cores.
    """
    if facts.run.tier or facts.cpu or phase_share(facts.phases, "data") < DATA_WAIT_AT:
        return None
    needed = cores_needed(facts)
    present_cores = facts.cores / facts.processes
    if needed > present_cores:
        return (needed, present_cores)
    return None


def ways(facts: Facts) -> list[Way]:
    """What the run could do about its input, with ms a step and the price of an hour.

    In this order: as it is; views made on the device; larger machines; machines beside that make all batches. The first
    is measured, the others are at best.
    """
    rest = facts.step_ms - facts.phases["data"]
    price = facts.price
    possible = [
        Way("as it is", facts.step_ms, price),
        Way("data.engine=device, or dali", rest, price),
        *_larger(facts, rest),
    ]
    for name, machine in (facts.header.get("input_machines") or {}).items():
        if machine.get("gpus"):
            continue
        count = machines_needed(facts, rest, machine["vcpus"])
        price_then = None
        if price is not None:
            price_then = price + count * machine["price"]
        possible.append(Way(f"data.engine=ray on {count} {name} beside", rest, price_then))
    return possible


def _has_gpus(machines: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    """Whether the run's table of prices says that a machine has GPUs."""
    machine = machines.get(name, {})
    return bool(machine.get("gpus"))


def _larger(facts: Facts, rest: float) -> Iterator[Way]:
    """Instances of the training machines' family with as many GPUs and more cores, each with the loader processes that its
    cores leave room for.

    Args:
        facts: of the run.
        rest: ms of a step beside waiting for data.
    """
    machines = facts.header.get("input_machines") or {}
    monitor = facts.run.config.get("monitor") or {}
    instances = machines_of(monitor.get("instances") or [])
    trains_on = [(name, count) for count, name in instances if _has_gpus(machines, name)]
    if not trains_on:
        return
    present_name, present_count = trains_on[0]
    now = machines[present_name]
    kind = _kind(present_name, now)
    # CPU time of a step's loading and training.
    cpu_ms = facts.loading_busy * batch_ms(facts) + facts.threads * rest
    for name, machine in machines.items():
        cores = machine["vcpus"]
        if _kind(name, machine) != kind or cores <= now["vcpus"]:
            continue
        made_ms = facts.processes * cpu_ms / cores
        price = None
        if facts.price is not None:
            dearer = machine["price"] - now["price"]
            price = facts.price + present_count * dearer
        workers = int(cores // facts.processes) - facts.threads
        step_ms = max(rest, made_ms)
        yield Way(f"{name} with data.num_workers={workers}", step_ms, price)


def _kind(name: str, machine: Mapping[str, float]) -> tuple[str, bool, float]:
    """What machines of one kind share: family (``p4d`` of ``p4d.24xlarge``), spot or not, number of GPUs."""
    return name.rpartition(".")[0], name.endswith(":spot"), machine["gpus"]


def costs_by_kind(facts: Facts) -> Section | None:
    """The page's table of what an hour, 1000 steps, an epoch and the run cost: on demand, on spot, and half of each.

    None where the run had no table of prices.
    """
    prices = facts.header.get("prices")
    if not prices:
        return None
    thousand_steps_s = facts.step_ms  # 1000 steps take as many seconds as one takes ms
    rows = []
    for kind, hourly in prices.items():
        row = [kind, short(hourly)]
        for seconds in (thousand_steps_s, facts.epoch_s, facts.planned_s):
            row.append(short(hourly * seconds / 3600) if seconds else "")
        rows.append(row)
    columns = ["", "an hour", "1000 steps", "an epoch", "the run"]
    note = (
        "An interrupted machine repeats what came after the last checkpoint; that is not counted."
    )
    return table("Cost by price", columns, rows, note=note)


def input_costs(facts: Facts) -> Section | None:
    """The page's table of other inputs: their step, price and saving; None where no GPU waits for want of cores
    (:func:`cores_wanted`).
    """
    cores = cores_wanted(facts)
    if cores is None:
        return None
    possible = ways(facts)
    now, free_input = possible[:2]
    rows = []
    for way in possible:
        step_ms = round(way.step_ms, 1)
        rows.append([way.name, step_ms, short(way.price), short(way.cost), _saved(now, way)])
    note = (
        f"{cores[0]} cores a GPU needed, {cores[1]:g} there. "
        "The first row is measured, the others are at best."
    )
    if now.price:
        worth = now.price * (now.step_ms / free_input.step_ms - 1)
        note += f" Feeding the GPUs pays while it costs less than {worth:.3g} an hour more."
    saves = f"saves ({'cost' if now.cost else 'time'}, %)"
    columns = ["input", "ms a step", "an hour", "1000 steps", saves]
    return table("What another input would cost", columns, rows, note=note)


def _saved(now: Way, way: Way) -> str:
    """What a way saves in %: of the cost where both are known, else of the time; "" for the present one."""
    if way is now:
        return ""
    part = way.step_ms / now.step_ms
    if now.cost and way.cost is not None:
        part = way.cost / now.cost
    return f"{100 * (1 - part):.0f}"


def tier_table(facts: Facts) -> Section | None:
    """The page's table of the data tier: what each machine has made, and below it the queue; None without a tier."""
    tier = facts.tier
    if tier is None:
        return None
    rows = []
    for machine in tier.machines.values():
        name = f"{machine['name']} ({machine['node']})"
        if machine["gone"]:
            name += " gone"
        rates = [_rate(machine[what], tier.seconds) for what in ("batches", "mb", "busy_s")]
        rows.append([name, machine["cores"], machine["makers"], machine["batches"], *rates])
    note = (
        f"{tier.ready:.1f} batches were ready on average, of {tier.may_ask} that a training process may ask for ahead "
        f"(data.tier.queue_mb); {tier.made_again} were made again after an end, {tier.made_twice} twice."
    )
    columns = ["machine", "cores", "makers", "batches", "batches/s", "MB/s", "cores at work"]
    return table("Data tier", columns, rows, note=note)


def _rate(value: float, seconds: float) -> float:
    """``value`` a second; 0 where no time has passed."""
    if seconds:
        return round(value / seconds, 2)
    return 0.0


# -- whether a data tier pays: ``kd-report RUN --what-if data_machines=N`` --------------------------------------------
@dataclass(frozen=True)
class _Comparison:
    """A run without and with a change of its data tier."""

    facts: Facts
    change: Change
    machines: DataMachines
    """The changed tier."""
    machines_now: DataMachines | None
    """The run's own tier; None: it has none."""
    now: Outlook
    """The run without the change of its tier."""
    then: Outlook
    """The run with it."""

    def with_machines(self, count: int) -> Outlook:
        """The run with another number of the changed tier's machines."""
        return predict(self.facts, replace(self.change, data_machines=count))


def tier_pays(facts: Facts, change: Change) -> list[str]:
    """Sentences that compare the tier of ``change`` with the same run without that part of the change; [] where it changes
    no tier.

    Raises:
        UserError: see :func:`kd.report.what_if.predict`.
    """
    if not change.of_the_tier:
        return []
    before = replace(change, data_machines=None, data_cores=None, data_instance=None, price=None)
    if facts.tier is None and change.workers is not None:
        before = replace(before, workers=None)  # of the tier
    now = predict(facts, before)
    then = predict(facts, change)
    machines = wanted(facts, change)
    machines_now = present(facts)
    if machines is None:
        if machines_now is None:
            return ["the run has no data tier: nothing is different"]
        return _without(now, then)
    compared = _Comparison(facts, change, machines, machines_now, now, then)
    with_many = compared.with_machines(MANY)
    if machines_now is None and now.step_ms < NOTHING * with_many.step_ms:
        wait = phase_share(facts.phases, "data")
        text = f"a data tier would bring nothing: {wait:.0%} of the step waits for data"
        if not waits(facts):
            text += ", and loading keeps up"
        return [text]
    sentences = [_speed(compared)]
    if now.cost is not None and then.cost is not None:
        sentences.append(_cost(now, now.cost, then, then.cost))
    return [*sentences, *_counts(compared), *_price(compared), *_network(facts, then)]


def _without(now: Outlook, then: Outlook) -> list[str]:
    """Lines about a run without its data tier: time of a step, and whether the tier pays where prices are known."""
    text = f"without its data tier a step would take {_ms(then)} instead of {_ms(now)}"
    if now.cost is None or then.cost is None:
        return [text]
    pays = "the tier does not pay"
    if then.cost > now.cost:
        pays = "the tier pays"
    return [text, f"{pays}: the run costs {now.cost:.4g} with it and {then.cost:.4g} without"]


def _speed(compared: _Comparison) -> str:
    """A sentence: what a step would take with other machines for the data, and how many would do."""
    machines = compared.machines
    machines_now = compared.machines_now
    instead = ""
    if machines_now is not None:
        instead = f" instead of {machines_now.count} of {machines_now.cores:g} cores"
    text = (
        f"with {_count(machines.count)} ({machines.named}){instead} a step would take "
        f"{_ms(compared.then)} instead of {_ms(compared.now)}"
    )
    few = fewest(compared.facts, compared.change)
    if few > machines.count:
        return f"{text}, and still wait for batches up to {few} machines"
    if few < machines.count:
        return f"{text}; as few as {few} would do"
    return f"{text}; {few} would do"


def fewest(facts: Facts, change: Change) -> int:
    """The number of data machines from which on more make no step shorter, for a run with ``change``."""

    def step_ms(count: int) -> float:
        return predict(facts, replace(change, data_machines=count)).step_ms

    def is_enough(count: int) -> bool:
        return step_ms(count) <= least_ms

    least_ms = step_ms(MANY) * (1 + 1e-9)
    counts = range(1, MANY)
    place = bisect_left(counts, True, key=is_enough)
    return counts[place]


def _cost(now: Outlook, cost_now: float, then: Outlook, cost_then: float) -> str:
    """A sentence: what a change saves or costs, as a share of the run's price now.

    Args:
        now: the run as it is.
        cost_now: its price.
        then: the changed run.
        cost_then: its price, in the same currency.
    """
    saved = 0.0
    if cost_now:
        saved = 1 - cost_then / cost_now
    if saved > 0:
        return f"it pays: the run costs {saved:.0%} less"
    text = f"it does not pay: the run costs {-saved:.0%} more"
    if then.step_ms < now.step_ms:
        text += f", and is {now.step_ms / then.step_ms:.2g}x as fast"
    return text


def _counts(compared: _Comparison) -> list[str]:
    """From which number of machines on the tier pays, and which number costs least, in a sentence; of a run that has a tier
    already the second alone.

    Numbers up to the fewest with which no step waits are tried: beyond it each more only costs more. [] without the prices
    of a machine and of the run, and where the change names the price of the whole job.
    """
    machine_price = compared.machines.price
    cost_now = compared.now.cost
    if compared.change.price is not None or machine_price is None or cost_now is None:
        return []
    costs = {}
    for count in range(1, min(MOST, fewest(compared.facts, compared.change)) + 1):
        cost = compared.with_machines(count).cost
        if cost is not None:
            costs[count] = cost
    if compared.machines_now is not None:
        if not costs:
            return []
        cheapest = min(costs, key=lambda count: costs[count])
        return [f"of all numbers of them {cheapest} would cost least"]
    paying = [count for count, cost in costs.items() if cost < cost_now]
    if not paying:
        return [f"no number of these machines pays, at {machine_price:.4g} an hour each"]
    cheapest = min(paying, key=lambda count: costs[count])
    return [f"it pays from {_count(paying[0])} on; {cheapest} cost{'s' * (cheapest == 1)} least"]


def _price(compared: _Comparison) -> list[str]:
    """The price of an hour of one data machine at which the run costs as much as before, in a sentence.

    Where no price is known: what all machines that are added, or taken away, cost together, as a share of what an hour of
    the whole job costs now. [] where the change has as many machines, or machines of another number of cores.
    """
    machines = compared.machines
    machines_now = compared.machines_now
    now = compared.now
    more = machines.count - (machines_now.count if machines_now else 0)
    if more == 0 or (machines_now is not None and machines_now.cores != machines.cores):
        return []
    worth = now.hours / compared.then.hours - 1  # as a share of what an hour of the whole job costs
    if more > 0 and worth <= 0:
        return ["it pays at no price: the run would be no shorter"]
    pays, than = ("it pays while", "less") if more > 0 else ("it pays where", "more")
    if now.cost is not None:
        whose = "a machine"
        if more > 0 and machines_now is not None:
            whose = "another machine"
        price = max(0.0, now.cost / now.hours * worth / more)
        return [f"{pays} {whose} costs {than} than {price:.3g} an hour"]
    they_cost = "they cost" if abs(more) > 1 else "it costs"
    share = max(0.0, worth if more > 0 else -worth)
    whole = f"{share:.0%} of what the whole job costs now"
    return [f"{pays} {they_cost} {than} than {whole} (together, an hour)"]


def _network(facts: Facts, then: Outlook) -> list[str]:
    """What each training machine receives, in a sentence: whether its network takes that is not in the records.

    As measured of a tier, else as uint8 pixels of the pictures' size; [] where that is not known.
    """
    size = (facts.run.config.get("data") or {}).get("img_size")
    if isinstance(size, int):
        size = [size, size]
    if facts.tier is not None:
        batches = facts.tier.total("batches")
        megabytes = 0.0
        if batches:
            megabytes = facts.tier.total("mb") / batches
    elif isinstance(size, list) and len(size) == 2:
        height, width = size
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

"""What a run takes and costs, as it is and with a change: ``kd-report RUN --what-if``, and the page's tables of costs.

:func:`predict` is the one function that predicts; the tables list what it says of several changes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated

from kd.config.kinds import Checked, Range, checked_group
from kd.errors import UserError
from kd.report.facts import BUSY, DATA_WAIT_AT, Facts
from kd.report.limits import cores_needed
from kd.report.metric import short
from kd.report.prices import machines_of
from kd.report.ratio import times
from kd.report.records import PHASES
from kd.report.step_facts import phase_share
from kd.report.tables import Cell, Table

WAITS = 0.05  # share of the step that waits for its batch: below it, those who make batches keep up
# the worst of followed advice against prediction in scripts/bench/truth_cpu_2026-11-22.md
ERROR = 0.23
MANY = 100_000  # data machines: more than any job has
BY_PICTURE = ("data", "h2d", "teacher", "student", "forward", "loss", "backward")
"""Phases whose time grows with the batch."""


# -- what is to be different -------------------------------------------------------------------------------------------
@checked_group
class Change(Checked):
    """What is to be different; ``None`` stays as it was."""

    cache: bool | None = None
    """The teacher's answers are kept (on) or computed each time (off)."""
    pixels: bool | None = None
    """The pixels of cached views are kept too, or made each time."""
    workers: Annotated[int, Range(">= 0")] | None = None
    """Loader processes of each training process; with a data tier the makers of each."""
    gpus: Annotated[int, Range(">= 1")] | None = None
    """Training processes."""
    machines: Annotated[int, Range(">= 1")] | None = None
    """Training machines, each with as many processes as now."""
    batch_size: Annotated[int, Range(">= 1")] | None = None
    """Pictures of a training process's batch."""
    epochs: Annotated[int, Range(">= 1")] | None = None
    """Epochs of the run."""
    price: Annotated[float, Range(">= 0")] | None = None
    """Price of an hour of the whole changed job."""
    data_machines: Annotated[int, Range(">= 0")] | None = None
    """Machines of a data tier that make all batches; 0: none do."""
    data_cores: Annotated[int, Range(">= 1")] | None = None
    """Cores of each data machine."""
    data_instance: str | None = None
    """Name of the data machines in the run's table of prices, for their cores and price."""

    @property
    def of_the_tier(self) -> bool:
        """Whether it changes the data tier: its machines, their cores or their kind."""
        return any(x is not None for x in (self.data_machines, self.data_cores, self.data_instance))

    @property
    def of_the_step(self) -> bool:
        """Whether it changes anything but the price."""
        return any(
            getattr(self, one.name) is not None for one in fields(Change) if one.name != "price"
        )

    def processes(self, facts: Facts) -> int:
        """Training processes of the changed run."""
        if self.machines:
            return self.machines * facts.processes
        return self.gpus or facts.devices

    def larger(self, facts: Facts) -> float:
        """How many times as large the changed run's batch is."""
        return (self.batch_size or facts.header["batch_size"]) / facts.header["batch_size"]


# -- the machines of a data tier ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DataMachines:
    """Machines of a data tier."""

    count: int
    """How many."""
    cores: float
    """Cores of each, on average."""
    price: float | None = None
    """Price of an hour of one; None: not known."""


def present(facts: Facts) -> DataMachines | None:
    """The run's own tier, as it was at the end; ``None`` without one, without a batch, or without a maker at the end.

    Cores and price are means over its machines; the price is 0 where they also train.
    """
    tier = facts.tier
    if tier is None or not tier.makers or not tier.total("batches"):
        return None
    count = len(tier.present)
    cores = tier.cores / count
    paid, hourly = _paid_tier(facts)
    price = None
    if hourly is not None:
        price = hourly / paid
    return DataMachines(count, cores, price)


def _paid_tier(facts: Facts) -> tuple[int, float | None]:
    """The data machines whose price is part of the job's, lost ones among them: how many, and their price; None: not known.

    The price is 0 where they also train; else as the job of ``kd-launch`` has it, or ``monitor.instances`` and the
    table of prices.
    """
    hosts = {header.get("host") for header in facts.run.headers.values()}
    present_machines = facts.tier.present if facts.tier else []
    count = max(1, len(present_machines))
    if present_machines and all(machine["name"] in hosts for machine in present_machines):
        return count, 0.0

    # of kd-launch's job: 4 x c5.18xlarge
    for group in facts.run.job.get("groups") or []:
        known_price = isinstance(group, dict) and group.get("price_per_hour") is not None
        if known_price and group.get("name") == "data":
            machines = str(group.get("machines"))
            number, _, _ = machines.partition(" x ")
            if number.isdecimal():
                count = max(1, int(number))
            return count, float(group["price_per_hour"])

    known = facts.header.get("input_machines") or {}
    monitor = facts.run.config.get("monitor") or {}
    prices = []
    for number_of, name in machines_of(monitor.get("instances") or []):
        machine = known.get(name, {"gpus": 1})
        if not machine.get("gpus"):  # those with GPUs train
            prices += [machine["price"]] * number_of
    if not prices:
        return count, None
    return len(prices), sum(prices)


def wanted(facts: Facts, change: Change) -> DataMachines | None:
    """The tier of the changed run, or ``None``. What ``change`` does not name stays as it is.

    Raises:
        UserError: the number of the machines, or their cores, are not known.
    """
    now = present(facts)
    if change.of_the_tier and facts.run.tier and now is None:
        raise UserError(f"{facts.run.folder}: too few records of its data tier to predict from")
    if change.data_machines == 0:
        return None
    if not change.of_the_tier:
        return now
    if change.data_instance is not None:
        name = change.data_instance.removesuffix(":on_demand")
        machine = _instance(facts, name)
    elif change.data_cores is not None:
        machine = DataMachines(1, change.data_cores)
    elif now is not None:
        machine = now
    else:
        raise UserError(
            "data_machines: needs data_cores=N, or data_instance=NAME of the run's table of prices"
        )
    count = change.data_machines or (now.count if now else None)
    if count is None:
        raise UserError("data_machines: must be given (data_machines=N): the run had no data tier")
    return replace(machine, count=count)


def _instance(facts: Facts, name: str) -> DataMachines:
    """One machine of the run's table of prices, for its cores and price.

    Raises:
        UserError: the run has no table, or the table has no vcpus of this machine.
    """
    known = facts.header.get("input_machines") or {}
    if not known:
        raise UserError(
            "data_instance: needs a run with a table of prices and vcpus (monitor.prices=FILE); "
            "data_cores=N predicts without prices"
        )
    if name not in known:
        raise UserError(
            f"data_instance: no price and vcpus of '{name}'; known: {', '.join(list(known)[:20])}"
        )
    return DataMachines(1, known[name]["vcpus"], known[name]["price"])


# -- a step when other processes make its batches ----------------------------------------------------------------------
def waits(facts: Facts) -> bool:
    """Whether the step waits for its batch for long enough that other makers could help."""
    return phase_share(facts.phases, "data") >= WAITS


def batch_ms(facts: Facts) -> float:
    """Ms that one loader process takes to make a batch; an upper bound where loader processes keep up. Without any it is
    the step's wait.

    Where the step waits, ``n`` processes deliver one batch each in ``n`` steps. Where they keep up, their CPU time a
    step is known: the cores that they use times the step, over the share of the time in which they compute. Where these
    were not sampled either, it is the step without its wait.
    """
    wait_ms = facts.phases.get("data", 0.0)
    if facts.workers == 0:
        return wait_ms
    if waits(facts):
        return facts.workers * facts.step_ms
    if not facts.loading_cores:
        return facts.step_ms - wait_ms
    return facts.loading_cores / facts.processes * facts.step_ms / max(0.05, facts.loading_busy)


def maker_ms(facts: Facts) -> float:
    """Ms that one process of a data tier takes for a batch, on its own core.

    Without a tier it is estimated from a loader process: the part of its time for a batch in which it computes; where the
    step waits and waits for a core were recorded, in which it has a core. Without loader processes it is the step's wait.
    """
    tier, now = facts.tier, present(facts)
    if tier is None or now is None:
        loader_ms = batch_ms(facts)
        if facts.workers == 0:
            return loader_ms
        if not waits(facts) or facts.loader_wait is None:
            return facts.loading_busy * loader_ms
        return (1 - facts.loader_wait) * loader_ms

    # With n makers for each training process, a maker has n steps for a batch.
    n_steps_ms = facts.step_ms * _makers(facts, now, facts.devices, None)
    if waits(facts) and not _waits_for_transfer(facts):
        return n_steps_ms
    return min(1000 * tier.batch_s, n_steps_ms)


def _waits_for_transfer(facts: Facts) -> bool:
    """Whether the step waits for the transfer to the training processes: makers are idle, or the queue holds fewer batches
    than there are makers.
    """
    tier = facts.tier
    return tier is not None and waits(facts) and (tier.queue_is_short or tier.busy < BUSY)


def _makers(facts: Facts, machines: DataMachines, processes: int, workers: int | None) -> float:
    """Makers of a training process: one on each core, shared evenly, or ``workers`` up to the cores.

    Where ``workers`` is None, the ``data.num_workers`` of a run that has a tier counts.
    """
    cores = machines.count * machines.cores
    share = cores / processes
    if workers is None and facts.tier is not None:
        of_data = facts.run.config.get("data") or {}
        setting = of_data.get("num_workers")
        workers = setting if isinstance(setting, int) else None
    if workers:
        return min(workers, share)
    whole = cores // processes
    return float(whole or share)


def _tier_step(
    facts: Facts, phases: Mapping[str, float], machines: DataMachines, change: Change
) -> float:
    """Ms of a step with a data tier: the longest of the rest of the step, the makers' time and the transfer.

    The wait for data counts as part of the rest only where it is too short for :func:`waits`.
    """
    rest = sum(phases.values())
    if waits(facts):
        rest = _without_data(phases)
    makers = _makers(facts, machines, change.processes(facts), change.workers)
    made = maker_ms(facts) * change.larger(facts) / makers
    transfer = 0.0
    if _waits_for_transfer(facts):
        transfer = facts.step_ms * change.larger(facts)
    return max(rest, made, transfer)


def _without_data(phases: Mapping[str, float]) -> float:
    """Ms of a step without its wait for data."""
    return sum(ms for name, ms in phases.items() if name != "data")


def _local_step(facts: Facts, phases: Mapping[str, float], change: Change) -> float:
    """Ms of a step with loader processes on the training machines.

    The longest of the rest of the step, a loader's time for a batch over the number of loaders, and, where training
    computes on the same cores or there are more loaders than cores, the CPU time of both over the cores. Without loader
    processes the batch's time is added.
    """
    rest = _without_data(phases)
    if change.workers is None and facts.workers == 0 and facts.tier is None:
        return rest + phases.get("data", 0.0)
    cores = facts.cores / facts.processes
    loader_ms = batch_ms(facts)
    busy = facts.loading_busy
    count = facts.workers
    if facts.tier is not None:
        loader_ms = 1000 * facts.tier.batch_s
        busy = 1.0
        count = max(1, int(cores - facts.threads))
    if change.workers is not None:
        count = change.workers
    loader_ms *= change.larger(facts)
    if count == 0:
        return rest + loader_ms
    cpu_limit = 0.0
    if facts.cpu or count > cores:
        cpu_ms = busy * loader_ms + facts.threads * rest
        cpu_limit = cpu_ms / cores
    of_loaders = loader_ms / count
    return max(rest, of_loaders, cpu_limit)


# -- the run -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outlook:
    """A run's time and cost."""

    step_ms: float
    """Milliseconds of a mean step over the run."""
    images_per_s: float
    """Pictures a second, of all processes."""
    hours: float
    """Hours of the whole run, start-up and validation included."""
    cost: float | None
    """Price of the whole run; None: not known."""


def predict(facts: Facts, change: Change) -> Outlook:
    """Time and cost of the run with ``change``; with none, of the run as it is.

    More processes share an epoch's batches. The part of an all-reduce that is not hidden grows as the traffic of a
    ring's, ``(n - 1) / n`` for ``n`` processes. Computing grows with the batch. Every process brings as many cores as now;
    a data tier that ``change`` does not name stays as it is.

    Raises:
        UserError: too little is recorded to predict from, or the change contradicts the run.
    """
    _check_known(facts, change)
    epochs = change.epochs or facts.length
    if not facts.step_ms or not epochs or not math.isfinite(facts.batches_per_epoch):
        raise UserError(f"{facts.run.folder}: too few records to predict from")
    more_processes = change.processes(facts) / facts.devices
    more = more_processes * change.larger(facts)  # pictures a step
    step = facts.step_ms
    if change.of_the_step:
        step = _mean_step(facts, change, epochs)
    steps = facts.batches_per_epoch * epochs / more

    # Seconds of the run that its records do not explain, where it is not longer than it was.
    unexplained_s = 0.0
    if facts.length == facts.epochs_done:
        wall_s = 3600 * (facts.hours or 0.0)
        unexplained_s = max(0.0, wall_s - facts.recorded_s)
    validation_ms = facts.phases.get("validation", 0.0)
    steps_s = steps * (step + validation_ms) / 1000
    seconds = facts.startup_s + steps_s + unexplained_s
    hours = seconds / 3600
    pictures = facts.header["batch_size"] * facts.devices * more
    images_per_s = 1000 * pictures / step
    price = _price(facts, change)
    cost = None
    if price is not None:
        cost = price * hours
    return Outlook(step, images_per_s, hours, cost)


def _check_known(facts: Facts, change: Change) -> None:
    """Refuses changes of what a training has not, or of what its records do not say.

    Raises:
        UserError: a cache without a teacher; a data tier of a training that is not kd's; loader processes of a loader
            that does not say how many it has.
    """
    folder = facts.run.folder
    if change.cache and not facts.has_teacher:
        raise UserError(f"cache: {folder} has no teacher whose answers could be kept")
    if change.of_the_tier and not facts.of_kd:
        raise UserError(f"data_machines: needs a run of kd-train, {folder} is another training")
    if change.workers is not None and not facts.workers_known:
        raise UserError(f"workers: the loader of {folder} does not say how many processes it has")


def _mean_step(facts: Facts, change: Change, epochs: float) -> float:
    """Ms of the mean step over all epochs, of three kinds.

    The first ``views`` epochs compute the teacher's answers; later ones read them from a cache, if there is one; and
    where the cache holds the pixels too, those also make no views. What was cached before the run counts as read.

    Raises:
        UserError: no recorded step shows what the changed run would do, or pixels without a cache.
    """
    folder = facts.run.folder
    larger = change.larger(facts)
    phases = {}
    for name, ms in facts.phases.items():
        if name in PHASES:
            phases[name] = ms * larger if name in BY_PICTURE else ms
    ring = _ring(change.processes(facts)) / (_ring(facts.devices) or 1.0)
    phases["communication"] = phases.get("communication", 0.0) * ring

    cached = facts.cached if change.cache is None else change.cache
    computed = epochs  # epochs that compute the teacher's answers
    if cached:
        computed = min(max(0.0, facts.views - facts.views_before), epochs)
    if computed and facts.teacher_ms is None:
        raise UserError(f"{folder}: its cache was full, so that no step shows the teacher's time")
    teacher_ms = (facts.teacher_ms or 0.0) * larger
    computed_ms = _step(facts, {**phases, "teacher": teacher_ms}, change)
    read_ms = _step(facts, {**phases, "teacher": 0.0}, change)
    if change.pixels and not cached:
        raise UserError("pixels: are kept beside a cache's answers; cache=on pixels=on")
    if facts.has_pixels and change.pixels is False:
        raise UserError(
            f"{folder}: its views' pixels were cached, so that no step shows their cost"
        )
    made = epochs  # epochs that decode and augment pictures
    if change.pixels and not facts.has_pixels:
        made = min(facts.views, epochs)
    ready_ms = sum(ms for name, ms in phases.items() if name not in ("teacher", "data"))
    all_ms = computed * computed_ms + (made - computed) * read_ms + (epochs - made) * ready_ms
    return all_ms / epochs


def _ring(processes: int) -> float:
    """The share of the gradients that each process sends twice in a ring all-reduce (Patarasuk and Yuan, 2009)."""
    return (processes - 1) / processes


def _step(facts: Facts, phases: dict[str, float], change: Change) -> float:
    """Ms of a step with these phases, by the loader processes or the data tier that make its batches.

    Raises:
        UserError: a data tier without processes, or one whose machines are not known.
    """
    machines = wanted(facts, change)
    if machines is None:
        return _local_step(facts, phases, change)
    if change.workers == 0:
        raise UserError(
            "workers: must be >= 1 with a data tier, got 0 (data_machines=0 is without one)"
        )
    return _tier_step(facts, phases, machines, change)


def _price(facts: Facts, change: Change) -> float | None:
    """Price of an hour of the changed job; None: not known. The run's own price includes its tier, with the machines
    that were lost on the way.

    The training machines' price grows with the number of processes; the tier's is replaced.
    """
    if change.price is not None or facts.price is None:
        return change.price
    now, then = present(facts), wanted(facts, change)
    more_processes = change.processes(facts) / facts.devices

    # What the job's price has of a tier: 0 without one; of machines of the same size by the changed tier's price.
    tier_now: float | None = 0.0
    if now is not None:
        _, tier_now = _paid_tier(facts)
        if tier_now is None and then is not None and then.cores == now.cores and then.price:
            tier_now = now.count * then.price
    if tier_now is not None:
        training = (facts.price - tier_now) * more_processes
        if then is None:
            return training
        if then.price is not None:
            return training + then.count * then.price

    # The tier's price is not known: the job's is, as long as the tier stays as it is.
    stays = not change.of_the_tier
    if now is not None and then is not None:
        stays = stays or (now.count, now.cores) == (then.count, then.cores)
    return facts.price * more_processes if stays else None


def outlook_table(facts: Facts, change: Change) -> Table:
    """The run as it is, and as it would be with ``change``; the note says what that assumes.

    Raises:
        UserError: see :func:`predict`.
    """
    now, then = predict(facts, Change()), predict(facts, change)
    numbers = {
        "step ms": (now.step_ms, then.step_ms),
        "images/s": (now.images_per_s, then.images_per_s),
        "hours": (now.hours, then.hours),
        "cost": (now.cost, then.cost),
    }
    rows = []
    for name, (before, after) in numbers.items():
        if before is not None or after is not None:
            rows.append([name, short(before), short(after), times(before, after)])
    notes = []
    if change.batch_size:
        notes.append("assumed: computing and loading grow with the batch")
    if change.processes(facts) > 1 == facts.devices:
        notes.append(
            "assumed: no step waits for gradients. A run of one process measures no communication, so how far this is "
            "from the truth is not known: kd-scale measures it"
        )
    else:
        notes.append(
            f"give or take {ERROR:.0%}: the worst error of followed advice in the truth bench"
        )
    if change.of_the_tier and wanted(facts, change) is not None:
        notes.append(f"{_fewest(facts, change)} data machines would do: more make no step shorter")
    return Table("", ["", "as it is", "what if", ""], rows, "\n".join(notes))


def _fewest(facts: Facts, change: Change) -> int:
    """The number of data machines from which on more make no step shorter."""
    least_ms = predict(facts, replace(change, data_machines=MANY)).step_ms * (1 + 1e-9)
    few, many = 0, MANY
    while many - few > 1:
        middle = (few + many) // 2
        if predict(facts, replace(change, data_machines=middle)).step_ms <= least_ms:
            many = middle
        else:
            few = middle
    return many


# -- the page's tables -------------------------------------------------------------------------------------------------
def input_costs(facts: Facts) -> Table | None:
    """What other inputs would cost: their step, price and saving; None where no GPU waits for want of cores.

    The first row is measured, the others are at best: views made on the device; machines without GPUs beside that make
    all batches, so many that no step waits. What a row saves is of the cost where prices are known, else of the time.
    """
    needed, cores = cores_needed(facts), facts.cores / facts.processes
    waiting = phase_share(facts.phases, "data") >= DATA_WAIT_AT
    if facts.run.tier or facts.cpu or not waiting or needed <= cores:
        return None
    rest = facts.step_ms - facts.phases["data"]
    makers_of_process = maker_ms(facts) / rest
    makers = facts.devices * math.ceil(round(makers_of_process, 6))
    ways = [
        ("as it is", facts.step_ms, facts.price),
        ("data.engine=device, or dali", rest, facts.price),
    ]
    for name, machine in (facts.header.get("input_machines") or {}).items():
        if machine.get("gpus"):
            continue
        count = max(1, math.ceil(makers / machine["vcpus"]))
        price = None
        if facts.price is not None:
            price = facts.price + count * machine["price"]
        way = f"data.engine=ray on {count} {name} beside"
        ways.append((way, rest, price))

    rows: list[list[Cell]] = []
    for name, step_ms, price in ways:
        part = step_ms / facts.step_ms
        cost = None
        if price is not None:
            cost = price * step_ms / 3600
        if price and facts.price:
            part *= price / facts.price
        saved = ""
        if rows:
            percent = 100 * (1 - part)
            saved = f"{percent:.0f}"
        shown_ms = round(step_ms, 1)
        rows.append([name, shown_ms, short(price), short(cost), saved])
    note = f"{needed} cores a GPU needed, {cores:g} there. The first row is measured, the others are at best."
    saves = f"saves ({'cost' if facts.price else 'time'}, %)"
    columns = ["input", "ms a step", "an hour", "1000 steps", saves]
    return Table("What another input would cost", columns, rows, note)


def tier_table(facts: Facts) -> Table | None:
    """What each machine of the data tier has made, and below it the queue; None without a tier."""
    tier = facts.tier
    if tier is None:
        return None
    rows: list[list[Cell]] = []
    for machine in tier.machines.values():
        name = f"{machine['name']} ({machine['node']})"
        if machine["gone"]:
            name += " gone"
        seconds = tier.seconds or math.inf
        rates = [round(machine[what] / seconds, 2) for what in ("batches", "mb", "busy_s")]
        rows.append([name, machine["cores"], machine["makers"], machine["batches"], *rates])
    note = (
        f"{tier.ready:.1f} batches were ready on average, of {tier.may_ask} that a training process may ask for ahead "
        f"(data.tier.queue_mb); {tier.made_again} were made again after an end, {tier.made_twice} twice."
    )
    columns = ["machine", "cores", "makers", "batches", "batches/s", "MB/s", "cores at work"]
    return Table("Data tier", columns, rows, note)

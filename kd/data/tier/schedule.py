"""A data tier's book-keeping: which machine makes which batch, so that none is lost, doubled or out of order.

Knows neither Ray nor threads nor clocks. A batch is a function of its keys alone, so it does not matter who makes it:
what a machine takes with it when it goes is made again by another, and what a slow one keeps is made a second time.
"""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.utils.data import Dataset

from kd.data.batch import Batch
from kd.data.sampler import Key

DEPTH = 2
"""Batches that a maker has in hand: one under way, and one so that it never waits for the next."""
TRIES = 3
"""After so many makers have ended over one batch the batch is to blame. After so many times a machine's makers have ended in
a row the machine is left out."""
SLOW = 4.0
"""A batch that takes so many times the usual time is given to a second machine as well; see :data:`SLOW_S`."""
SLOW_S = 1.0
"""Seconds after which a batch is given to a second machine at the earliest."""
MB = 10**6


Work: TypeAlias = tuple[Dataset[Any], Callable[..., Any]]
"""A kind of batch: its samples, and what makes a batch of some."""


class MakerEnded(Exception):
    """A maker is gone, and what it had in hand; its argument: whether for lack of memory."""


@dataclass
class Made:
    """What a maker has returned for one batch."""

    batch: Batch | Exception
    """The batch, or why it was not made."""
    size: int
    """Bytes."""
    seconds: float
    """Seconds that it took."""


@dataclass(eq=False)
class Machine:
    """A machine of the tier, as this training process sees it."""

    node: str
    """Id in the cluster."""
    name: str
    """Name for people."""
    cores: int
    """Cores that it gives to batches, a maker each."""
    wanted: int = 0
    """Makers that this process is to have there."""
    failures: int = 0
    """Makers that have ended there since its last batch."""
    batches: int = 0
    """Batches made there, without those that were no longer wanted (:meth:`Scheduler.done`)."""
    busy_s: float = 0.0
    """Seconds that its makers have worked for them."""
    megabytes: float = 0.0
    """Size of these batches."""
    gone: bool = False
    """Whether it has left the cluster, or was left out."""


@dataclass(eq=False)
class Worker:
    """A process on a machine that makes one batch after another."""

    machine: Machine
    """Where it runs."""
    handle: Any
    """How the cluster names it."""
    ready: bool = False
    """Whether it has reported that it runs."""
    jobs: list["BatchJob"] = field(default_factory=list)
    """Its jobs, in the order in which it makes them."""


@dataclass(eq=False)
class BatchJob:
    """One batch that is to be made; several makers may work on it where one is slow."""

    stream: "Stream"
    """The pass that it belongs to."""
    number: int
    """Its place in the pass."""
    keys: list[Key]
    """Keys of its samples."""
    makers: dict[Worker, float] = field(default_factory=dict)
    """The workers that make it, and since when."""
    lost: int = 0
    """Workers that have ended while making it."""


@dataclass(eq=False)
class Stream:
    """Batches of one pass over a loader, in its order."""

    work: int
    """Number of the kind of batches."""
    batches: Iterator[list[Key]]
    """The keys of each batch, in order."""
    most: int
    """Bytes of this pass's batches that may be requested and not yet used; one batch always may be."""
    batch_bytes: int = 0
    """Of the largest batch so far; 0 before the first."""
    asked: int = 0
    """Batches requested of this pass."""
    used: int = 0
    """Batches that were taken."""
    jobs: dict[int, BatchJob] = field(default_factory=dict)
    """By the batch's number, those not made yet."""
    ready: dict[int, Batch | Exception] = field(default_factory=dict)
    """Likewise, those made and not used yet."""
    all_asked: bool = False

    def ahead(self, makers: int) -> int:
        """How many batches may be requested and not used: what the makers can hold and two more, as far as memory allows.

        Before the size of a batch is known it is one.
        """
        if not self.batch_bytes:
            return 1
        held_by_makers = DEPTH * makers + 2
        fitting = self.most // self.batch_bytes
        return max(1, min(held_by_makers, fitting))

    @property
    def ended(self) -> bool:
        """Whether all batches of the pass were requested and used."""
        return self.all_asked and self.used == self.asked

    def ask(self, makers: int) -> BatchJob | None:
        """The next batch to be made, where one more may be requested; None: not yet, or the pass has no more.

        Args:
            makers: how many are ready, which bounds how far ahead batches are made.
        """
        if self.all_asked or self.asked - self.used >= self.ahead(makers):
            return None
        keys = next(self.batches, None)
        if keys is None:
            self.all_asked = True
            return None
        job = BatchJob(self, self.asked, keys)
        self.jobs[self.asked] = job
        self.asked += 1
        return job


class Scheduler:
    """Who makes what. Every method is to be called with the same lock held (:class:`~kd.data.tier.loader.Tier` has it).

    Attributes:
        machines: by their id in the cluster, those that have gone too.
        makers: the workers that were started and have not ended, ready or not.
        streams: the passes that are read now.
        again: batches whose maker has ended, to be made before any new one.
        took: seconds from giving a batch out to its end, of the last 64.
        second_tries: batches that were given to a second machine as well.
        repeated: batches that were lost with their maker.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, makers: int | None = None) -> None:
        """Begins without machines or passes.

        Args:
            rank: number of this training process.
            world_size: training processes that share the tier.
            makers: how many of this process; None: one on each core of its share.
        """
        self.rank = rank
        self.world_size = world_size
        self.count = makers
        self.machines: dict[str, Machine] = {}
        self.makers: list[Worker] = []
        self.streams: list[Stream] = []
        self.again: deque[BatchJob] = deque()
        self.took: deque[float] = deque(maxlen=64)
        self.second_tries = 0
        self.repeated = 0

    # -- machines ----------------------------------------------------------------------------------------------------
    def present(self, machines: dict[str, tuple[str, int]]) -> list[Machine]:
        """Takes over which machines are in the cluster, and shares them out anew. A machine that has gone, or was left out,
        stays so.

        Args:
            machines: name and cores by the machine's id.

        Returns:
            The machines that have left since the last call.
        """
        left = [machine for machine in self.working if machine.node not in machines]
        for machine in left:
            machine.gone = True
        for node, (name, cores) in machines.items():
            self.machines.setdefault(node, Machine(node, name, cores))
        self._share_out()
        return left

    @property
    def working(self) -> list[Machine]:
        """The machines that are in the cluster and were not left out."""
        return [m for m in self.machines.values() if not m.gone]

    def _share_out(self) -> None:
        """Sets how many makers of this process each machine is to have, by its rank; each process does so for itself.

        One on each ``world_size``-th core, so that all processes get as many, or one more, or the given number; in turn
        on one core of each machine, then on a second of each that has two, and so on.
        """
        machines = self.working
        most_cores = max((machine.cores for machine in machines), default=0)
        in_turn = [m for i in range(most_cores) for m in machines if i < m.cores]
        count = len(in_turn)
        # fewer cores than processes: several use a core
        end = max(count, self.rank + 1)
        places = range(self.rank, end, self.world_size)
        if self.count is not None:
            first = self.rank * self.count
            places = range(first, first + self.count)
        wanted: Counter[Machine] = Counter()
        for place in places if count else ():
            wanted[in_turn[place % count]] += 1
        for machine in machines:
            machine.wanted = wanted[machine]

    def missing(self) -> list[Machine]:
        """Machines on which makers of this process are still to be started: each as often as makers are missing there."""
        running = Counter(maker.machine for maker in self.makers)
        return [m for m in self.working for _ in range(m.wanted - running[m])]

    # -- batches -----------------------------------------------------------------------------------------------------
    def give(self, now: float) -> tuple[Worker, BatchJob] | None:
        """Gives the next batch to a maker: returns both, each of which now lists the other.

        None where all makers are busy, or nothing is to be made. A maker without a batch may get one that is late at
        another.

        Args:
            now: seconds on any steady clock, as in :meth:`done`.
        """
        free = [maker for maker in self.makers if maker.ready and len(maker.jobs) < DEPTH]
        if not free:
            return None
        maker = min(free, key=lambda m: len(m.jobs))
        job = self._next_job()
        if job is None and not maker.jobs:
            job = self._late_job(maker, now)
        if job is None:
            return None
        maker.jobs.append(job)
        job.makers[maker] = now
        return maker, job

    def _next_job(self) -> BatchJob | None:
        """The next batch to be made: first those that were lost, then of the pass with the fewest batches ahead; None
        where none may be requested now.
        """
        while self.again:
            job = self.again.popleft()
            if job.number in job.stream.jobs:
                return job
        makers = sum(maker.ready for maker in self.makers)
        for stream in sorted(self.streams, key=lambda s: s.asked - s.used):
            next_job = stream.ask(makers)
            if next_job is not None:
                return next_job
        return None

    def _late_job(self, maker: Worker, now: float) -> BatchJob | None:
        """A batch that was last given out more than :data:`SLOW` times the usual time ago, and more than :data:`SLOW_S`
        seconds, counted in :attr:`second_tries`; None without such a batch.

        The usual time is the median of :attr:`took`; before any batch is made the limit is 4 s (``SLOW * SLOW_S``).

        Args:
            maker: may make it too; on another machine than all that make it now.
            now: seconds on any steady clock.
        """
        limit = max(SLOW_S, SLOW * statistics.median(self.took or [SLOW_S]))
        for stream in self.streams:
            for job in stream.jobs.values():
                machines = {other.machine for other in job.makers}
                is_late = bool(machines) and now - max(job.makers.values()) > limit
                if is_late and maker.machine not in machines:
                    self.second_tries += 1
                    return job
        return None

    def done(self, maker: Worker, job: BatchJob, made: Made, now: float) -> None:
        """A maker has made a batch, which becomes ready for :meth:`take`. One that another has made before, or of a pass
        that was given up, is dropped and not counted; the machine's failures in a row end in any case.

        Args:
            maker: is free for another now.
            job: what it was given.
            made: the batch, or why it was not made.
            now: seconds on the clock of :meth:`give`.
        """
        if job in maker.jobs:
            maker.jobs.remove(job)
        machine = maker.machine
        stream = job.stream
        machine.failures = 0
        since = job.makers.pop(maker, now)
        if stream.jobs.pop(job.number, None) is None:
            return
        self.took.append(now - since)
        stream.batch_bytes = max(stream.batch_bytes, made.size, 1)
        stream.ready[job.number] = made.batch
        machine.batches += 1
        machine.busy_s += made.seconds
        machine.megabytes += made.size / MB

    def lost(self, maker: Worker, memory: bool = False) -> BatchJob | None:
        """A maker has ended: its batches are made by others, before any new batch.

        Args:
            maker: that has ended.
            memory: whether for lack of memory; then its machine, if it has two cores or more, counts one core fewer. Else
                it is left out once :data:`TRIES` makers for each that is wanted there have ended in a row.

        Returns:
            The batch that is to blame: :data:`TRIES` makers have ended over it; None while no batch is.
        """
        if maker not in self.makers:
            return None
        self.makers.remove(maker)
        machine = maker.machine
        machine.failures += 1
        if memory and machine.cores > 1:
            machine.cores -= 1
        elif machine.failures >= TRIES * max(1, machine.wanted):
            machine.gone = True
        self._share_out()

        # Its batches are made by others, in order.
        lost = []
        for job in maker.jobs:
            job.makers.pop(maker, None)
            if not job.makers and job.number in job.stream.jobs:
                lost.append(job)
        self.repeated += len(lost)
        self.again = deque(sorted([*self.again, *lost], key=lambda job: job.number))

        # It was at work on the first of its batches alone.
        for first in maker.jobs[:1]:
            first.lost += 1
            if first.lost >= TRIES:
                return first
        return None

    def take(self, stream: Stream) -> Batch | Exception | None:
        """The next batch of a pass in order; None where it is not made yet. Why it was not made comes as an exception, not
        raised.
        """
        batch = stream.ready.pop(stream.used, None)
        if batch is not None:
            stream.used += 1
        return batch

    def drop(self, stream: Stream) -> None:
        """Forgets a pass: its jobs, and its batches that were made. :meth:`done` drops what makers still have of it."""
        stream.jobs.clear()
        stream.ready.clear()
        stream.all_asked = True
        if stream in self.streams:
            self.streams.remove(stream)

    # -- report ------------------------------------------------------------------------------------------------------
    def reading(self) -> dict[str, object]:
        """What the tier does now and has done so far; ``kd.monitor.tier`` writes it into a run's records.

        Returns:
            "ready": batches made and not used; "may_ask": batches that may be requested and not used, were all makers
            ready; "made_again", "made_twice": :attr:`repeated`, :attr:`second_tries`; "machines": of each machine the first
            eight characters of its id ("node"), name, cores, whether it has gone, its ready makers, and "batches", "busy_s"
            (seconds of all makers) and "mb" as of :class:`Machine`.
        """
        machines = []
        for machine in self.machines.values():
            counts = {
                "node": machine.node[:8],
                "name": machine.name,
                "cores": machine.cores,
                "gone": machine.gone,
                "makers": sum(maker.machine is machine and maker.ready for maker in self.makers),
                "batches": machine.batches,
                "busy_s": round(machine.busy_s, 3),
                "mb": round(machine.megabytes, 1),
            }
            machines.append(counts)
        return {
            "ready": sum(len(stream.ready) for stream in self.streams),
            "may_ask": sum(stream.ahead(len(self.makers)) for stream in self.streams),
            "made_again": self.repeated,
            "made_twice": self.second_tries,
            "machines": machines,
        }

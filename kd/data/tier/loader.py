"""The data tier in a training process: a loader of batches that other machines make, the same views to the last bit.

The *tier* is all machines that prepare data. A *maker* is a process there that makes batches; a *work* is a kind of
batches (samples and what collates them), sent to each maker once; a *stream* is one pass over a loader.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from kd.data.batch import Batch
from kd.data.sampler import Key
from kd.data.tier.cluster import RayCluster, differing, unpacked
from kd.data.tier.schedule import MB, BatchJob, Machine, MakerEnded, Scheduler, Stream, Work, Worker
from kd.errors import RunError, UserError, first_line
from kd.settings import TierSpec

POLL_S = 0.02  # between two polls of finished batches, while idle
LOOK_S = 1.0  # between two polls of the cluster
LOST_S = 30.0  # a cluster that does not answer for so long is lost (Ray itself ends the process after 60)
PATIENCE_S = 300.0  # without a single batch


Call = tuple[Worker, BatchJob | None]
"""The maker that is called, and its batch; without one: the maker's first words."""


class TierLoader(DataLoader):
    """A ``DataLoader`` whose batches are made by the tier.

    Args:
        tier: makes them.
        work: the number of their kind, as of :attr:`Tier.works`.
        batches: the keys of each batch.
    """

    def __init__(self, tier: "Tier", work: int, batches: Iterable[list[Key]]) -> None:
        """Arguments as of the class; Lightning and torch see a ``DataLoader`` without workers."""
        data, collate = tier.works[work]
        super().__init__(data, batch_sampler=batches, num_workers=0, collate_fn=collate)
        self.tier = tier
        self.work = work
        self.keys = batches
        self.stream: Stream | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """One pass, whose batches are begun at once; a pass before it that was not finished is given up."""
        # Torch's loaders draw a seed here: a draw likewise leaves the random numbers after it as with one of them.
        torch.empty((), dtype=torch.int64).random_()
        if self.stream is not None:
            self.tier.drop(self.stream)
        self.stream = self.tier.stream(self.work, iter(self.keys))
        return self._pass(self.stream)

    def _pass(self, stream: Stream) -> Iterator[Batch]:
        """The batches of one pass in order, each once it is there; the pass is given up when its reader stops."""
        try:
            while (batch := self.tier.next(stream)) is not None:
                yield batch
        finally:
            self.tier.drop(stream)


class Tier:
    """The tier, as one training process sees it.

    Args:
        spec: ``data.tier``: where it is, and how many MB of batches are requested ahead.
        makers: how many make batches for this process, on cores; None: one on each core of its share of the tier's.
        rank: gives this training process's number, and how many there are; called when the first pass begins.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(
        self, spec: TierSpec, makers: int | None, rank: Callable[[], tuple[int, int]]
    ) -> None:
        """Stores the arguments, which are the class's; :meth:`connect` joins the cluster."""
        self.spec = spec
        self.count = makers
        self.rank = rank
        self.cluster = RayCluster(spec)
        self.works: list[Work] = []
        self._lock = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        """The state before the first batch: no scheduler, no threads, no calls to makers."""
        self._scheduler: Scheduler | None = None
        self._threads: list[threading.Thread] = []
        self._calls: dict[object, Call] = {}  # those not finished, by Ray's reference
        self._put: dict[int, tuple[object, ...]] = {}  # Ray's references to each work
        self._stop = threading.Event()
        self._failed: Exception | None = None  # raised where the next batch is taken
        # When the cluster has last answered, and when a batch was last made: seconds of time.monotonic().
        self._answered = self._at_work = time.monotonic()
        self.waited_s = 0.0

    def connect(self) -> None:
        """Joins the cluster, in the main thread, unless it is joined; errors as of :meth:`RayCluster.join`."""
        if not self.cluster.joined:
            self.cluster.join()
            atexit.register(self.close)

    def close(self) -> None:
        """Ends the makers, the threads and what was started of the cluster; safe to call again."""
        if not self.cluster.joined:
            return
        atexit.unregister(self.close)
        self._stop.set()
        with self._lock:
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(timeout=5)
        if self._scheduler is not None:
            for maker in self._scheduler.makers:
                self.cluster.end(maker.handle)
        self.cluster.leave()
        self._reset()

    # -- what loaders ask for ----------------------------------------------------------------------------------------
    def loader(
        self, data: Dataset[Any], batches: Iterable[list[Key]], collate: Callable[..., Any]
    ) -> TierLoader:
        """See :class:`TierLoader`. The makers get the same two objects ``data`` and ``collate`` once, however many loaders.

        Args:
            data: gives samples for keys; sent to the makers.
            batches: lists of keys, one a batch.
            collate: samples -> a batch; the makers call it.
        """
        number = None
        for i, (known_data, known_collate) in enumerate(self.works):
            if known_data is data and known_collate is collate:
                number = i
        if number is None:
            number = len(self.works)
            self.works.append((data, collate))
        return TierLoader(self, number, batches)

    def stream(self, work: int, batches: Iterator[list[Key]]) -> Stream:
        """Begins to make the batches of one pass.

        Args:
            work: number of their kind.
            batches: keys of each batch's samples, in order.

        Returns:
            The pass, from which :meth:`next` takes.
        """
        self.connect()
        stream = Stream(work, batches, self.spec.queue_mb * MB)
        with self._lock:
            if self._scheduler is None:
                self._scheduler = Scheduler(*self.rank(), self.count)
                self._start_threads()
            self._scheduler.streams.append(stream)
            self._hand_out()
        return stream

    def next(self, stream: Stream) -> Batch | None:
        """The next batch of a pass, in its order: waits until it is there; None at its end. The training process calls it.

        Raises:
            RunError: the tier can make no more batches; a picture can't be read.
            UserError: a maker has other versions of libraries, or can't make these batches.
        """
        start = time.monotonic()
        with self._lock:
            while self._scheduler is not None:
                batch = self._scheduler.take(stream)
                if isinstance(batch, Exception):
                    raise batch
                if batch is not None:
                    self.waited_s += time.monotonic() - start
                    self._hand_out()
                    return batch
                if stream.ended:
                    return None
                self._raise_if_lost(start)
                self._lock.wait(0.5)
        raise RunError("data.engine: the data tier was closed while it was in use")

    def drop(self, stream: Stream) -> None:
        """Gives up the rest of a pass; its finished batches are freed."""
        with self._lock:
            if self._scheduler is not None:
                self._scheduler.drop(stream)

    def reading(self) -> dict[str, object]:
        """As :meth:`Scheduler.reading`, with "waited_s", seconds that training has waited; {} before the first pass."""
        with self._lock:
            if self._scheduler is None:
                return {}
            return {**self._scheduler.reading(), "waited_s": round(self.waited_s, 3)}

    def _raise_if_lost(self, waiting_since: float) -> None:
        """Raises in the training process what has failed in a thread, or that no batch comes any more: after :data:`LOST_S`
        without an answer of the cluster, or :data:`PATIENCE_S` without a batch.

        Args:
            waiting_since: seconds of ``time.monotonic()``, when the wait for a batch began.
        """
        if self._failed is not None:
            raise self._failed
        now = time.monotonic()
        if now - self._answered > LOST_S:
            raise RunError(f"data.engine: lost the Ray cluster: no answer for {LOST_S:.0f} s")
        if now - max(self._at_work, waiting_since) <= PATIENCE_S:
            return
        raise RunError(
            f"data.engine: no machine that carries {self.spec.label} has made a batch for {PATIENCE_S:.0f} s "
            "(all gone, or their cores taken by other work)"
        )

    # -- two threads: what is finished, and who is there -------------------------------------------------------------
    def _start_threads(self) -> None:
        """Starts makers on the machines that are there, and the two daemon threads: one gives batches to makers and takes
        them, one polls which machines are there. Call it with the lock.
        """
        self._look()
        self._answered = self._at_work = time.monotonic()
        for loop in (self._dispatch, self._look_out):
            name = f"kd-tier{loop.__name__}"
            thread = threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guarded(self, loop: Callable[[], None]) -> None:
        """A thread's whole life: what ``loop`` raises fails the run, unless the tier is being closed."""
        try:
            loop()
        except Exception as error:
            if not self._stop.is_set():
                with self._lock:
                    self._fail(RunError(f"data.engine: lost the Ray cluster: {first_line(error)}"))

    def _fail(self, error: Exception) -> None:
        """Ends the run by ``error``, raised by :meth:`next`; the first error counts. Call it with the lock."""
        self._failed = self._failed or error
        self._lock.notify_all()

    def _dispatch(self) -> None:
        """Thread: hands batches out and takes finished ones, until the tier is closed."""
        while not self._stop.is_set():
            with self._lock:
                self._hand_out()
                calls = list(self._calls)
                if not calls:
                    self._lock.wait(POLL_S)
                    continue
            for call in self.cluster.finished(calls, POLL_S):
                self._take(call)

    def _look_out(self) -> None:
        """Thread: polls the cluster's machines every :data:`LOOK_S` seconds, until the tier is closed."""
        while not self._stop.wait(LOOK_S):
            self._look()
            self._answered = time.monotonic()

    def _look(self) -> None:
        """Compares the cluster's machines with those known: reports who came or went, starts missing makers."""
        present = self.cluster.machines()
        with self._lock:
            scheduler = self._scheduler
            if scheduler is None:
                return
            before = set(scheduler.machines)
            for machine in scheduler.present(present):
                self._say(f"{machine.name} has gone")
                for maker in list(scheduler.makers):
                    if maker.machine is machine:
                        self._lost(maker)
            for machine in scheduler.working:
                if before and machine.node not in before:
                    self._say(f"{machine.name} has come ({machine.cores} processes)")
            for machine in scheduler.missing():
                self._start(machine, scheduler)

    def _say(self, what: str) -> None:
        """A line on stderr, from the first process alone, with the number of machines that make batches."""
        if self._scheduler is not None and self._scheduler.rank == 0:
            count = len(self._scheduler.working)
            print(
                f"data tier: {what}; {count} machine(s) make batches", file=sys.stderr, flush=True
            )

    def _start(self, machine: Machine, scheduler: Scheduler) -> None:
        """Starts a maker on a machine; call it with the lock. It gets batches once it has greeted (:meth:`_welcome`)."""
        share = scheduler.share_of_a_core
        handle = self.cluster.start(machine.node, share)
        maker = Worker(machine, handle)
        scheduler.makers.append(maker)
        greeting = handle.greet.remote()
        self._calls[greeting] = maker, None

    def _hand_out(self) -> None:
        """Gives makers batches until none can take more; call it with the lock.

        A kind of batch that is new to a maker is sent to it first.
        """
        scheduler = self._scheduler
        if scheduler is None or self._stop.is_set():
            return
        while True:
            assignment = scheduler.give(time.monotonic())
            if assignment is None:
                return
            maker, job = assignment
            work = job.stream.work
            if work not in maker.works:
                maker.works.add(work)
                if work not in self._put:
                    self._put[work] = self.cluster.put(self.works[work])
                learned = maker.handle.learn.remote(work, *self._put[work])
                self._calls[learned] = maker, None
            made = maker.handle.make.remote(work, job.keys)
            self._calls[made] = maker, job

    def _take(self, reference: object) -> None:
        """Takes the result of a call: a batch, a maker's first words, or an error; then hands out what became free.

        The dispatching thread calls it without the lock: a batch is copied out of the cluster's store meanwhile.

        Args:
            reference: Ray's, of a call in ``_calls``.
        """
        with self._lock:
            maker, job = self._calls.pop(reference, (None, None))
        if maker is None:  # it has been given up meanwhile
            return
        try:
            value = self.cluster.result(reference)
            made = unpacked(value) if job else None
        except UserError as error:
            reason = f"data.engine: {maker.machine.name} can't make these batches: {error}"
            with self._lock:
                self._fail(UserError(reason))
            return
        except MakerEnded as error:
            self.cluster.end(maker.handle)
            with self._lock:
                self._lost(maker, error.args[0])
                self._lock.notify_all()
            return
        with self._lock:
            if self._scheduler is None:
                return
            if made is not None and job is not None:
                self._at_work = time.monotonic()
                self._scheduler.done(maker, job, made, self._at_work)
            elif value is not None:
                self._welcome(maker, value)
            self._hand_out()
            self._lock.notify_all()

    def _welcome(self, maker: Worker, greeting: dict[str, str]) -> None:
        """Reads a maker's first words, :meth:`BatchMaker.greet`: it gets batches from now on. Call it with the lock.

        Other versions of libraries than here end the run.
        """
        wrong = differing(greeting)
        if wrong:
            reason = f"data.engine: {maker.machine.name} has {wrong}; both must be the same for the same views"
            self._fail(UserError(reason))
        maker.ready = True

    def _lost(self, maker: Worker, memory: bool = False) -> None:
        """Gives the batches of a maker that has ended to others; call it with the lock.

        A batch over which several makers have ended fails the run.

        Args:
            maker: has ended.
            memory: whether for lack of memory.
        """
        assert self._scheduler is not None
        for reference, (maker_of_call, _) in list(self._calls.items()):
            if maker_of_call is maker:
                del self._calls[reference]
        machine = maker.machine
        was_present = not machine.gone
        culprit = self._scheduler.lost(maker, memory)
        if was_present and machine.gone:
            self._say(
                f"{machine.name} is left out: {machine.failures} processes in a row have ended there"
            )
        if culprit is not None:
            data, _ = self.works[culprit.stream.work]
            number, _ = culprit.keys[0]
            split = getattr(data, "split", None)
            picture = number
            if split:
                picture = split.name(number)
            self._fail(
                RunError(
                    f"data.engine: {culprit.lost} processes in turn have ended over one batch (out of memory? "
                    f"data.batch_size); its first picture is {picture}"
                )
            )
        self._hand_out()

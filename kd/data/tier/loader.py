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
from kd.data.tier.cluster import RayCluster, as_own_tensors, differing
from kd.data.tier.schedule import MB, BatchJob, MakerEnded, Scheduler, Stream, Work, Worker
from kd.errors import RunError, UserError, first_line
from kd.settings import TierSpec

POLL_S = 0.02  # between two polls of finished batches, while idle
LOOK_S = 1.0  # between two polls of the cluster
LOST_S = 30.0  # a cluster that does not answer for so long is lost (Ray itself ends the process after 60)
PATIENCE_S = 300.0  # without a single batch


Call = tuple[Worker, BatchJob | None]
"""The maker that is called, and the batch that it makes; None: it greets (:meth:`BatchMaker.greet`)."""


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
        """The state before the first batch: no scheduler, no thread, no calls to makers."""
        self._scheduler: Scheduler | None = None
        self._thread = threading.Thread(target=self._run, name="kd-tier", daemon=True)
        self._calls: dict[object, Call] = {}  # those not finished, by Ray's reference
        self._put: dict[int, list[object]] = {}  # Ray's references to each work
        self._stop = threading.Event()
        self._failed: Exception | None = None  # raised where the next batch is taken
        # When the cluster has last answered, and when a batch was last made: seconds of time.monotonic().
        self._answered = self._at_work = time.monotonic()

    def connect(self) -> None:
        """Joins the cluster, in the main thread, unless it is joined; errors as of :meth:`RayCluster.join`."""
        if not self.cluster.joined:
            self.cluster.join()
            atexit.register(self.close)

    def close(self) -> None:
        """Ends the makers, the thread and what was started of the cluster; safe to call again."""
        if not self.cluster.joined:
            return
        atexit.unregister(self.close)
        self._stop.set()
        with self._lock:
            self._lock.notify_all()
        if self._scheduler is not None:
            self._thread.join(timeout=5)
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
        for number, (known_data, known_collate) in enumerate(self.works):
            if known_data is data and known_collate is collate:
                return TierLoader(self, number, batches)
        self.works.append((data, collate))
        return TierLoader(self, len(self.works) - 1, batches)

    def stream(self, work: int, batches: Iterator[list[Key]]) -> Stream:
        """Begins to make the batches of one pass; the first one joins the cluster (:meth:`connect`, with its errors).

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
                self._answered = self._at_work = time.monotonic()
                self._thread.start()
            self._scheduler.streams.append(stream)
            self._hand_out(self._scheduler)
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
                    self._hand_out(self._scheduler)
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
        """As :meth:`Scheduler.reading`; {} before the first pass."""
        with self._lock:
            if self._scheduler is None:
                return {}
            return self._scheduler.reading()

    def _raise_if_lost(self, waiting_since: float) -> None:
        """Raises, in the training process, the error with which the thread has failed; else nothing while batches come.

        A RunError is raised after :data:`LOST_S` without an answer of the cluster, or :data:`PATIENCE_S` without a batch.

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

    # -- the thread: what is finished, and who is there --------------------------------------------------------------
    def _run(self) -> None:
        """The thread: hands batches out, takes finished ones and polls which machines are there, until the tier is closed.

        What it raises fails the run.
        """
        scheduler, stop = self._scheduler, self._stop
        assert scheduler is not None
        looked = 0.0
        try:
            while not stop.is_set():
                if time.monotonic() - looked > LOOK_S:
                    self._look(scheduler)
                    looked = self._answered = time.monotonic()
                with self._lock:
                    self._hand_out(scheduler)
                    calls = list(self._calls)
                    if not calls:
                        self._lock.wait(POLL_S)
                for call in self.cluster.finished(calls, POLL_S) if calls else ():
                    self._take(call, scheduler)
        except Exception as error:
            if not stop.is_set():
                with self._lock:
                    self._fail(RunError(f"data.engine: lost the Ray cluster: {first_line(error)}"))

    def _fail(self, error: Exception) -> None:
        """Ends the run by ``error``, raised by :meth:`next`; the first error counts. Call it with the lock."""
        self._failed = self._failed or error
        self._lock.notify_all()

    def _look(self, scheduler: Scheduler) -> None:
        """Compares the cluster's machines with those known: reports who came or went, and starts missing makers.

        The batches of a machine that has gone are given to others. Call it without the lock.
        """
        present = self.cluster.machines()
        with self._lock:
            before = set(scheduler.machines)
            for machine in scheduler.present(present):
                self._say(f"{machine.name} has gone", scheduler)
                for maker in [maker for maker in scheduler.makers if maker.machine is machine]:
                    self._reassign(maker, scheduler)
            for machine in scheduler.working:
                if before and machine.node not in before:
                    self._say(f"{machine.name} has come ({machine.cores} processes)", scheduler)
            for machine in scheduler.missing():
                # it gets batches once it has greeted
                maker = Worker(machine, self.cluster.start(machine.node))
                scheduler.makers.append(maker)
                self._calls[maker.handle.greet.remote()] = maker, None

    def _say(self, what: str, scheduler: Scheduler) -> None:
        """A line on stderr, from the first process alone, with the number of machines that make batches."""
        if scheduler.rank == 0:
            count = f"{len(scheduler.working)} machine(s) make batches"
            print(f"data tier: {what}; {count}", file=sys.stderr, flush=True)

    def _hand_out(self, scheduler: Scheduler) -> None:
        """Gives makers batches until none can take more; call it with the lock."""
        while not self._stop.is_set():
            assignment = scheduler.give(time.monotonic())
            if assignment is None:
                return
            maker, job = assignment
            work = job.stream.work
            if work not in self._put:
                self._put[work] = self.cluster.put(self.works[work])
            made = maker.handle.make.remote(work, self._put[work], job.keys)
            self._calls[made] = maker, job

    def _take(self, reference: object, scheduler: Scheduler) -> None:
        """Takes the result of a finished call: a batch, the versions of a maker's libraries, or an error.

        A maker of other versions than here ends the run. Call it without the lock: a batch is copied out of the cluster's
        store meanwhile.

        Args:
            reference: Ray's, of a call in ``_calls``.
            scheduler: gets the batch.
        """
        with self._lock:
            maker, job = self._calls.pop(reference, (None, None))
        if maker is None:  # it has been given up meanwhile
            return
        failed: Exception | None = None
        try:
            value = self.cluster.result(reference)
            made = as_own_tensors(value) if job else None
        except MakerEnded as error:
            self.cluster.end(maker.handle)
            with self._lock:
                self._reassign(maker, scheduler, error.args[0])
            return
        except UserError as error:
            failed = UserError(
                f"data.engine: {maker.machine.name} can't make these batches: {error}"
            )
        with self._lock:
            if failed is None and made is not None and job is not None:
                self._at_work = time.monotonic()
                scheduler.done(maker, job, made, self._at_work)
            elif failed is None:
                maker.ready = True
                if wrong := differing(value):
                    failed = UserError(
                        f"data.engine: {maker.machine.name} has {wrong}; both must be the same for the same views"
                    )
            if failed is not None:
                self._fail(failed)
            self._hand_out(scheduler)
            self._lock.notify_all()

    def _reassign(self, maker: Worker, scheduler: Scheduler, memory: bool = False) -> None:
        """Gives the batches of a maker that has ended to others; call it with the lock.

        A batch over which several makers have ended fails the run.

        Args:
            maker: has ended.
            scheduler: shares them out.
            memory: whether for lack of memory.
        """
        self._calls = {call: made for call, made in self._calls.items() if made[0] is not maker}
        machine = maker.machine
        was_present = not machine.gone
        culprit = scheduler.lost(maker, memory)
        if was_present and machine.gone:
            ended = f"{machine.failures} processes in a row have ended there"
            self._say(f"{machine.name} is left out: {ended}", scheduler)
        if culprit is not None:
            data, _ = self.works[culprit.stream.work]
            number, _ = culprit.keys[0]
            split = getattr(data, "split", None)
            picture = split.name(number) if split else number
            self._fail(
                RunError(
                    f"data.engine: {culprit.lost} processes in turn have ended over one batch (out of memory? "
                    f"data.batch_size); its first picture is {picture}"
                )
            )
        self._lock.notify_all()

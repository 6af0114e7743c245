"""Single pictures -> batches: while one runs, the next one gathers."""

import asyncio
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import ParamSpec, TypeVar

import numpy as np

from kd.ship.export.base import Runtime
from kd.ship.serving.bodies import Busy
from kd.ship.serving.limits import Limits
from kd.ship.serving.metrics import Metrics

ENDING_S = 5.0  # Seconds that a batch has which runs at the server's end
P = ParamSpec("P")
T = TypeVar("T")
Waiting = tuple[np.ndarray, asyncio.Future[np.ndarray]]
"""A picture, uint8 of the manifest's shape, and its answer to come."""


class Daemons:
    """A pool of daemon threads; ThreadPoolExecutor's are joined at the interpreter's end, whatever they do.

    Args:
        count: of the threads, which start at once.
        name: begins their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for i in range(count):
            Thread(target=self._work, name=f"{name}_{i}", daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs ``fn`` on a daemon thread, as ``ThreadPoolExecutor.submit``; a thread that hangs does not keep the
        process alive.
        """
        future: Future[T] = Future()

        def call() -> None:
            """Runs the function in the thread; its result, or what it raises, goes to the future."""
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # whoever waits for it decides
                    future.set_exception(error)

        self._calls.put(call)
        return future

    def _work(self) -> None:
        """Runs submitted calls one after another, in each thread and for good; a call raises nothing."""
        while True:
            self._calls.get()()


class Batcher:
    """Runs a model in one thread on batches of pictures, gathered for a while or while it is busy.

    Args:
        runtime: runs the model.
        limits: ``max_batch``, ``max_wait_ms`` and ``queue`` count here.
        metrics: of the server, whose batchers share them.
    """

    def __init__(self, runtime: Runtime, limits: Limits, metrics: Metrics) -> None:
        """Stores the arguments, which are the class's; :meth:`start` begins."""
        self.runtime = runtime
        self.limits = limits
        self.metrics = metrics
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(limits.queue)
        self._thread = Daemons(1, "model")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to make batches; called inside the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Finishes what waits, for at most :data:`ENDING_S` seconds, then stops: what waits still gets no answer."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._queue.join(), ENDING_S)
        if self._task is not None:
            self._task.cancel()

    def submit(self, picture: np.ndarray) -> asyncio.Future[np.ndarray]:
        """Queues one picture, and returns the future of its answer. Called in the event loop, which also sets the future.

        Args:
            picture: uint8, of the shape that the manifest gives to one picture, as ``(H, W, 3)``.

        Returns:
            Gets the model's row for the picture, float32: ``(C,)`` logits of a classifier; or the model's error.

        Raises:
            Busy: ``limits.queue`` pictures wait for this model already.
        """
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait((picture, future))
        except asyncio.QueueFull as error:
            raise Busy from error
        self.metrics.waiting.inc()
        return future

    async def _run(self) -> None:
        """The task, until :meth:`stop` cancels it: gathers a batch, and answers it for the clients that still wait."""
        while True:
            batch = await self._gather()
            still_wanted = [item for item in batch if not item[1].done()]  # a client may have gone
            if still_wanted:
                await self._answer(still_wanted)  # raises nothing: an error would end this task
            for _ in batch:
                self._queue.task_done()

    async def _answer(self, batch: list[Waiting]) -> None:
        """Runs the model on a batch. Where anything fails, the futures get the error; nothing is raised, no metric counted.

        Args:
            batch: pictures, and the futures that get their rows or the exception.
        """
        try:
            pictures = np.stack([picture for picture, _ in batch])
            start = time.perf_counter()
            answers = await asyncio.wrap_future(self._thread.submit(self.runtime, pictures))
            if len(answers) != len(batch):
                raise ValueError(f"the model gave {len(answers)} answers to {len(batch)} pictures")
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        self.metrics.batch.observe(len(batch))
        self.metrics.model.observe(time.perf_counter() - start)
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    async def _gather(self) -> list[Waiting]:
        """The next batch, 1 to ``max_batch`` pictures: what comes within ``max_wait_ms`` of its first picture."""
        batch = [await self._queue.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.max_wait_ms / 1000):
                while len(batch) < self.limits.max_batch:
                    batch.append(await self._queue.get())
        self.metrics.waiting.dec(len(batch))
        return batch

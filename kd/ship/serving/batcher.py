"""Single pictures -> batches: while one runs, the next one gathers."""

import asyncio
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from threading import Thread
from typing import ParamSpec, TypeVar

import numpy as np

from kd.ship.export.base import Runtime
from kd.ship.serving.bodies import Busy
from kd.ship.serving.metrics import Metrics

ENDING_S = 5.0  # A batch that runs at the server's end has so long
P = ParamSpec("P")
T = TypeVar("T")
Waiting = tuple[np.ndarray, asyncio.Future[np.ndarray]]


class Daemons(Executor):
    """A pool of daemon threads; ThreadPoolExecutor's are joined at the interpreter's end, whatever they do."""

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
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # whoever waits for it decides
                    future.set_exception(error)

        self._calls.put(call)
        return future

    def _work(self) -> None:
        while True:
            self._calls.get()()


class Batcher:
    """Runs a model in one thread on up to ``max_batch`` pictures, gathered for ``max_wait_s`` or while it is busy."""

    def __init__(
        self, runtime: Runtime, max_batch: int, max_wait_s: float, most: int, metrics: Metrics
    ) -> None:
        self.runtime, self.max_batch, self.max_wait_s, self.metrics = (
            runtime,
            max_batch,
            max_wait_s,
            metrics,
        )
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(most)
        self._thread = Daemons(1, "model")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to make batches; called inside the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Finishes what waits, for at most :data:`ENDING_S` seconds, then stops."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._queue.join(), ENDING_S)
        if self._task is not None:
            self._task.cancel()

    def submit(self, picture: np.ndarray) -> asyncio.Future[np.ndarray]:
        """The answer to come, of one picture.

        Raises:
            Busy: the queue is full.
        """
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait((picture, future))
        except asyncio.QueueFull as error:
            raise Busy from error
        self.metrics.waiting.set(self._queue.qsize())
        return future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._gather()
            wanted = [item for item in batch if not item[1].done()]  # its client may have gone
            if wanted:
                pictures = np.stack([picture for picture, _ in wanted])
                start = time.perf_counter()
                answers: Iterable[np.ndarray | Exception]
                try:
                    answers = await loop.run_in_executor(self._thread, self.runtime, pictures)
                    self.metrics.batch.observe(len(wanted))
                    self.metrics.model.observe(time.perf_counter() - start)
                except Exception as error:  # the clients get an error, the server continues
                    answers = [error] * len(wanted)
                for (_, future), answer in zip(wanted, answers, strict=True):
                    if not future.done():
                        future.set_exception(answer) if isinstance(
                            answer, Exception
                        ) else future.set_result(answer)
            for _ in batch:
                self._queue.task_done()

    async def _gather(self) -> list[Waiting]:
        batch = [await self._queue.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self.max_wait_s):
                while len(batch) < self.max_batch:
                    batch.append(await self._queue.get())
        self.metrics.waiting.set(self._queue.qsize())
        return batch

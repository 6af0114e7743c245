"""Single pictures -> batches: while one runs, the next one gathers."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kd.ship.export.base import Runtime
from kd.ship.serving.metrics import Metrics
from kd.ship.serving.room import Busy
from kd.ship.serving.threads import Daemons

ENDING_S = 5.0  # A batch that runs at the server's end has so long
Waiting = tuple[np.ndarray, asyncio.Future[np.ndarray]]


class Batcher:
    """Runs a model in one thread on up to ``max_batch`` pictures, gathered for ``max_wait_s`` or while it is busy."""

    def __init__(self, runtime: Runtime, max_batch: int, max_wait_s: float, queue: int, metrics: Metrics) -> None:
        self.runtime, self.max_batch, self.max_wait_s, self.metrics = runtime, max_batch, max_wait_s, metrics
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(queue)
        self._thread = Daemons(1, "model")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._queue.join(), ENDING_S)
        if self._task is not None:
            self._task.cancel()

    def submit(self, picture: np.ndarray) -> asyncio.Future[np.ndarray]:
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
                try:
                    answers = await loop.run_in_executor(self._thread, self.runtime, pictures)
                except Exception as error:  # the clients get an error, the server continues
                    _settle(wanted, lambda i, e=error: e)  # type: ignore[misc]
                else:
                    self.metrics.batch.observe(len(wanted))
                    self.metrics.model.observe(time.perf_counter() - start)
                    _settle(wanted, lambda i, a=answers: a[i])  # type: ignore[misc]
            for _ in batch:
                self._queue.task_done()

    async def _gather(self) -> list[Waiting]:
        batch = [await self._queue.get()]
        end = time.monotonic() + self.max_wait_s
        while len(batch) < self.max_batch:
            if self._queue.empty():
                left = end - time.monotonic()
                if left <= 0:
                    break
                try:
                    batch.append(await asyncio.wait_for(self._queue.get(), left))
                except TimeoutError:
                    break
            else:
                batch.append(self._queue.get_nowait())
        self.metrics.waiting.set(self._queue.qsize())
        return batch


def _settle(batch: list[Waiting], answer: Callable[[int], np.ndarray | Exception]) -> None:
    for i, (_, future) in enumerate(batch):
        if future.done():
            continue
        found = answer(i)
        if isinstance(found, Exception):
            future.set_exception(found)
        else:
            future.set_result(found)

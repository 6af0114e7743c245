"""The threads that models and decoders run in."""

import asyncio
import threading

import numpy as np
import pytest

pytest.importorskip("starlette")
from kd.ship.serving.batcher import Batcher, Daemons
from kd.ship.serving.limits import Limits
from kd.ship.serving.metrics import Metrics


def test_threads_that_hang_do_not_hold_the_pool_up() -> None:
    pool, stuck = Daemons(2, "test"), threading.Event()
    pool.submit(stuck.wait)
    assert pool.submit(lambda: 7).result(5) == 7
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(5)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("test_"))
    stuck.set()


def test_waiting_pictures_are_those_of_both_models() -> None:
    busy = threading.Event()

    def slow(pictures: np.ndarray) -> np.ndarray:
        busy.wait(10)
        return np.zeros((len(pictures), 3), np.float32)

    async def waiting() -> tuple[float | None, float | None]:
        metrics = Metrics()
        limits = Limits(max_batch=1, max_wait_ms=0.0)
        teacher = Batcher(slow, limits, metrics)
        student = Batcher(lambda pictures: np.zeros((len(pictures), 3)), limits, metrics)
        teacher.start()
        student.start()
        picture = np.zeros((8, 8, 3), np.uint8)
        of_teacher = [teacher.submit(picture) for _ in range(3)]
        await asyncio.sleep(0)  # its first picture runs
        await student.submit(picture)
        while_busy = metrics.registry.get_sample_value("kd_waiting_pictures")
        busy.set()
        await asyncio.gather(*of_teacher)
        return while_busy, metrics.registry.get_sample_value("kd_waiting_pictures")

    assert asyncio.run(waiting()) == (2.0, 0.0)

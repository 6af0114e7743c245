"""The threads that models and decoders run in."""

import threading

import pytest

pytest.importorskip("starlette")
from kd.ship.serving.batcher import Daemons


def test_threads_that_hang_do_not_hold_the_pool_up() -> None:
    pool, stuck = Daemons(2, "test"), threading.Event()
    pool.submit(stuck.wait)
    assert pool.submit(lambda: 7).result(5) == 7
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(5)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("test_"))
    stuck.set()

"""A fork of the tests leaves the garbage of its process alone."""

import gc
import os

FREED = 9


class Cycle:
    """Garbage that only the collector finds; freed in a fork it ends that with a status of its own."""

    def __init__(self, owner: int) -> None:
        self.itself = self
        self.owner = owner

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os._exit(FREED)


def test_a_fork_does_not_free_its_processs_garbage() -> None:
    gc.disable()
    try:
        Cycle(os.getpid())
        child = os.fork()
        if not child:
            gc.collect()
            os._exit(0)
        _, status = os.waitpid(child, 0)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(status) == 0

"""What the process has of its machine."""

from kd.machine import signals_kept
from tests._helpers import error_in_a_thread


def test_signals_kept_in_another_thread() -> None:
    """``kd.train`` may run in any thread."""

    def inside() -> None:
        with signals_kept(lambda *_: None):
            pass

    assert error_in_a_thread(inside) is None

"""What the process has of its machine."""

import signal

import pytest

from kd.machine import signals_kept
from tests._helpers import error_in_a_thread


def test_signals_kept_in_another_thread() -> None:
    """``kd.train`` may run in any thread."""

    def inside() -> None:
        with signals_kept(lambda *_: None):
            pass

    assert error_in_a_thread(inside) is None


def test_a_handler_of_c_code_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python can't give it, so nothing can put it back: what happened inside counts."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    try:
        with pytest.raises(ValueError, match="inside"), signals_kept(lambda *_: None):
            raise ValueError("inside")
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""A clock moved by hand, where a test is about what is measured and must not depend on how busy the machine is."""

import itertools
import time

import pytest


class HandClock:
    """Stands in for ``time.perf_counter``: time passes where a test says so, and a microsecond with each look.

    Args:
        monkeypatch: puts the real one back.
    """

    passed_s = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        HandClock.passed_s = 0.0
        looks = itertools.count()
        monkeypatch.setattr(time, "perf_counter", lambda: 1000 + HandClock.passed_s + 1e-6 * next(looks))

    @classmethod
    def wait(cls, seconds: float) -> None:
        """What ``time.sleep`` is to the real clock."""
        cls.passed_s += seconds

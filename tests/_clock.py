"""A clock moved by hand, where a test is about what is measured and must not depend on how busy the machine is."""

import itertools
import threading
import time

import pytest


class HandClock:
    """Stands in for ``time.perf_counter``: a sleep of the main thread moves it, and takes no time; a look takes a
    microsecond, and all else nothing.

    Args:
        monkeypatch: puts the real ones back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_s, self._looks, self._sleep = 0.0, itertools.count(), time.sleep
        monkeypatch.setattr(
            time, "perf_counter", lambda: 1000 + self.passed_s + 1e-6 * next(self._looks)
        )
        monkeypatch.setattr(time, "sleep", self._wait)

    def _wait(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            self.passed_s += seconds
        else:
            self._sleep(seconds)


class OwnTime:
    """Stands in for ``time.perf_counter`` of the main thread: its CPU time and its sleeps, which take no time.

    What other processes of the machine take is left out, so that computing keeps its share of a step on any machine.

    Args:
        monkeypatch: puts the real ones back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept_s = 0.0
        self._perf_counter, self._sleep = time.perf_counter, time.sleep
        monkeypatch.setattr(time, "perf_counter", self._now)
        monkeypatch.setattr(time, "sleep", self._wait)

    def _now(self) -> float:
        if threading.current_thread() is threading.main_thread():
            return time.thread_time() + self.slept_s
        return self._perf_counter()

    def _wait(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            self.slept_s += seconds
        else:
            self._sleep(seconds)

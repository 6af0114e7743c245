"""What the process has of its machine."""

import platform
import signal
from pathlib import Path

import pytest

from kd.machine import cache_dir, processor, signals_kept
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


def test_an_empty_kd_cache_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The working folder would be the cache, and ``kd-runs clean`` would tidy it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for given, expected in (("", tmp_path / "kd"), ("/data/kd", Path("/data/kd"))):
        monkeypatch.setenv("KD_CACHE", given)
        assert cache_dir() == expected


def test_python_names_a_processor_that_linux_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On ARM ``/proc/cpuinfo`` has no model's name."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    monkeypatch.setattr("kd.machine.Path", lambda path: cpuinfo)
    monkeypatch.setattr(platform, "processor", lambda: "aarch64")
    assert processor() == "aarch64"

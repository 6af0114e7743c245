"""What the process has of its machine."""

import ast
import os
import platform
import signal
import subprocess
from pathlib import Path

import pytest

from kd.launch.child import start_kd_train
from kd.machine import cache_dir, peak_memory_mb, processor, python, signals_kept
from scripts.house import tree_of
from tests._helpers import ROOT, error_in_a_thread


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
    assert peak_memory_mb() > 10  # nor has every kernel's status a peak: gVisor's


def test_every_child_python_is_started_by_one_function() -> None:
    """It leaves out the present folder, in which others' files may lie."""
    named = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "kd").rglob("*.py")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute) and node.attr in ("executable", "orig_argv")
    }
    shown = {"kd/errors.py", "kd/fleet/jobs/places/torchrun.py"}  # a line for people; a script
    assert named == {"kd/machine.py", *shown}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with modules that write a file when they are imported."""
    for module in ("kd", "statistics", "json", "ast", "runpy", "socket"):
        (tmp_path / f"{module}.py").write_text("open('HACKED', 'w').close()")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "HACKED"


def test_a_child_imports_nothing_from_the_present_folder(planted: Path) -> None:
    assert start_kd_train(["--list"], stdout=subprocess.DEVNULL).wait() == 0
    assert not planted.exists()


def test_what_a_command_starts_imports_nothing_from_there(planted: Path) -> None:
    """Also what libraries start: Lightning's ranks, Ray's workers. ``PYTHONPATH`` still counts."""
    child = "import json, statistics, sys; print(sys.path[0])"
    program = (
        "import subprocess, sys\nfrom kd.cli import kd_main\n"
        f"sys.argv = ['kd', 'train', '--list']; kd_main(); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(python("-c", program), env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(ROOT) and not planted.exists(), done.stderr

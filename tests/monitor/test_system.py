"""The machine's samples: with no GPU, with a fake NVML, on and off in a running job."""

import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pytorch_lightning import Callback, Trainer

from kd.monitor.system import Gpus, System, SystemReader
from kd.report.records import Writer
from tests._runs import callback, newest_run
from tests._runs import run as trained


class FakeNVML(ModuleType):
    """Two GPUs; the second throttles for heat and can't tell its power, nor its name."""

    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        known = ["GPU-aa", "GPU-bb", "MIG-cc"]
        if uuid not in known:
            raise self.NVMLError
        return known.index(uuid)

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        self.nvmlDeviceGetPowerUsage(handle)
        return b"Fake H1"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=90 - 50 * handle, memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=2**30, total=4 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError
        return 300_000

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x20 * handle


def test_every_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML("pynvml"))
    gpus = Gpus(["aa", "bb", "", "bb"])
    assert gpus.names() == ["Fake H1", "GPU"]
    first, second = gpus.read()
    assert first == {"util": 90, "mem": 25.0, "mem_mb": 1024, "w": 300, "mhz": 1500}
    assert second["throttle"] == ["heat"]
    assert "w" not in second


def test_no_gpu_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ModuleType):
        def nvmlInit(self) -> None:
            raise RuntimeError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", Broken("pynvml"))
    assert Gpus(["aa"]).read() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus(["aa"]).read() == []


def test_a_busy_core_and_memory_show() -> None:
    machine, began = SystemReader(), time.monotonic()
    until = time.process_time() + 0.2
    held = bytearray(60_000_000)
    while time.process_time() < until:
        pass
    sample = machine.read()
    assert len(sample["cpu"]) == os.cpu_count()
    assert sample["main"] > 0.5 * 100 * 0.2 / (
        time.monotonic() - began
    )  # others may have had the core as well
    assert sample["rss_mb"] > len(held) / 2**20
    assert {"iowait", "mem", "swap_mb", "workers"} <= set(sample)


class Switch(Callback):
    """Turns the sampling off by the file after epoch 0, and on after epoch 1."""

    marks: list[float] = []  # noqa: RUF012 (the test reads it)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        time.sleep(0.1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.marks.append(time.time())
        if trainer.current_epoch < 2:
            folder = next(c for c in trainer.callbacks if type(c).__name__ == "RunFolder").path
            (folder / "monitor").write_text(("off\n", "on\n")[trainer.current_epoch])


def test_sampling_is_switched_while_the_job_runs(recipe: Path) -> None:
    own = callback("tests.monitor.test_system.Switch")
    items = ["trainer.max_epochs=3", "monitor.interval_s=0.1", own]
    trained(recipe, *items)
    from tests.monitor.test_system import Switch as Used

    run = newest_run(recipe)
    ((node, samples),) = run.samples.items()
    times = [s["t"] for s in samples]
    off, on = Used.marks[:2]
    assert [t for t in times if t < off]
    assert not [t for t in times if off + 0.25 < t < on]
    assert [t for t in times if t > on]
    assert run.nodes[node]["interval_s"] == 0.1


@pytest.mark.filterwarnings("error")
def test_a_refused_command_file_ends_no_sampling_and_a_full_disk_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    (tmp_path / "monitor").mkdir()  # as a file that is too large
    (tmp_path / "records").mkdir()
    system = System(SimpleNamespace(report=said.append), 0.05)  # type: ignore[arg-type]
    thread = threading.Thread(target=system._run, args=(tmp_path, 0, [os.getpid()], [""]))
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive() and system.newest["cpu"]
    monkeypatch.setattr(Writer, "write", mock.Mock(side_effect=OSError("full")))
    thread.join(10)
    assert (said, system.newest) == (["the machine is sampled no more: full"], {})


def test_loader_workers_are_watched(recipe: Path) -> None:
    slow = callback("tests._stop.Slow", seconds=0.15)
    items = ["data.num_workers=2", "monitor.interval_s=0.1", slow]
    trained(recipe, *items)
    assert any(len(s["workers"]) >= 2 for s in next(iter(newest_run(recipe).samples.values())))

"""Samples the machine while a run trains: cores, memory, disks, network, loader workers, GPUs."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from kd.errors import first_line
from kd.machine import core_ids
from kd.monitor.watched import Watched
from kd.processes import of_all_processes
from kd.report.records import Writer
from kd.storage.control_file import parse, read_command
from kd.storage.elsewhere import Json, RefusedFile

T = TypeVar("T")

MB = 2**20
SELDOM = ("thread_wait", "thread", "loader_wait")  # read with some samples alone
LOOK_FOR_CHILDREN = 8
"""Samples from one search for new processes, and reading of all threads, to the next: they open many files."""


def gpu_id(device: torch.device) -> str:
    """The UUID by which NVML knows the GPU (or MIG slice) that a process trains on; empty without one."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


class Gpus:
    """What NVML reports of the run's GPUs; without a driver, or without nvidia-ml-py, of none.

    Args:
        ids: UUIDs of the GPUs that the run's processes on this machine use (:func:`gpu_id`). A machine's other GPUs
            are other jobs', and NVML numbers them all, whatever ``CUDA_VISIBLE_DEVICES`` says.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        """Finds the GPUs with these UUIDs by NVML; one that NVML does not know is left out, and without NVML all are."""
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no package, no driver, no permission: there is nothing to watch
            return
        self._nvml = pynvml
        self._handles = [
            handle
            for uuid in dict.fromkeys(ids)
            if uuid and (handle := self._handle(uuid)) is not None
        ]
        self._reasons = {
            "heat": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            "power": pynvml.nvmlClocksThrottleReasonSwPowerCap
            | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        }

    def _handle(self, uuid: str) -> object:
        """NVML's handle of a GPU or of a slice of one (MIG); None where it knows neither."""
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        for kind in ("GPU", "MIG"):
            with suppress(self._nvml.NVMLError):
                return self._nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{bare}")
        return None

    def names(self) -> list[str]:
        """Names of the GPUs, in the order of their samples; "GPU" where NVML hides one."""
        names = (
            self._query(self._nvml.nvmlDeviceGetName, handle) or "GPU" for handle in self._handles
        )
        return [name.decode() if isinstance(name, bytes) else name for name in names]

    def read(self) -> list[Json]:
        """What :meth:`_read_one` reads of each GPU, in the order of :meth:`names`; [] without any."""
        return [self._read_one(handle) for handle in self._handles]

    def _read_one(self, handle: Any) -> Json:
        """One GPU's state; what NVML hides is left out.

        Returns:
            ``util`` (use in %), ``mem_mb`` (MB of 2**20 bytes) and ``mem`` (%) of its memory, ``w`` (watt), ``mhz`` (of its
            SMs) and, where its clocks are lowered, ``throttle``: why, ``heat`` or ``power`` or both.
        """
        nvml = self._nvml
        memory = self._query(nvml.nvmlDeviceGetMemoryInfo, handle)
        use = self._query(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._query(nvml.nvmlDeviceGetPowerUsage, handle)
        bits = self._query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        reading = {
            "util": use and use.gpu,
            "mem_mb": memory and round(memory.used / MB),
            "mem": round(100 * memory.used / memory.total, 1) if memory and memory.total else None,
            "w": power and round(power / 1000),
            "mhz": self._query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "throttle": [name for name, mask in self._reasons.items() if bits & mask] or None,
        }
        return {name: value for name, value in reading.items() if value is not None}

    def _query(self, ask: Callable[..., T], *arguments: object) -> T | None:
        """What NVML answers; None where it hides that."""
        with suppress(self._nvml.NVMLError):
            return ask(*arguments)
        return None


class Delays:
    """% of the time that threads wait for a core (Linux); all threads count, for autograd's often starves a GPU."""

    def __init__(self) -> None:
        self._before: dict[int, dict[int, int]] = {}
        """Nanoseconds on the run queue at the newest reading, by process and thread."""
        self._at = time.monotonic()

    def read(self, ranks: Iterable[int], loaders: Iterable[int]) -> Json:
        """How long threads have waited for a core since the last reading, in % of the time, 100 at most.

        Of each process its most delayed thread counts, of those that were there at the last reading too.

        Args:
            ranks: process ids of the training processes.
            loaders: of their loader workers.

        Returns:
            ``thread_wait``, a list by training process, ``thread`` (name of the most delayed thread of these),
            ``loader_wait`` by loader; {} in the first reading, and where the kernel does not tell.
        """
        now = time.monotonic()
        spent = now - self._at
        self._at = now
        before = self._before
        self._before = {pid: _queue_ns(pid) for pid in (*ranks, *loaders)}
        worst: dict[int, tuple[float, int]] = {}  # of each process: % of the time, the thread
        for pid, threads in self._before.items():
            earlier = before.get(pid, {})
            waits = [(ns - earlier[tid], tid) for tid, ns in threads.items() if tid in earlier]
            if waits and spent > 0:
                longest_ns, tid = max(waits)
                percent = round(longest_ns / spent / 1e7, 1)
                worst[pid] = min(100.0, percent), tid
        of_ranks = {pid: worst[pid] for pid in ranks if pid in worst}
        if not of_ranks:
            return {}
        pid = max(of_ranks, key=lambda rank: of_ranks[rank])
        _, tid = of_ranks[pid]
        reading: Json = {"thread_wait": [percent for percent, _ in of_ranks.values()]}
        with suppress(OSError):
            reading["thread"] = Path(f"/proc/{pid}/task/{tid}/comm").read_text().strip()
        loader_waits = [worst[loader][0] for loader in loaders if loader in worst]
        if loader_waits:
            reading["loader_wait"] = loader_waits
        return reading


def _queue_ns(pid: int) -> dict[int, int]:
    """Nanoseconds on the run queue of each thread of the process ``pid`` so far, by thread id.

    See the kernel's Documentation/scheduler/sched-stats.rst; empty where it does not tell.
    """
    queued_ns: dict[int, int] = {}
    with suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            with suppress(OSError, IndexError, ValueError):
                fields = Path(task.path, "schedstat").read_text().split()
                queued_ns[int(task.name)] = int(fields[1])
    return queued_ns


class SystemReader:
    """Readings of this machine and of a job's processes on it. Rates are since the reading before."""

    def __init__(self, ranks: Sequence[int] = (), gpus: Iterable[str] = ()) -> None:
        """Takes a first sample, from which rates are counted.

        Args:
            ranks: process ids of the training processes on this machine; empty: this process.
            gpus: UUIDs of the GPUs that these use; of others nothing is read.
        """
        self.gpus = Gpus(gpus)
        self._ranks = [psutil.Process(pid) for pid in ranks or [os.getpid()]]
        self._children: dict[int, psutil.Process] = {}
        self._before: dict[str, float] = {}
        self._delays = Delays()
        self._reads = 0
        self._at = time.monotonic()
        self.read()

    def read(self) -> Json:
        """One sample: shares in %, memory in MB (2**20 bytes), rates in MB/s since the last call.

        Returns:
            ``t`` (seconds since 1970), ``cpu`` (of each core), ``iowait`` and ``mem`` (of the machine), ``swap_mb``; what
            :meth:`_rates` and :meth:`_processes` give; ``gpu``: of each GPU what :meth:`Gpus.read` gives, where there
            are some.
        """
        memory = psutil.virtual_memory()
        swap = psutil.swap_memory()
        now = time.monotonic()
        seconds = max(1e-3, now - self._at)
        self._at = now
        sample: Json = {
            "t": round(time.time(), 2),
            "cpu": psutil.cpu_percent(percpu=True),
            "iowait": getattr(psutil.cpu_times_percent(), "iowait", 0.0),
            "mem": memory.percent,
            "swap_mb": round(swap.used / MB),
        }
        sample |= self._rates(seconds) | self._processes()
        gpus = self.gpus.read()
        return sample | ({"gpu": gpus} if gpus else {})

    def _rates(self, seconds: float) -> dict[str, float]:
        """MB a second since the last call ``seconds`` ago: ``disk_r``, ``disk_w``, ``net_r`` (received), ``net_w`` (sent).

        Of the whole machine; 0 in the first call, and left out where the system hides the counters.
        """
        counted: dict[str, float] = {}
        with suppress(Exception):  # containers may hide the counters
            disk = psutil.disk_io_counters()
            counted |= {"disk_r": disk.read_bytes, "disk_w": disk.write_bytes} if disk else {}
        with suppress(Exception):
            net = psutil.net_io_counters()
            counted |= {"net_r": net.bytes_recv, "net_w": net.bytes_sent}
        rates = {}
        for name, count in counted.items():
            before = self._before.get(name, count)
            megabytes = max(0.0, count - before) / MB
            rates[name] = round(megabytes / seconds, 3)
        self._before = counted
        return rates

    def _processes(self) -> Json:
        """CPU use in % (100: one core) of all training processes together (``main``) and of each process below them
        (``workers``), and the memory of all in MB.

        In every :data:`LOOK_FOR_CHILDREN`-th sample also what :meth:`Delays.read` gives, in % of the time; the
        processes below are looked for as seldom.
        """
        main = 0.0
        rss = 0
        workers = []
        delays: Json = {}
        if self._reads % LOOK_FOR_CHILDREN == 0:
            self._children = self._find_children()
            delays = self._delays.read([rank.pid for rank in self._ranks], list(self._children))
        self._reads += 1
        for rank in self._ranks:
            with suppress(psutil.Error):
                main += rank.cpu_percent()
                rss += rank.memory_info().rss
        for child in self._children.values():
            with suppress(psutil.Error):
                workers.append(child.cpu_percent())
                rss += child.memory_info().rss
        return {"main": round(main, 1), "workers": workers, "rss_mb": round(rss / MB, 1), **delays}

    def _find_children(self) -> dict[int, psutil.Process]:
        """The processes that training processes have started, by id, without those that train themselves.

        Known ones keep their object, which holds their last CPU times.
        """
        below: dict[int, psutil.Process] = {}
        for rank in self._ranks:
            with suppress(psutil.Error):
                below |= {child.pid: child for child in rank.children(recursive=True)}
        ranks = {rank.pid for rank in self._ranks}
        children = {}
        for pid, child in below.items():
            if pid not in ranks:
                children[pid] = self._children.get(pid, child)
        return children


class System(Callback):
    """Writes ``records/system.<node>.jsonl`` from a thread of its own, on the first process of each node."""

    def __init__(self, watched: Watched, interval_s: float = 0.5) -> None:
        """Stores the settings; the thread begins with the training.

        Args:
            watched: the training.
            interval_s: seconds from one sample to the next.
        """
        self.watched = watched
        self.interval_s = interval_s
        self.on = True
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._said = ("", 0)
        self.newest: Json = {}
        """The last sample, with what is read seldom (:data:`SELDOM`) from the sample that had it last; {} before the first,
        and on other processes than a machine's first."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the sampling in the first process of each machine.

        Every process must call it: they exchange their hosts, process ids and GPUs.
        """
        this_host = socket.gethostname()
        gpu = gpu_id(trainer.strategy.root_device)
        ranks = []
        gpus = []
        for host, pid, gpu_of_rank in of_all_processes((this_host, os.getpid(), gpu)):
            if host == this_host:  # however it was started
                ranks.append(pid)
                gpus.append(gpu_of_rank)
        if trainer.local_rank != 0:
            return
        self._stop.clear()
        of = self.watched.folder(trainer), trainer.node_rank, ranks, gpus
        self._thread = threading.Thread(target=self._run, args=of, name="kd-system", daemon=True)
        self._thread.start()

    def _run(self, folder: Path, node: int, ranks: list[int], gpus: list[str]) -> None:
        """Thread, one a machine: samples until the training ends (:meth:`_sample`, whose arguments these are).

        What ends it before, such as a full disk, is reported; the training continues without samples.
        """
        try:
            self._sample(folder, node, ranks, gpus)
        except Exception as error:
            self.newest = {}
            self.watched.report(f"the machine is sampled no more: {first_line(error)}")

    def _sample(self, folder: Path, node: int, ranks: list[int], gpus: list[str]) -> None:
        """Writes a sample every ``interval_s`` seconds while :attr:`on`, until the training ends.

        Args:
            folder: of the run.
            node: the machine's number.
            ranks: process ids of its training processes.
            gpus: UUIDs of the GPUs that they use.
        """
        machine = SystemReader(ranks, gpus)
        name = f"{node}-{socket.gethostname()}"
        header = {
            "of": "system",
            "node": name,
            "core_ids": core_ids(),
            "gpus": machine.gpus.names(),
            "interval_s": self.interval_s,
        }
        writer = Writer(folder / "records" / f"system.{name}.jsonl", header)
        while not self._stop.wait(self.interval_s):
            with suppress(RefusedFile):  # rank 0 reports it
                self._obey(read_command(folder))
            if self.on:
                sample = machine.read()
                writer.write({"kind": "sample", **sample})
                self.newest = {
                    key: self.newest[key] for key in SELDOM if key in self.newest
                } | sample
        writer.close()

    def _obey(self, said: tuple[str, int]) -> None:
        """Follows a new text of the file ``monitor``: sampling on or off, and its interval; a wrong text changes nothing.

        ``said``: the text and when it was written, in ns (:func:`kd.storage.control_file.read_command`).
        """
        if said == self._said:
            return
        self._said = said
        with suppress(ValueError):  # rank 0 has reported it
            command = parse(said[0])
            self.on, self.interval_s = (
                command.get("on", self.on),
                command.get("interval", self.interval_s),
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the thread; Lightning has given its signals back only now."""
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stops the thread."""
        self._end()

    def _end(self) -> None:
        """Ends the thread, for which it waits up to 5 s; safe to call again."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=5)
        self._thread = None

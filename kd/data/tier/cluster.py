"""The cluster of the engine ``ray`` (extra ``ray``). The one file of the data that imports Ray."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
import torchvision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from kd.data.sampler import Key
from kd.data.tier.schedule import MB, Made, MakerEnded, Work
from kd.errors import RunError, UserError, first_line, needs_extra, plain
from kd.machine import cores, last_line, own_folder, signals_kept
from kd.settings import TierSpec

KNOCK_S = 10.0  # seconds for an answer of the cluster's head


def _ray() -> ModuleType:
    """The module ``ray``; a user's error where it is not installed."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError(f"data.engine: ray {needs_extra('ray')} ({error})") from error
    return ray


def versions() -> dict[str, str]:
    """Version by library of what must be the same on both sides for views to be the same to the last bit."""
    import kd

    return {
        "kd": kd.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }


def differing(greeting: dict[str, str]) -> str:
    """The libraries of which a maker's ``greeting`` (:meth:`BatchMaker.greet`) has another version than this process, for a
    message; "" for none.
    """
    differences = []
    for name, version in versions().items():
        version_there = greeting.get(name)
        if version_there != version:
            differences.append(f"{name} {version_there} (here {version})")
    return ", ".join(differences)


class BatchMaker:
    """Makes batches on a machine of the tier: a Ray actor, in a process of its own; training processes call its methods."""

    def __init__(self) -> None:
        """Runs in the maker's process, on one core and no GPU."""
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.works: dict[int, Work] = {}

    def greet(self) -> dict[str, str]:
        """Answers once the maker runs: the versions of its libraries."""
        return versions()

    def make(self, work: int, parts: list[Any], keys: list[Key]) -> tuple[Any, float]:
        """Makes a batch; what fails becomes a text, which travels to the training process.

        Args:
            work: number of the kind of batches.
            parts: Ray's references to samples and collate function of this kind, which are fetched once.
            keys: of the samples, in order.

        Returns:
            The batch, its tensors as arrays, or the reason as text; and the seconds that it took.
        """
        if work not in self.works:
            data, collate = _ray().get(parts)
            self.works[work] = data, collate
        start = time.perf_counter()
        data, collate = self.works[work]
        made: Any
        try:
            batch = collate(data.__getitems__(keys))  # type: ignore[attr-defined]
            made = apply_to_collection(batch, Tensor, Tensor.numpy)
        except Exception as error:
            made = f"{first_line(error)} (on {socket.gethostname()})"
        return made, time.perf_counter() - start


class RayCluster:
    """The cluster, joined by this process or started for it. Every training process has one.

    Args:
        spec: ``data.tier``: the cluster's address, the label of its data machines.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(self, spec: TierSpec) -> None:
        """Imports Ray; nothing is joined or started before :meth:`join`."""
        self.ray = _ray()
        self.spec = spec
        self.joined = False
        self._mine = False  # this process has joined it, not its user's own code
        self._folder: Path | None = None  # of a Ray that was started here
        self._guard: subprocess.Popen[bytes] | None = None

    def join(self) -> None:
        """Joins the cluster, or without an address starts one on this machine; one that the user's code has joined is used.

        Call it from the main thread: Ray ends with its thread.

        Raises:
            UserError: no cluster was found, none can be started here, or none of its machines carries the label.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = self.spec.address or os.environ.get("RAY_ADDRESS")
        self._mine = not self.ray.is_initialized()
        try:
            with signals_kept():
                if self._mine and address:
                    _knock(address)
                    self.ray.init(address, log_to_driver=False, logging_level="ERROR")
                elif self._mine:
                    self._start_here()
        except Exception as error:
            self.leave()
            problem = f"no Ray cluster at {address}" if address else "no Ray can be started here"
            raise UserError(f"data.tier.address: {problem}: {plain(error)}") from error
        self.joined = True
        if self._mine:
            # It prints a failed machine's log into the training's output, unasked.
            with suppress(AttributeError):
                self.ray._private.worker.print_to_stdstream = lambda *_, **__: None
        if not self.machines():
            there = sum(node["Alive"] for node in self.ray.nodes())
            self.leave()
            raise UserError(
                f"data.tier.label: none of the cluster's {there} machine(s) carries {self.spec.label}; start those "
                f"that make batches with: ray start --address=HEAD:6379 --labels={self.spec.label}"
            )

    def _start_here(self) -> None:
        """Starts a Ray of this process's own, and a guard that ends what Ray would leave behind if this process is killed.

        The guard is a shell that reads from a pipe: it wakes when this process is gone, kills Ray's processes and removes
        their folder. :meth:`leave` ends it first.
        """
        self._folder = own_folder()
        store = min(2 * self.spec.queue_mb * MB, psutil.virtual_memory().available // 8)
        self.ray.init(
            "local",
            num_cpus=cores(),
            labels=self.spec.selector,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=max(store, 100 * MB),
            _temp_dir=str(self._folder),
        )
        processes = [str(child.pid) for child in psutil.Process().children(recursive=True)]
        self._guard = subprocess.Popen(
            [
                "sh",
                "-c",
                'cat; folder=$1; shift; kill -9 "$@"; rm -rf "$folder"',
                "sh",
                str(self._folder),
                *processes,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def leave(self) -> None:
        """Leaves the cluster and ends what this process has started for it; one joined by the user's code stays joined."""
        self.joined = False
        if self._mine:
            with suppress(Exception):
                self.ray.shutdown()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def machines(self) -> dict[str, tuple[str, int]]:
        """(Name, how many makers it has room for: one a core) of each machine that carries the label, by its id.

        Raises:
            RunError: this machine is no longer part of the cluster.
        """
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        this_node = self.ray.get_runtime_context().get_node_id()
        if this_node not in [node["NodeID"] for node in nodes]:
            raise RunError("this machine's part of it has ended")
        labels = self.spec.selector.items()
        machines = {}
        for node in nodes:
            cores = int(node["Resources"].get("CPU", 0))
            if labels <= node["Labels"].items() and cores >= 1:
                machines[node["NodeID"]] = node["NodeManagerHostname"], cores
        return machines

    def start(self, node: str) -> Any:
        """Starts a maker on a machine, by its id; returns Ray's handle, before the maker runs.

        It reserves no core: :class:`~kd.data.tier.schedule.Scheduler` shares them out.
        """
        where = {**self.spec.selector, "ray.io/node-id": node}
        maker = self.ray.remote(BatchMaker)
        return maker.options(num_cpus=0, label_selector=where, max_restarts=0).remote()

    def end(self, maker: object) -> None:
        """Ends a maker, by its handle; nothing happens where it has ended or Ray is gone."""
        if self.ray.is_initialized():  # else Ray would start a cluster for the call
            with suppress(Exception):
                self.ray.kill(maker)

    def put(self, work: Work) -> list[object]:
        """Puts a kind of batch (samples, collate function) into the cluster's store; returns Ray's references to both."""
        return [self.ray.put(part) for part in work]

    def finished(self, calls: Sequence[object], timeout: float) -> list[object]:
        """One of several calls (Ray's references) that has ended, by a result or an error; [] after ``timeout`` seconds."""
        return self.ray.wait(list(calls), num_returns=1, timeout=timeout)[0]

    def result(self, call: object) -> Any:
        """Waits for a call to a maker, by Ray's reference, and returns what it gave.

        Raises:
            MakerEnded: the maker is gone (the argument: whether for lack of memory), or what it had made was lost.
            UserError: its code raised an error, or it could not start; the message has the last line.
        """
        failed = self.ray.exceptions
        try:
            return self.ray.get(call)
        except failed.RayTaskError as error:
            raise UserError(last_line(error)) from error
        except failed.RayError as error:
            if "creation task" in str(error):
                raise UserError(last_line(error)) from error
            raise MakerEnded(isinstance(error, failed.OutOfMemoryError)) from error


def _knock(address: str) -> None:
    """Connects to ``HOST:PORT`` once; an OSError where nobody listens: Ray itself would try for minutes. ``auto`` is left to
    Ray; a ValueError for an address without a port.
    """
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def as_own_tensors(answer: tuple[Any, float]) -> Made:
    """A maker's answer as tensors of this process's own: the cluster's store gets its memory back at once.

    Args:
        answer: as :meth:`BatchMaker.make` returns it: the batch as arrays, or a message of what failed; and seconds.

    Returns:
        The batch with its size in bytes; for a message a RunError in its place, which the reader of the batch raises.
    """
    arrays, seconds = answer
    if isinstance(arrays, str):
        return Made(RunError(f"data.source: {arrays}"), 0, seconds)
    sizes = []

    def to_tensor(array: np.ndarray) -> Tensor:
        """A copy of an array as a tensor, in pinned memory where there is a GPU; adds its bytes to ``sizes``."""
        sizes.append(array.nbytes)
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensor = torch.empty(array.shape, dtype=dtype, pin_memory=torch.cuda.is_available())
        tensor.numpy()[...] = array
        return tensor

    batch = apply_to_collection(arrays, np.ndarray, to_tensor)
    return Made(batch, sum(sizes), seconds)

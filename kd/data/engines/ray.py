"""The cluster behind the engine ``ray`` (extra ``ray``): its machines, and processes on them that make batches.

The one file of the data that imports Ray. Ray is asked for little: which machines carry a label, a process on one of
them, a call to it, and what became of that call. Who makes which batch, and what happens when one fails, is decided in
``tier.py``.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
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
from torch.utils.data import Dataset

from kd.data.batch import Batch
from kd.data.engines.tier import MB, Made, MakerEnded, TierSpec, Work
from kd.data.sampler import Key
from kd.errors import RunError, UserError, first_line, plain
from kd.machine import cores
from kd.ray_session import last_line, own_folder, signals_kept

KNOCK_S = 10.0  # for an answer of the cluster's head


def _ray() -> ModuleType:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError(f"data.engine: ray needs the extra ray: pip install 'kd-train[ray]' ({error})") from error
    return ray


def versions() -> dict[str, str]:
    """What must be the same on both sides for views to be the same to the last bit."""
    import kd

    return {"kd": kd.__version__, "torch": torch.__version__, "torchvision": torchvision.__version__}


def differing(there: dict[str, str]) -> str:
    """What of it is not the same on another machine, for people."""
    ours = versions()
    return ", ".join(f"{name} {there.get(name)} (here {ours[name]})" for name in ours if there.get(name) != ours[name])


class BatchMaker:
    """Runs on a machine of the tier, in a process of its own."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.works: dict[int, tuple[Dataset[Any], Callable[..., Batch]]] = {}

    def greet(self) -> dict[str, str]:
        """Says that it is there, and with which libraries."""
        return versions()

    def learn(self, work: int, data: Dataset[Any], collate: Callable[..., Batch]) -> None:
        """Keeps what a kind of batch is made with."""
        self.works[work] = data, collate

    def make(self, work: int, keys: list[Key]) -> tuple[Any, float]:
        """A batch, its tensors as arrays, and the seconds that it took."""
        start = time.perf_counter()
        data, collate = self.works[work]
        try:
            together = getattr(data, "__getitems__", None)
            batch = collate(together(keys) if together else [data[key] for key in keys])
        except Exception as error:
            return f"{first_line(error)} (on {socket.gethostname()})", time.perf_counter() - start
        return apply_to_collection(batch, Tensor, Tensor.numpy), time.perf_counter() - start


class RayCluster:
    """The cluster, joined by this process or started for it.

    Args:
        spec: where it is.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(self, spec: TierSpec) -> None:
        self.ray, self.spec = _ray(), spec
        self.joined = False
        self._mine = False  # this process has joined it, not its user's own code
        self._folder: Path | None = None  # of a Ray that was started here
        self._guard: subprocess.Popen[bytes] | None = None

    def join(self) -> None:
        """Joins the cluster, or starts one on this machine; in the main thread, for Ray's processes end with theirs.

        Raises:
            UserError: there is no cluster, or none of its machines carries the label.
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
            raise UserError(f"data.tier.address: no Ray cluster at {address}: {plain(error)}") from error
        self.joined = True
        if self._mine:
            self._keep_quiet()
        if not self.machines():
            there = sum(node["Alive"] for node in self.ray.nodes())
            self.leave()
            raise UserError(
                f"data.tier.label: none of the cluster's {there} machine(s) carries {self.spec.label}; start those "
                f"that make batches with: ray start --address=HEAD:6379 --labels={self.spec.label}"
            )

    def _keep_quiet(self) -> None:
        """Ray prints the log of a machine that has failed into the training's output, and has no switch for it."""
        with suppress(AttributeError):
            self.ray._private.worker.print_to_stdstream = lambda *_, **__: None

    def _start_here(self) -> None:
        """A Ray of this process's own; a guard ends what Ray would leave behind where this process is killed."""
        self._folder = own_folder()
        store = min(2 * self.spec.queue_mb * MB, psutil.virtual_memory().available // 8)
        self.ray.init(
            "local", num_cpus=cores(), labels=self.spec.selector, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", object_store_memory=max(store, 100 * MB), _temp_dir=str(self._folder),
        )  # fmt: skip
        processes = [str(child.pid) for child in psutil.Process().children(recursive=True)]
        self._guard = subprocess.Popen(
            ["sh", "-c", 'cat; folder=$1; shift; kill -9 "$@"; rm -rf "$folder"', "sh", str(self._folder), *processes],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def leave(self) -> None:
        """Leaves it; ends what was started here."""
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
        """Name and cores of the machines that carry the label, by id.

        Raises:
            RunError: this machine is no longer part of the cluster.
        """
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        here = self.ray.get_runtime_context().get_node_id()
        if here not in (node["NodeID"] for node in nodes):
            raise RunError("this machine's part of it has ended")
        wanted = self.spec.selector.items()
        return {
            node["NodeID"]: (node["NodeManagerHostname"], int(node["Resources"]["CPU"]))
            for node in nodes
            if wanted <= node["Labels"].items() and node["Resources"].get("CPU", 0) >= 1
        }

    def start(self, node: str, share_of_a_core: float) -> Any:
        """Starts a maker on a machine."""
        kind = self.ray.remote(BatchMaker).options(
            num_cpus=share_of_a_core, label_selector={**self.spec.selector, "ray.io/node-id": node}, max_restarts=0
        )
        return kind.remote()

    def end(self, maker: object) -> None:
        """Ends a maker."""
        if self.ray.is_initialized():  # else Ray would start a cluster for the call
            with suppress(Exception):
                self.ray.kill(maker)

    def put(self, work: Work) -> tuple[object, ...]:
        """Lays a kind of batch where all machines can read it."""
        return tuple(self.ray.put(part) for part in work)

    def finished(self, calls: Sequence[object], timeout: float) -> list[object]:
        """Those of several calls that have ended, one way or another; waits for the first."""
        return self.ray.wait(list(calls), num_returns=1, timeout=timeout)[0]

    def result(self, call: object) -> Any:
        """What a call gives.

        Raises:
            MakerEnded: its maker is gone, or what it had made.
            UserError: it can't do what it is asked.
        """
        failed = self.ray.exceptions
        try:
            return self.ray.get(call)
        except failed.RayTaskError as error:
            raise UserError(last_line(error)) from error
        except failed.RayError as error:
            if "creation task" in str(error):
                raise UserError(last_line(error)) from error
            raise MakerEnded(memory=isinstance(error, failed.OutOfMemoryError)) from error


def _knock(address: str) -> None:
    """Raises an OSError where nobody listens: Ray itself would try for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def unpacked(answer: tuple[Any, float]) -> Made:
    """A maker's answer as tensors of this process's own: the cluster's store gets its memory back at once."""
    arrays, seconds = answer
    if isinstance(arrays, str):
        return Made(RunError(f"data.source: {arrays}"), 0, seconds)
    size = 0

    def tensor(array: np.ndarray) -> Tensor:
        nonlocal size
        size += array.nbytes
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        own = torch.empty(array.shape, dtype=kind, pin_memory=torch.cuda.is_available())
        own.numpy()[...] = array
        return own

    return Made(apply_to_collection(arrays, np.ndarray, tensor), size, seconds)

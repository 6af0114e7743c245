"""The Ray cluster (extra ``ray``) of a job with a data tier: a node on every machine, labelled by its role."""

import importlib.util
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kd.errors import RunError, Stopped, UserError, needs_extra
from kd.launch.child import die_with_parent
from kd.launch.cluster import Cluster, whole_number
from kd.machine import python
from kd.storage.elsewhere import LARGEST_LOG, text_of

WAIT_S = 1800.0  # for machines of the job that come up later
ANSWER_S = 5.0  # to connect
FIRST_MISSING = "data.engine: ray: the first machine has not answered at {} within half an hour"
TRAINING_MISSING = (
    "KD_ROLE: no machine that trains has answered at {} within 30 minutes (it starts Ray with "
    "config=remote_data)"
)
SEEN_DOWN = 5  # times in a row that the first machine does not answer before it counts as gone
# A program of its own, in a process of its own. Arguments: the cluster's address, the number of machines that prepare
# data, the seconds to wait for them; status 1 where they have not come.
READY = """
import ray, sys, time
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
until = time.monotonic() + float(sys.argv[3])
while sum(n["Alive"] and n["Labels"].get("kd-role") == "data" for n in ray.nodes()) < int(sys.argv[2]):
    if time.monotonic() > until:
        sys.exit(1)
    time.sleep(1)
"""


def _address(cluster: Cluster) -> tuple[str, int]:
    """Host and port of Ray on the first machine that trains.

    The host is ``MASTER_ADDR`` of the cluster's variables, else of the environment, else this machine's name; the port is
    ``KD_RAY_PORT``, else Ray's 6379.

    Raises:
        UserError: ``KD_RAY_PORT`` is no port (1 to 65535).
    """
    host = cluster.variables.get("MASTER_ADDR") or os.environ.get("MASTER_ADDR")
    port = whole_number(os.environ, "KD_RAY_PORT", 1, default=6379, high=65535)
    return host or socket.gethostname(), port


def _own_address(host: str) -> list[str]:
    """The argument of ``ray start`` with the address by which other machines know this one, in a list.

    Ray itself would take the address of the interface that leads to the internet.

    Args:
        host: this machine's name or address.

    Returns:
        ``["--node-ip-address=..."]``; [] where the name leads to no address, to another machine, or to the loopback.
    """
    with suppress(OSError, UnicodeError), socket.socket(type=socket.SOCK_DGRAM) as own:
        address = socket.gethostbyname(host)
        own.bind((address, 0))  # fails for an address that no interface of this machine has
        if address.startswith("127."):
            return []
        return [f"--node-ip-address={address}"]
    return []


def _is_listening(address: tuple[str, int]) -> bool:
    """Whether something accepts a connection at (host, port) within :data:`ANSWER_S` seconds."""
    try:
        socket.create_connection(address, timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


@dataclass
class _Node:
    """Ray on this machine, as :func:`_start` has started it."""

    process: subprocess.Popen
    """``ray start --block``, the first of a process group of its own."""
    log: Path
    """What Ray prints; it stays where Ray fails."""

    def check(self) -> None:
        """Raises RunError, with the last line of its log, where Ray's process has ended."""
        status = self.process.poll()
        if status is None:
            return
        text = text_of(self.log, LARGEST_LOG, errors="replace")
        lines = text.strip().splitlines() or [""]
        raise RunError(
            f"Ray has ended on this machine with status {status}: {lines[-1][:300]} (log: {self.log})"
        )

    def end(self) -> None:
        """Ends Ray's process and all that it has started: SIGTERM, then SIGKILL after 20 s.

        The log is removed unless Ray has failed by itself (a status above 0).
        """
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                break
        with suppress(ProcessLookupError):  # what it leaves when it is killed
            os.killpg(self.process.pid, signal.SIGKILL)
        if not self.process.returncode or self.process.returncode < 0:  # ended, as asked
            self.log.unlink(missing_ok=True)


def check_ray() -> None:
    """Refuses a machine without Ray, before it waits for other machines that would wait for it in turn.

    Raises:
        UserError: Ray is not installed; names the extra that installs it.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"machines that prepare data: {needs_extra('ray')}")


def _start(*arguments: str, role: str) -> _Node:
    """Starts Ray's process on this machine, which ends with this process; returns at once, before Ray answers.

    Args:
        arguments: of ``ray start``: ``--head`` for the first machine, ``--address=HOST:PORT`` for any other.
        role: the node's label ``kd-role``, by which work is placed: ``train`` or ``data``.
    """
    start = python("-m", "ray.scripts.scripts", "start", "--block")
    with tempfile.NamedTemporaryFile(prefix="kd-ray-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [*start, "--disable-usage-stats", f"--labels=kd-role={role}", *arguments],
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return _Node(process, Path(log.name))


def check_secret(cluster: Cluster | None) -> None:
    """Requires a secret that the machines of a Ray cluster share: whoever joins one may run code there.

    With a secret it sets ``RAY_AUTH_MODE=token``. Ray reads that once, at its import, so every process of the job calls
    this before. Nothing is required of a job without machines that prepare data, with a Ray of the user's own
    (``RAY_ADDRESS``), or where the user has set ``RAY_AUTH_MODE=disabled`` or ``RAY_AUTH_TOKEN_PATH``.

    Args:
        cluster: the job; None: no launcher.

    Raises:
        UserError: the job has machines that prepare data, and no secret.
    """
    if cluster is None or not cluster.data_nodes or os.environ.get("RAY_ADDRESS"):
        return
    if os.environ.get("RAY_AUTH_MODE") == "disabled" or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    if not os.environ.get("RAY_AUTH_TOKEN"):
        raise UserError(
            "RAY_AUTH_TOKEN: must be a secret that all machines of the job share; kd-launch gives them one "
            "(RAY_AUTH_MODE=disabled does without, where nobody else reaches them)"
        )
    os.environ["RAY_AUTH_MODE"] = "token"


@contextmanager
def nodes_of(cluster: Cluster | None, engine: str) -> Iterator[None]:
    """Around a training: runs Ray on this machine, and first waits for the machines that prepare data.

    All training processes call it. The first process of each machine starts Ray there, without cores for tasks, on the
    first machine as the head; the others wait for it. Inside, ``RAY_ADDRESS`` is the cluster's. Afterwards the process that
    started Ray ends it: once the first machine no longer answers, the machines that prepare data stop.
    Nothing happens in a job without machines that prepare data, or where ``RAY_ADDRESS`` is set already: by the user, or in
    a process that inherits it from the one that started Ray.

    Args:
        cluster: the job; None: no launcher.
        engine: ``data.engine`` of the run.

    Raises:
        UserError: the job has machines that prepare data, and the run does not use them; Ray is not installed;
            ``KD_RAY_PORT`` is no port; or a machine has not come in :data:`WAIT_S` seconds.
        RunError: Ray has ended on this machine while this process waited.
    """
    if cluster is None or not cluster.data_nodes or os.environ.get("RAY_ADDRESS"):
        yield
        return
    if engine != "ray":
        raise UserError(
            f"data.engine: {engine}, but {cluster.data_nodes} machine(s) of the job prepare data; "
            "config=remote_data"
        )
    check_ray()
    host, port = address = _address(cluster)
    os.environ["RAY_ADDRESS"] = f"{host}:{port}"
    try:
        with _node_here(host, port) as node:
            _wait_for(address, node)
            _wait_for_data(f"{host}:{port}", cluster.data_nodes, node)
            yield
    finally:
        os.environ.pop("RAY_ADDRESS", None)


@contextmanager
def _node_here(host: str, port: int) -> Iterator[_Node | None]:
    """Ray on this machine, which the machine's first process starts and ends; None in the others.

    Args:
        host: of the first machine, the head.
        port: of its Ray.

    Raises:
        UserError: the first machine has not answered in :data:`WAIT_S` seconds.
    """
    if _is_above_zero("LOCAL_RANK", "SLURM_LOCALID"):
        yield None
        return
    if _is_above_zero("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"):
        _wait_for((host, port))
        where = [f"--address={host}:{port}"]
    else:  # the first machine
        where = ["--head", f"--port={port}", "--include-dashboard=false", *_own_address(host)]
    node = _start(*where, "--num-cpus=0", role="train")
    try:
        yield node
    finally:
        node.end()


def _wait_for(
    address: tuple[str, int],
    node: _Node | None = None,
    received: Sequence[int] = (),
    missing: str = FIRST_MISSING,
) -> None:
    """Waits until something listens at an address, at most :data:`WAIT_S` seconds.

    Args:
        address: host and port.
        node: of this machine, which must not end meanwhile; None: another process has started it, or nobody yet.
        received: numbers of signals, to which a handler adds meanwhile; the first ends the wait.
        missing: message of the user's error, with ``{}`` where the address goes.

    Raises:
        UserError: nothing has answered.
        RunError: the node has ended.
        Stopped: a signal came.
    """
    until = time.monotonic() + WAIT_S
    while not _is_listening(address):
        if node:
            node.check()
        if received:
            raise Stopped(received[0])
        if time.monotonic() > until:
            raise UserError(missing.format(f"{address[0]}:{address[1]}"))
        time.sleep(1)


def _wait_for_data(address: str, count: int, node: _Node | None = None) -> None:
    """Waits until this machine's own node is there, and those of ``count`` machines that prepare data.

    Args:
        address: of the cluster, ``host:port``.
        count: of machines that prepare data.
        node: this machine's, which must not end meanwhile; None: another process of the machine has started it.

    Raises:
        UserError: they have not come in :data:`WAIT_S` seconds.
        RunError: the node has ended.
    """
    until = time.monotonic() + WAIT_S
    while True:
        seconds = max(0.0, until - time.monotonic())
        ready = python("-c", READY, address, str(count), str(seconds))
        done = subprocess.run(ready, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if node:
            node.check()
        if time.monotonic() > until:
            lines = done.stderr.strip().splitlines() or ["they have not come"]
            raise UserError(
                f"data.engine: ray: {count} machine(s) should prepare data: {lines[-1][:300]}"
            )
        time.sleep(1)


def _is_above_zero(*ranks: str) -> bool:
    """Whether one of these environment variables holds a rank other than 0; one that is not set counts as 0."""
    return any(os.environ.get(name, "0") != "0" for name in ranks)


def prepare_data(cluster: Cluster) -> int:
    """On a machine that prepares data: lends its cores to the machines that train, until these are done.

    ``kd-train`` calls it there in place of a training, after :func:`check_secret`. Training counts as done when the
    first machine has not answered :data:`SEEN_DOWN` times in a row.

    Args:
        cluster: the job.

    Returns:
        The exit status, 0.

    Raises:
        UserError: no training machine has come in :data:`WAIT_S` seconds, or Ray is not installed.
        RunError: Ray has failed here.
        Stopped: by SIGTERM or SIGINT, which are handled from here on in the main thread.
    """
    check_ray()
    address = _address(cluster)
    received: list[int] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: received.append(number))
    print(f"kd-train: waiting for the training machine at {address[0]}:{address[1]}", flush=True)
    _wait_for(address, None, received, TRAINING_MISSING)
    print(f"kd-train: prepares data for {address[0]}:{address[1]}", flush=True)
    node = _start(f"--address={address[0]}:{address[1]}", role="data")
    try:
        down = 0
        while down < SEEN_DOWN:
            if received:
                raise Stopped(received[0])
            time.sleep(1)
            if _is_listening(address):
                down = 0
            else:
                down += 1
            if not down:  # at the training's end the node may end by itself
                node.check()
    finally:
        node.end()
    print("kd-train: training has ended", flush=True)
    return 0

"""Trials on a Ray cluster (extra ``ray``), whose machines share paths and have ``kd``; Ray deals machines and GPUs."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from kd.errors import UserError, first_line, needs_extra
from kd.fleet.tuning.trials import LOST, RUNNER, TrialPlace, TrialShare
from kd.launch.child import start_kd_train
from kd.machine import cores, last_line, own_folder, signals_kept
from kd.storage.writing import appended

with suppress(ImportError):  # joined() says what is missing
    import ray
    import ray.exceptions


class Runner:
    """A Ray actor: starts and watches one run on a machine of the cluster.

    Ray calls :meth:`run` and :meth:`signal` in threads of one process, at the same time. Where that process ends, the
    kernel sends the run a signal, and it saves.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None  # the newest that was sent
        self._changing = threading.Lock()  # a signal comes before the start or after it, not amidst

    def greet(self) -> None:
        """Does nothing; Ray answers it once a machine has room for this actor."""

    def run(self, items: Sequence[str], log: str, folder: str, env: dict[str, str]) -> int:
        """Runs ``kd-train`` on the machine where Ray has placed this actor.

        Args:
            items: its command line.
            log: takes its output; a lock beside it keeps other machines from the trial.
            folder: working directory; relative paths start there.
            env: variables that the search adds.

        Returns:
            The run's exit status; -N where signal N came before the start.
        """
        with appended(Path(log)) as opened, appended(Path(log).with_name(RUNNER)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a run whose search was killed may still be saving
            with self._changing:
                if self._signal is not None:
                    return -self._signal
                self._process = start_kd_train(
                    items,
                    stdout=opened,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=folder,
                    env=env,
                    pass_fds=(lock.fileno(),),
                    start_new_session=True,
                )
            return self._process.wait()

    def signal(self, number: int) -> None:
        """Sends the run a signal; before its start: prevents that."""
        with self._changing:
            self._signal = number
            if self._process is not None:
                self._process.send_signal(number)


class RayRun:
    """A run on the cluster, see :class:`kd.fleet.tuning.trials.Process`."""

    def __init__(
        self, share: TrialShare, items: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> None:
        """Starts a trial as a Ray actor; it waits until a machine has room.

        Args:
            share: cores and GPUs of the trial; both are numbers here.
            items: words of its command line.
            log: file of its output, on a disk that all machines have.
            env: environment variables beside the machine's.
        """
        kind = ray.remote(Runner).options(
            num_cpus=share.cores, num_gpus=share.gpus, max_concurrency=3, max_restarts=0
        )
        self._status: int | None = None
        self._runner: Any = kind.remote()
        self._started = self._runner.greet.remote()  # done once a machine has room for it
        self._end = self._runner.run.remote(
            list(items), str(log.resolve()), str(Path.cwd()), dict(env)
        )

    def poll(self) -> int | None:
        """The exit status, None while the run lasts, :data:`LOST` where its machine is gone.

        Raises:
            UserError: the machine can't write the trial's folder.
        """
        if self._status is None and ray.wait([self._end], timeout=0)[0]:
            try:
                self._status = ray.get(self._end)
            except ray.exceptions.RayTaskError as error:  # the folder can't be written there
                raise UserError(
                    f"jobs: a machine of the cluster can't run a trial: {last_line(error)}"
                ) from error
            except ray.exceptions.RayError:
                self._status = LOST
            self._let_go()
        return self._status

    def send_signal(self, number: int, /) -> None:
        """Sends the run a signal, without waiting for it.

        A run that still waits for a machine is given up: its status is then minus the signal's number.
        """
        if self._status is not None:
            return
        if ray.wait([self._started], timeout=0)[0]:
            self._runner.signal.remote(number)
        else:  # it still waits for a machine
            self._status = -number
            self._let_go()

    def _let_go(self) -> None:
        """Ends the actor, and with it its claim on cores and GPUs."""
        with suppress(Exception):
            ray.kill(self._runner)


class RayPlace(TrialShare):
    """A share of the cluster's cores and GPUs, on whichever machine has it free."""

    def start(
        self, items: Sequence[str], log: Path, env: Mapping[str, str], owner: IO[str] | None = None
    ) -> RayRun:
        """Requests a machine from Ray, which starts the run there once it has room; returns at once.

        Arguments as of :meth:`kd.fleet.tuning.trials.TrialPlace.start`; ``owner`` is not used, since no other machine
        can inherit it (:data:`kd.fleet.tuning.trials.RUNNER`).
        """
        return RayRun(self, items, log, env)


@contextmanager
def joined(share: TrialShare, accelerator: str) -> Iterator[list[TrialPlace]]:
    """Joins the cluster (``RAY_ADDRESS``, or the one of this machine), or starts Ray on this machine alone.

    Args:
        share: what a trial has of the cluster.
        accelerator: of the runs: ``auto``, ``gpu``, ``cpu``.

    Yields:
        As many places as the cluster has room for.

    Raises:
        UserError: no Ray, no cluster at ``RAY_ADDRESS``, or no machine with room for one trial.
    """
    if "ray" not in globals():
        raise UserError(f"jobs: ray {needs_extra('ray')}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = own_folder()
    try:
        with signals_kept():
            _init(folder)
        yield _room(share, accelerator)
    finally:
        with suppress(Exception):
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _init(folder: Path) -> None:
    """Joins the cluster that ``RAY_ADDRESS`` or this machine has; else starts a Ray here, with its files in ``folder``.

    Raises:
        UserError: no cluster at ``RAY_ADDRESS``.
    """
    try:
        ray.init("auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        if "RAY_ADDRESS" in os.environ:
            text = f"no Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {first_line(error)}"
            raise UserError(f"jobs: {text}") from error
        ray.init(
            "local",
            num_cpus=cores(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(folder),
        )


def _room(share: TrialShare, accelerator: str) -> list[TrialPlace]:
    """A place for each trial that the cluster can run at a time; all places are alike.

    Args:
        share: cores and GPUs of a trial; a None is filled in, see :class:`kd.fleet.tuning.trials.TrialShare`.
        accelerator: the Trainer's: only where it takes GPUs has a trial one by default.

    Raises:
        UserError: no machine has room for one trial.
    """
    machines = []  # cores and GPUs of each
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            machines.append((resources.get("CPU", 0), resources.get("GPU", 0)))

    # GPUs of a trial, and how many trials the GPUs of each machine are enough for
    gpus = share.gpus
    if gpus is None:
        may_use_gpus = accelerator in ("auto", "gpu", "cuda")
        gpus = int(may_use_gpus and any(machine_gpus for _, machine_gpus in machines))
    by_gpus = [int(machine_gpus // gpus) if gpus else sys.maxsize for _, machine_gpus in machines]

    # cores of a trial: where GPUs are shared out, as many as leave cores for a trial on each
    cores_of_trial = share.cores
    if not cores_of_trial:
        shares = []
        for (machine_cores, _), trials in zip(machines, by_gpus, strict=True):
            if gpus and trials:
                shares.append(int(machine_cores) // trials)
        cores_of_trial = max(1, min(shares, default=1))

    room = 0
    for (machine_cores, _), trials in zip(machines, by_gpus, strict=True):
        room += min(int(machine_cores) // cores_of_trial, trials)
    if not room:
        has = ", ".join(f"{c:.0f} cores and {g:.0f} GPUs" for c, g in machines)
        raise UserError(
            f"jobs: no machine of the cluster has {cores_of_trial} core(s) and {gpus} GPU(s) for a trial ({has})"
        )
    return [RayPlace(cores_of_trial, gpus) for _ in range(room)]

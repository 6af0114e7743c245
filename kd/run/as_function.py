"""A run that is called as a function: the program around it finds its process as it was."""

import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from kd.clock import start_counts_from_now
from kd.errors import UserError

_running = threading.RLock()  # a callback of a run may call a function of kd's in turn


@contextmanager
def as_function(name: str) -> Iterator[None]:
    """What runs inside may seed, set signals and variables; afterwards they are as before, also where it fails.

    Working folder, environment, signal handlers (in the main thread, the only one that may set any), random generators
    (Python's, NumPy's, torch's on the CPU, and on all GPUs if the program has used CUDA before), torch's settings and
    Python's warning filters. The levels of loggers stay as set. Also a decorator (:mod:`kd.api`); errors pass through as
    they are.

    Args:
        name: of the function in ``kd`` and of its command (``train``: ``kd-train``), for messages.

    Raises:
        UserError: another thread runs one: both would seed and set the same process.
    """
    if not _running.acquire(blocking=False):
        raise UserError(
            f"kd.{name}: another run is going on in this program; wait for its end, or start kd-{name} as "
            "a process of its own"
        )
    try:
        with (
            start_counts_from_now(),
            _folder(),
            _environment(),
            _signals(),
            _generators(),
            _torch_settings(),
            warnings.catch_warnings(),
        ):
            yield
    finally:
        _running.release()


@contextmanager
def _folder() -> Iterator[None]:
    """Afterwards, the working folder is as before."""
    before = Path.cwd()
    try:
        yield
    finally:
        if Path.cwd() != before:
            os.chdir(before)


@contextmanager
def _environment() -> Iterator[None]:
    """Afterwards, the process's environment variables are as before; those that did not change are not written."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextmanager
def _signals() -> Iterator[None]:
    """Afterwards, all signals have the handlers of before, but for those that were not set from Python; outside the main
    thread nothing is changed.
    """
    main = threading.current_thread() is threading.main_thread()
    if main:
        numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    else:
        numbers = set()
    before = {
        number: handler for number in numbers if (handler := signal.getsignal(number)) is not None
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _generators() -> Iterator[None]:
    """Afterwards, the random generators of Python, NumPy and torch are in the state of before; those of the GPUs only if
    CUDA was in use before.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (the global one)
    gpus = None
    if torch.cuda.is_initialized():
        gpus = torch.cuda.get_rng_state_all()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)


@contextmanager
def _torch_settings() -> Iterator[None]:
    """Afterwards, torch's process-wide settings (precision, threads, determinism, cuDNN, gradients) are as before."""
    products = torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    gradients = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
        torch.set_grad_enabled(gradients)

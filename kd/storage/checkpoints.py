"""Checkpoint files that survive: written whole or not at all, the one before is kept, damage is recognised.

A training checkpoint is torch's own format, a zip archive that holds a CRC-32 of each of its records: that is the
checksum looked at here. It finds accidents (a torn write, a flipped bit), not malice; loading is ``weights_only``.
"""

import fcntl
import os
import socket
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from weakref import WeakValueDictionary

from kd.errors import UserError, first_line
from kd.storage.elsewhere import (
    open_regular,
    packed_record,
    plain_name,
    regular,
    text_of,
)
from kd.storage.writing import appended, make_folder

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"


def student_weights_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """The student's weights in a training checkpoint of ours, by name; the average's where there is one.

    Args:
        state: its ``state_dict``, with ``student.model.*``, and ``student.average.module.*`` where the run keeps a moving
            average; all other names are passed over. {} where it has no such names.
    """
    for prefix in ("student.average.module.", "student.model."):
        weights = {k[len(prefix) :]: v for k, v in state.items() if str(k).startswith(prefix)}
        if weights:
            return weights
    return {}


def check_writable(folder: Path) -> None:
    """Checks that ``folder``, or the nearest folder above it that exists, can be written; leaves nothing there.

    Raises:
        UserError: it can't; the message names ``runs_dir``.
    """
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with TemporaryDirectory(prefix=".kd-", dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"runs_dir: {folder} can't be written: {error.strerror}") from error


def claim(
    parent: Path, name: str | None = None, in_store: Callable[[str, str], None] | None = None
) -> Path:
    """Makes a folder below ``parent``, which is made too, and returns it; ``mkdir`` decides between two processes.

    Args:
        parent: of the folder.
        name: of the folder; None: the number (``000``, ``001``, ...) after the largest there that nobody takes first.
        in_store: claims ``parent``'s name and the folder's in the store that it is copied to, too. A number that is taken
            there is passed over.

    Raises:
        UserError: there is a folder of this name; or nothing can be written there, or in the store: then the message names
            ``runs_dir``.
    """
    try:
        make_folder(parent)
        numbers = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
        first = max(numbers, default=-1) + 1
        for folder_name in [name] if name else (f"{number:03d}" for number in count(first)):
            folder = parent / folder_name
            with suppress(FileExistsError):
                folder.mkdir()
                try:
                    if in_store:
                        in_store(parent.name, folder_name)
                except OSError:
                    folder.rmdir()
                    raise
                return folder
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"runs_dir: {parent} can't be written: {reason}") from error
    raise UserError(f"name: there is a run {folder} already; give another name")


def damage(path: Path, loads: bool = True) -> str:
    """What is wrong with a checkpoint's file, in a few words; empty for a whole one. Reads it all.

    Args:
        path: of the file.
        loads: whether torch must be able to load it, too; False: its records' checksums count alone, and torch is not
            imported.
    """
    try:
        with zipfile.ZipFile(regular(path)) as archive:
            packed = packed_record(path)
            if packed:
                return packed
            damaged_record = archive.testzip()
            if damaged_record:
                return f"wrong checksum of {damaged_record}"
        if loads:
            import torch

            torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except Exception as error:  # there are many ways to say that bytes make no sense
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


def newest_whole(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint to resume from: ``last.ckpt``, or ``previous.ckpt`` where that is damaged or missing.

    Args:
        folder: of the checkpoints. ``last.ckpt`` is read whole (:func:`damage`), and ``previous.ckpt`` where needed.

    Returns:
        The file, None where none is whole; and by file what is wrong with those that are newer than it.
    """
    damaged: dict[Path, str] = {}
    for file in (folder / LAST, folder / PREVIOUS):
        if not file.is_file():
            continue
        problem = damage(file)
        if not problem:
            return file, damaged
        damaged[file] = problem
    return None, damaged


def run_folder(path: Path) -> Path:
    """The run's own folder where ``path`` is a recipe's ``latest`` (a link, or a one-line file) or any other link.

    ``latest`` names a run beside it. Any other link is followed one step, wherever it leads. All else is returned as it
    is, also what does not exist.

    Raises:
        UserError: what ``latest`` holds is no plain name of a folder.
    """
    if path.is_symlink():
        target = str(path.readlink())
    elif path.name == "latest" and path.is_file():
        target = text_of(path, errors="replace").strip()
    else:
        return path
    if path.name == "latest":
        plain_name(target, str(path))
    return path.parent / target


LOCK = ".lock"
LONGEST_HOLDER = 1000  # bytes of a lock file that are read


_locked_here: WeakValueDictionary[Path, IO[str]] = WeakValueDictionary()
"""Lock files of this process by run folder, links followed; one that is closed holds nothing."""


def lock_run(folder: Path) -> IO[str]:
    """Holds a run's folder until the file is closed, or the process ends; rank 0 holds it for its job.

    A POSIX record lock: it works between machines (NFS), and a killed run's loader processes do not inherit it. On a
    file system without locks the file is returned unlocked.

    Returns:
        The open lock file, which the caller keeps: closing it, or any other handle of it in this process, gives the
        lock back.

    Raises:
        UserError: a process holds it, this one perhaps; names that one.
    """
    # first: ``appended`` replaces a lock file that has a second name, and the new file's lock is free
    holder = holder_of(folder)
    if holder:
        raise in_training(folder, holder)
    file = appended(folder / LOCK)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise in_training(folder, holder_of(folder) or "another process") from error
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(_this_process())
    file.flush()
    _locked_here[folder.resolve()] = file
    return file


def holder_of(folder: Path) -> str:
    """Which process, this one, another or one of another machine on the same file system, trains in a run's folder.

    Returns:
        ``process 123 on HOST``; "" where none does, or the file system has no locks.
    """
    # a process does not see its own POSIX lock, and gives it back with any handle of the file that it closes
    mine = _locked_here.get(folder.resolve())
    if mine is not None and not mine.closed:
        return _this_process()

    with suppress(OSError), open_regular(folder / LOCK) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(LONGEST_HOLDER).decode(errors="replace").strip() or "another process"
    return ""


def in_training(folder: Path, holder: str) -> UserError:
    """The error for a start in a run's folder in which ``holder`` (:func:`holder_of`) trains; the caller raises it."""
    return UserError(
        f"resume: {holder} is training in {folder}; stop it first, or wait for its end"
    )


def _this_process() -> str:
    """How this process is named in a lock file."""
    return f"process {os.getpid()} on {socket.gethostname()}"

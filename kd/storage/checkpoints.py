"""Checkpoint files that survive: written whole or not at all, the one before is kept, damage is recognised.

A training checkpoint is torch's own format, a zip archive that holds a CRC-32 of each of its records: that is the
checksum looked at here. It finds accidents (a torn write, a flipped bit), not malice; loading is ``weights_only``.
"""

import fcntl
import os
import socket
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from kd.errors import UserError
from kd.storage.elsewhere import LARGEST_WEIGHTS, plain_name, regular, text_of
from kd.storage.writing import appended, existing

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
OLD_NAMES = {"student.": "model.", "student_ema.": "average.", "distill_losses.": "objective.losses.",
             "task.": "objective.task."}  # fmt: skip


def todays_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """A training checkpoint's weights under today's names: ``students.<name>.model.*`` and so on.

    Until 0.1 a single student had no name, a student's parts had other names, and SimKD's loss was there twice.

    >>> old = {"student.head.bias": 0, "distill_losses.hint.w": 1, "_folded.w": 1, "students.a.student.head.bias": 2}
    >>> todays_names(old)
    ... # doctest: +NORMALIZE_WHITESPACE
    {'students.student.model.head.bias': 0, 'students.student.objective.losses.hint.w': 1,
     'students.a.model.head.bias': 2}
    """
    found = {}
    for key, value in state.items():
        name, rest = key.split(".", 2)[1:] if key.startswith("students.") else ("student", key)
        if rest.startswith("_folded."):
            continue
        old = next((prefix for prefix in OLD_NAMES if rest.startswith(prefix)), None)
        found[f"students.{name}.{OLD_NAMES[old] + rest.removeprefix(old) if old else rest}"] = value
    return found


def models_in(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The students' weights in a training checkpoint of ours, by student; the average's where there is one."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for key, value in todays_names(state).items():
        _, name, part, rest = key.split(".", 3)
        if part == "average":
            rest = rest.removeprefix("module.")
        if part in ("model", "average"):
            found.setdefault(name, {}).setdefault(part, {})[rest] = value
    return {name: parts.get("average") or parts["model"] for name, parts in found.items()}


def check_writable(folder: Path) -> None:
    """Checks that ``folder``, or the nearest folder above it that exists, can be written.

    Raises:
        UserError: it can't.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with TemporaryDirectory(prefix=".kd-", dir=there):
            pass
    except OSError as error:
        raise UserError(f"runs_dir: {folder} can't be written: {error.strerror}") from error


def claim(parent: Path) -> Path:
    """Makes the folder of the next free number (``000``)."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = (
            parent
            / f"{max((int(p.name) for p in parent.iterdir() if p.name.isdigit()), default=-1) + 1:03d}"
        )
        folder.mkdir()
    except OSError as error:
        raise UserError(f"runs_dir: {parent} can't be written: {error.strerror}") from error
    return folder


def damage(path: Path) -> str:
    """What is wrong with a checkpoint's file, in a few words; empty for a whole one. Reads it all."""
    import torch  # resuming needs it anyway; the command line's other answers should not wait for it

    from kd.storage.tensors import packed_record

    try:
        with zipfile.ZipFile(regular(path, LARGEST_WEIGHTS)) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                return "no checkpoint of torch"
            if packed := packed_record(path):
                return packed
            record = archive.testzip()
        if record:
            return f"wrong checksum of {record}"
        torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except Exception as error:  # there are many ways to say that bytes make no sense
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


def newest_whole(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint to resume from, and what is wrong with newer ones."""
    damaged: dict[Path, str] = {}
    for file in (file for file in (folder / LAST, folder / PREVIOUS) if file.is_file()):
        problem = damage(file)
        if not problem:
            return file, damaged
        damaged[file] = problem
    return None, damaged


def run_folder(path: Path) -> Path:
    """The run's own folder where ``path`` is a recipe's ``latest`` (a link, or a one-line file); else ``path``."""
    if path.is_symlink():
        to = path.readlink()
        return path.parent / (plain_name(str(to), str(path)) if path.name == "latest" else to)
    if path.name == "latest" and path.is_file():
        return path.parent / plain_name(text_of(path).strip(), str(path))
    return path


LOCK = ".lock"
LONGEST_HOLDER = 1000  # bytes of a lock file that are read


def lock_run(folder: Path) -> IO[str]:
    """Holds a run's folder until the file is closed, or the process ends; rank 0 holds it for its job.

    A POSIX record lock: it works between machines (NFS), and a killed run's loader processes do not inherit it.
    """
    holder = holder_of(
        folder
    )  # before a lock file with a second name is replaced, which others would not notice
    file = appended(folder / LOCK)
    try:
        if holder:
            raise BlockingIOError
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        holder = holder or holder_of(folder) or "another process"
        raise UserError(
            f"resume: {holder} is training in {folder}; stop it first, or wait for its end"
        ) from error
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def holder_of(folder: Path) -> str:
    """The process of this machine, or of another one on the same file system, that trains in a run's folder."""
    with suppress(OSError), existing(folder / LOCK) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(LONGEST_HOLDER).decode(errors="replace").strip() or "another process"
    return ""

"""One way to write: whole or not at all, never through a link.

A run's folder may come from elsewhere: :func:`guard` checks it once, when it is opened. After that a file is replaced by a
new one, or is opened without following a link. Whoever can write into the folder while kd runs is trusted. Above a run's
folder, and outside of one, links are the user's, and are followed.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from kd.storage.elsewhere import (
    LARGEST_LOG,
    LARGEST_WEIGHTS,
    RefusedFile,
    kind_of,
    open_regular,
    refused_file,
)
from kd.storage.shown import without_secrets

# endings of a run's files
FILES = (".ckpt", ".csv", ".html", ".json", ".jsonl", ".md", ".safetensors", ".txt", ".yaml")
WEIGHTS = (".safetensors", ".ckpt")
"""Endings of files that may have a second name (:func:`second_name`): nothing writes into them, they are replaced."""


def guard(folder: Path, within: Path | None = None, writes: bool = False) -> Path:
    """Checks what a run's folder holds, when it is opened. Returns ``folder`` as it was given.

    Each process calls it, before it reads or writes anything in the folder. A folder that does not exist passes, and so
    does a link in it that leads to another place in it.

    Args:
        folder: of a run, or of a search.
        within: a folder above it, from which no link may lead to it; None: links to the folder are the user's.
        writes: whether libraries will write into its files: each but weights that has a second name is replaced by a copy
            (:func:`file_for`).

    Raises:
        RefusedFile: names the first link that leads out of the folder, pipe, socket or device, or folder with a file's
            name (:data:`FILES`).
    """
    root = os.path.realpath(folder)
    if within is not None and Path(root) != Path(
        os.path.realpath(within), folder.relative_to(within)
    ):
        raise _link(folder)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            try:
                status = path.lstat()
            except FileNotFoundError:  # a run that trains replaces its files
                continue
            mode = status.st_mode
            if stat.S_ISLNK(mode):
                if not Path(os.path.realpath(path)).is_relative_to(root):
                    raise _link(path)
            elif stat.S_ISDIR(mode):
                if name.endswith(FILES):
                    raise _folder(path)
            elif not stat.S_ISREG(mode):
                raise refused_file(
                    path, f"is {kind_of(mode)}; a run's folder has only files and folders"
                )
            elif writes and status.st_nlink > 1 and path.suffix not in WEIGHTS:
                file_for(path)
    return folder


def _link(path: Path) -> RefusedFile:
    """The error for a link where a run's own file or folder belongs; the caller raises it."""
    return refused_file(
        path,
        "is a link; kd follows no link out of a run's folder: put the file or folder itself there",
    )


def _folder(path: Path) -> RefusedFile:
    """The error for a folder in a file's place; the caller raises it."""
    return refused_file(path, "is a folder; a file is written there")


def make_folder(path: Path) -> Path:
    """Makes a folder and those above it. Returns the path; a file in its place is a RefusedFile."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise refused_file(
            path, "a file has the place of this folder, or of one above it"
        ) from error
    return path


def write_whole(path: Path, write: Callable[[IO[bytes]], object], keep: Path | None = None) -> None:
    """Writes a file whole or not at all, even after a power cut; what has its name is replaced, a folder refused.

    By a file ``NAME.part`` beside it: one process at a time may write a file.

    Args:
        path: of the file; folders that are missing are made.
        write: writes the content to the file that it is called with; its errors leave the old file as it was.
        keep: the path that the old file gets, in the same folder; None: it is replaced.

    Raises:
        RefusedFile: a folder has the file's name or ``NAME.part``, or a file has the place of a folder above it.
        OSError: it can't be written.
    """
    part = _part(path)
    make_folder(path.parent)
    try:
        with _fresh(part) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            second_name(path, keep)
        move(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    with suppress(OSError):  # some network file systems have no folders to sync
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _part(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f"{path.name}.part")


def _fresh(path: Path) -> IO[bytes]:
    """A new file to write; what had the name is removed, a folder refused."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise (_folder(path) if path.is_dir() else error) from error
    return path.open("xb")


def write_bytes(path: Path, content: bytes, private: bool = False) -> None:
    """Writes a file whole or not at all (:func:`write_whole`); a ``private`` one can be read by its owner alone."""

    def write(file: IO[bytes]) -> None:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(content)

    write_whole(path, write)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text whole or not at all (:func:`write_whole`); one with a secret for its owner alone."""
    write_bytes(path, text.encode(), private=without_secrets(text) != text)


def json_text(content: object) -> str:
    """Indented JSON for other programs: a number that JSON lacks, NaN or infinite, is null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _name: None)
    return json.dumps(finite, indent=2) + "\n"


def write_json(path: Path, content: object) -> None:
    """Writes indented JSON whole or not at all (:func:`write_whole`)."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def appended(path: Path) -> IO[str]:
    """A UTF-8 file to write lines at the end of, made where it is missing; it can be read as well (mode ``a+``).

    Errors and a file with a second name as of :func:`file_for`.
    """
    return open(file_for(path), "a+", encoding="utf-8", opener=_without_link)


def _without_link(path: str | Path, flags: int) -> int:
    """The descriptor of a file that is no link; opening never waits for a pipe's other end."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def file_for(path: Path) -> Path:
    """The path of a file into which lines, or a library, write: its folder is made, and it has no second name.

    A file with a second name (a hard link) is replaced by a copy, so that its other name keeps its content.

    Raises:
        RefusedFile: a link, a folder or anything else that is no regular file has the name, or a file that is to be
            copied has more than ``LARGEST_LOG`` bytes.
    """
    make_folder(path.parent)
    if not os.path.lexists(path):
        return path
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        kind = kind_of(status.st_mode)
        raise refused_file(path, f"is {kind}; a file is written there")
    if status.st_nlink > 1:
        _copy(path, path, LARGEST_LOG)
    return path


def _copy(file: Path, to: Path, largest: int) -> None:
    """Writes a copy of a regular file of at most ``largest`` bytes, whole or not at all."""
    with open_regular(file, largest) as old:
        write_whole(to, lambda new: shutil.copyfileobj(old, new))


def move(path: Path, to: Path) -> None:
    """Gives a file or folder another name: a file replaces a file, and a folder an empty folder.

    A folder in a file's place is a RefusedFile, anything else that can't be moved an OSError.
    """
    try:
        path.replace(to)
    except IsADirectoryError as error:
        raise _folder(to) from error


def second_name(file: Path, name: Path) -> None:
    """Gives a file a second name (a hard link), or a copy where the file system has none; what had it is replaced.

    Args:
        file: a regular one; where it is copied, of at most ``LARGEST_WEIGHTS`` bytes.
        name: the path of the second name; folders that are missing are made, a folder that has the name is refused.
    """
    part = _part(make_folder(name.parent) / name.name)
    part.unlink(missing_ok=True)
    try:
        os.link(file, part, follow_symlinks=False)
    except OSError:
        _copy(file, name, LARGEST_WEIGHTS)
        return
    move(part, name)
    part.unlink(missing_ok=True)  # still there where ``name`` was a name of the same file


def remove(path: Path) -> None:
    """Removes what has a name: a folder with all that is in it, or a file; of a link the link alone.

    Nothing happens where nothing has the name; the folder that it lies in must exist.
    """
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

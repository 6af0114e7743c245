"""One way to write: whole or not at all, below a run's folder through its descriptor, never through a link.

A run's folder may come from elsewhere. :func:`guard` names it; from then on nothing that this process writes below it
leaves it: a link in a folder's place is refused, one in a file's place is replaced, and so is a file with a second name
(a hard link), whose other name keeps its content. Libraries that write by themselves go through :func:`folder_for` and
:func:`file_for`. Above a run's folder, and outside of one, links are the user's, and are followed.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
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
GUARDED: set[Path] = set()  # folders of runs, absolute
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READ_AND_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a file only where there is none."""


def guard(folder: Path) -> Path:
    """Nothing that this process writes below a run's folder leaves it from now on. Returns ``folder`` as it was given.

    Each process does it for itself.
    """
    run = folder.absolute()
    GUARDED.update({run, run.resolve()})
    return folder


def check_folders(folder: Path) -> None:
    """Raises a RefusedFile for a run's folder that has links in place of folders, or folders in place of files.

    Links to folders: in the folder itself, no deeper. Folders in place of files: those whose names end like a run's files
    (:data:`FILES`), at any depth. Called for a run that is resumed; writing itself refuses such places too.
    """
    for path in folder.glob("*"):
        if path.is_symlink() and path.is_dir():
            raise _link_on_the_way(path)
    for place, folders, _ in os.walk(folder):
        for name in folders:
            if name.endswith(FILES):
                raise refused_file(Path(place, name), "is a folder; a file is written there")


def _link_on_the_way(path: Path) -> RefusedFile:
    """The error for ``path``, a link to a folder where a run's own folder belongs; the caller raises it."""
    return refused_file(
        path, "is a link; kd writes through no link in a run's folder: put the folder itself there"
    )


def _parent(file: Path, make: bool = True) -> AbstractContextManager[int]:
    """Inside, the descriptor of the folder that a file lies in, made where it is missing (``make``).

    Below a guarded folder no link leads there.
    """
    return _opened(file.absolute().parent, make)


@contextmanager
def _opened(folder: Path, make: bool) -> Iterator[int]:
    """Inside, the descriptor of a folder, reached step by step from the outermost guarded folder at or above it.

    Without a guarded one the folder is opened by its path, through links too.

    Args:
        folder: absolute.
        make: whether folders that are missing are made.

    Raises:
        RefusedFile: a link or a file in the place of a folder below the guarded one, or ``..`` in the path.
        OSError: it is missing, or can't be made.
    """
    guarded = [path for path in (folder, *folder.parents) if path in GUARDED]
    root = folder
    if guarded:
        root = guarded[-1]
    if make:
        root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root, FOLDER)
    try:
        reached = root
        for part in folder.relative_to(root).parts:
            reached = reached / part
            if part == "..":
                raise refused_file(folder, f"leads out of {root}")
            below = _step(handle, part, reached, make)
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


def _step(folder: int, name: str, path: Path, make: bool) -> int:
    """The descriptor of the folder ``name`` in an open folder; never through a link.

    Args:
        folder: descriptor of the open folder.
        name: of the folder in it.
        path: the same as a path, for messages.
        make: whether it is made where it is missing.

    Raises:
        RefusedFile: a link or a file has its place.
        FileNotFoundError: it is missing.
    """
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
    try:
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        mode = os.lstat(name, dir_fd=folder).st_mode
        if stat.S_ISLNK(mode):
            raise _link_on_the_way(path) from error
        raise refused_file(path, f"is {kind_of(mode)}; a folder must be there") from error


def write_whole(path: Path, write: Callable[[IO[bytes]], object], keep: Path | None = None) -> None:
    """Writes a file whole or not at all, even after a power cut; what has its name is replaced, a folder refused.

    By a file ``NAME.part`` beside it: one process at a time may write a file.

    Args:
        path: of the file; folders that are missing are made.
        write: writes the content to the file that it is called with; its errors leave the old file as it was.
        keep: the path that the old file gets, in the same folder; None: it is replaced.

    Raises:
        RefusedFile: a folder has the file's name or ``NAME.part``, or the way below a guarded folder is refused
            (:func:`_opened`).
        OSError: it can't be written.
    """
    part = f"{path.name}.part"
    with _parent(path) as folder:
        try:
            with _fresh(folder, part, path) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if keep is not None:
                _keep(folder, path.name, keep.name)
            _rename(folder, part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise
        with suppress(OSError):  # some network file systems have no folders to sync
            os.fsync(folder)


def _fresh(folder: int, name: str, path: Path) -> IO[bytes]:
    """A new file to write in an open folder; what had the name is removed, a folder refused.

    Args:
        folder: descriptor of the open folder.
        name: of the file in it.
        path: of any file in the folder, for messages: ``name`` takes the place of its last part.
    """
    try:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return os.fdopen(os.open(name, NEW, 0o666, dir_fd=folder), "wb")
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.EPERM) and _is_folder(folder, name):
            raise refused_file(
                path.with_name(name), "is a folder; a file is written there"
            ) from error
        if error.filename is not None:  # the name alone, in an open folder
            error.filename = str(path.with_name(name))
        raise


def _is_folder(folder: int, name: str) -> bool:
    """Whether ``name`` in the open folder (a descriptor) is a folder itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode)
    except OSError:
        return False


def _rename(folder: int, name: str, path: Path) -> None:
    """Moves ``name`` in the open folder onto ``path``'s name there, at once.

    A file replaces a file, and a folder an empty folder. A file in place of a folder is a RefusedFile, anything else that
    can't be moved an OSError.
    """
    try:
        os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except IsADirectoryError as error:
        raise refused_file(path, "is a folder; a file is written there") from error


def _keep(folder: int, name: str, keep: str) -> None:
    """Gives the old file the name ``keep`` too, before :func:`_rename` replaces it: ``name`` never goes missing.

    Where the file system has no hard links the file moves to ``keep``, and ``name`` is missing until then. Without an
    old file nothing happens.

    Args:
        folder: descriptor of the open folder.
        name: of the old file in it.
        keep: its second name; what had it is replaced.
    """
    second = f"{keep}.part"
    try:
        with suppress(FileNotFoundError):
            os.unlink(second, dir_fd=folder)
        os.link(name, second, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError:
        second = name
    os.replace(second, keep, src_dir_fd=folder, dst_dir_fd=folder)
    if second != name:
        with suppress(
            FileNotFoundError
        ):  # it is still there where ``keep`` was a name of the same file
            os.unlink(second, dir_fd=folder)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all (:func:`write_whole`)."""
    write_whole(path, lambda file: file.write(content))


def write_private(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all (:func:`write_whole`); nobody but its owner can read it."""

    def write(file: IO[bytes]) -> None:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)

    write_whole(path, write)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text whole or not at all (:func:`write_whole`); one with a secret for its owner alone."""
    write = write_bytes if without_secrets(text) == text else write_private
    write(path, text.encode())


def write_json(path: Path, content: object) -> None:
    """Writes indented JSON whole or not at all (:func:`write_whole`)."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def appended(path: Path) -> IO[str]:
    """A UTF-8 file to write lines at the end of, made where it is missing; it can be read as well (mode ``a+``).

    What is no regular file is removed first, one with a second name replaced by a copy; a folder is refused.
    """
    flags = READ_AND_WRITE | os.O_CREAT | os.O_APPEND
    with _parent(path) as folder:
        _make_sole(folder, path)
        handle = os.open(path.name, flags, 0o666, dir_fd=folder)
    return os.fdopen(handle, "a+", encoding="utf-8")


def existing(path: Path) -> IO[bytes]:
    """An existing regular file, open for reading and writing, of which nothing is read or changed; an OSError else.

    For locks, which need a file that can be written. Unbuffered, at its beginning; a link is refused.
    """
    with _parent(path, make=False) as folder:
        handle = os.open(path.name, READ_AND_WRITE, dir_fd=folder)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise refused_file(path, "is no regular file")
    return os.fdopen(handle, "r+b", buffering=0)


def _make_sole(folder: int, path: Path) -> None:
    """Makes what has a file's name a regular file without a second name, with its content; anything else is removed.

    Args:
        folder: descriptor of the file's folder.
        path: of the file; it may be missing.

    Raises:
        RefusedFile: a folder has the name, or a file with a second name has more than ``LARGEST_LOG`` bytes.
    """
    try:
        status = os.lstat(path.name, dir_fd=folder)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        raise refused_file(path, "is a folder; a file is written there")
    if not stat.S_ISREG(status.st_mode):
        os.unlink(path.name, dir_fd=folder)
    elif status.st_nlink > 1:
        part = f"{path.name}.part"
        with open_regular(path, LARGEST_LOG) as old, _fresh(folder, part, path) as new:
            shutil.copyfileobj(old, new)
        _rename(folder, part, path)


def move(path: Path, to: Path) -> None:
    """Gives a file or folder another name in the same folder; as :func:`_rename` says of what has that name already.

    Args:
        path: of the file or folder.
        to: its new path, of which the name alone counts.
    """
    with _parent(path, make=False) as folder:
        _rename(folder, path.name, to)


def make_folder(path: Path) -> Path:
    """Makes a folder and those above it; below a guarded folder no link leads there. Returns the path."""
    with _opened(path.absolute(), make=True):
        return path


def check_way(folder: Path) -> None:
    """Raises a RefusedFile where a link leads to a folder below a guarded one; one that is missing is fine."""
    with suppress(FileNotFoundError), _opened(folder.absolute(), make=False):
        pass


def file_for(path: Path) -> Path:
    """The path of a file that a library opens to write: it is no link, and has no second name.

    Its folder is made, and below a guarded folder no link leads there. A regular file keeps its content, a link, pipe or
    device is removed, a folder refused.
    """
    with _parent(path) as folder:
        _make_sole(folder, path)
    return path


def folder_for(path: Path) -> Path:
    """A folder that a library writes to by itself: made, and below it nothing leads elsewhere.

    Links, pipes, sockets and devices in it are removed, at any depth, and files with a second name are replaced by a
    copy. What has the name of weights (``.safetensors``, ``.ckpt``) stays as it is unless it is a link: weights may have
    a second name (:func:`second_name`), as no library writes to them. Returns the path.
    """
    make_folder(path)
    for place, folders, files in os.walk(path):
        names = list(files)
        for name in folders:
            if Path(place, name).is_symlink():
                names.append(name)
        for name in names:
            file = Path(place, name)
            if file.is_symlink() or file.suffix not in (".safetensors", ".ckpt"):
                file_for(file)
    return path


def second_name(file: Path, name: Path) -> None:
    """Gives a file a second name (a hard link), or a copy where the file system has none; what had it is replaced.

    Args:
        file: a regular one; where it is copied, of at most ``LARGEST_WEIGHTS`` bytes.
        name: the path of the second name; folders that are missing are made, a folder that has the name is refused.
    """
    part = f"{name.name}.part"
    with _parent(file, make=False) as source, _parent(name) as folder:
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)
        try:
            os.link(file.name, part, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        except OSError:
            with open_regular(file, LARGEST_WEIGHTS) as old, _fresh(folder, part, name) as new:
                shutil.copyfileobj(old, new)
        _rename(folder, part, name)


def remove(path: Path) -> None:
    """Removes what has a name: a folder with all that is in it, or a file; of a link the link alone.

    Nothing happens where nothing has the name; the folder that it lies in must exist.
    """
    with _parent(path, make=False) as folder, suppress(FileNotFoundError):
        if _is_folder(folder, path.name):
            shutil.rmtree(path.name, dir_fd=folder)
        else:
            os.unlink(path.name, dir_fd=folder)

"""Where the files of a source lie: on this disk, or in an object store, of which a copy is made here first."""

import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kd.errors import UserError
from kd.storage.elsewhere import LARGEST_LIST, bytes_of
from kd.storage.objects import (
    AT_ONCE,
    copy_of,
    fetch,
    files_below,
    in_one_line,
    is_url,
    small_file,
)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".jp2",
                  ".j2k", ".jfif")  # fmt: skip
UNUSABLE = {
    ".heic", ".heif", ".avif", ".jxl", ".npz", ".npy", ".dcm", ".dicom", ".nef", ".cr2", ".cr3", ".arw", ".dng", ".svg",
    ".pdf", ".psd", ".eps", ".mp4", ".mov", ".avi", ".mkv", ".txt", ".xml", ".json", ".csv", ".zip", ".tar", ".db",
    ".mat", ".h5", ".tfrecord", ".parquet",
}  # fmt: skip
"""Endings of files that no reader here decodes: a list's rows of these are left out, as a folder's files are."""
JUNK = {
    "__MACOSX",
    "@eaDir",
    "__pycache__",
    "$RECYCLE.BIN",
    "System Volume Information",
    "lost+found",
    "#recycle",
}
"""Folders that programs leave behind, of which no picture is used."""


def folders_in(folder: str) -> list[str]:
    """The sorted names of the folders in a folder, but those that programs leave behind; none of a missing folder."""
    if not Path(folder).is_dir():
        return []
    return sorted(
        entry.name for entry in os.scandir(folder) if entry.is_dir() and not is_hidden(entry.name)
    )


def files_under(folder: str) -> Iterator[str]:
    """All files below a folder at any depth, in any order; hidden files, hidden folders and :data:`JUNK` are passed over.

    A link to a folder elsewhere is followed once. One to a folder that is read anyway, or is above, is not.
    """
    root = os.path.realpath(folder)
    followed: set[str] = set()  # real folders that links lead to

    def is_walked(path: str) -> bool:
        """Whether a folder is entered: a link only where it leads neither up nor to what is listed already."""
        if not os.path.islink(path):  # noqa: PTH114 - a Path each is slow
            return True
        real = os.path.realpath(path)
        is_within = f"{real}{os.sep}".startswith(f"{root}{os.sep}")
        is_above = root.startswith(f"{real}{os.sep}")
        if real in followed or is_within or is_above:
            return False
        followed.add(real)
        return True

    for path, folders, names in os.walk(folder, followlinks=True):
        visible = [name for name in folders if not is_hidden(name)]
        folders[:] = [name for name in visible if is_walked(f"{path}{os.sep}{name}")]
        for name in names:
            if not name.startswith("."):
                yield f"{path}{os.sep}{name}"


def pictures_below(folder: str) -> tuple[list[str], dict[str, int]]:
    """Paths of all pictures below a folder at any depth, sorted, and how many other files there are by ending.

    Hidden files and folders, and those of :data:`JUNK`, count as neither.
    """
    pictures: list[str] = []
    others: Counter[str] = Counter()
    for file in files_under(folder):
        if is_picture(file):
            pictures.append(file)
        else:
            others[ending_of(file)] += 1
    return sorted(pictures), dict(others)


def stamp_of_file(file: str) -> str:
    """Size in bytes and time of change in nanoseconds, each followed by a NUL; "" of a missing file."""
    try:
        stat = Path(file).stat()
    except (OSError, ValueError):  # a missing file is named by the check that decodes it
        return ""
    return f"{stat.st_size}\0{stat.st_mtime_ns}\0"


def is_picture(file: str) -> bool:
    """Whether a file's name ends as a picture's does."""
    return file.lower().endswith(IMAGE_SUFFIXES)


def is_hidden(name: str) -> bool:
    """Whether a folder or file belongs to a program: its name starts with a dot, or is one of :data:`JUNK`."""
    return name.startswith(".") or name in JUNK


def ending_of(file: str) -> str:
    """A file's ending in lower case with its dot, or "no ending": for a count of files that are left out."""
    return os.path.splitext(file)[1].lower() or "no ending"  # noqa: PTH122 - a Path each is slow


def expanded(path: str) -> str:
    """A path whose ``~`` is the user's folder; a URL as it is."""
    return path if is_url(path) else os.path.expanduser(path)  # noqa: PTH111 - "." stays "."


def joined(root: str, *names: str) -> str:
    """A path or URL below another one, in its shortest form; an absolute path, and a URL, stands for itself.

    >>> joined("/data/food", "train"), joined("s3://food/lists/", "../train", "a b.jpg"), joined("s3://food/", "/data")
    ('/data/food/train', 's3://food/train/a b.jpg', '/data')
    """
    for name in names:
        if not is_url(root) and not is_url(name):
            root = str(Path(root, name))
        elif is_url(name) or name.startswith("/"):
            root = name
        else:
            root = f"{root}/{name}"
    kind, _, path = root.partition("://")
    if not path:
        return str(Path(root))
    return f"{kind}://{posixpath.normpath(path)}"


# -- files in an object store ----------------------------------------------------------------------------------------
def folder_here(root: str, key: str) -> str:
    """A folder's path on this disk: of a URL a copy of its pictures, of which what is missing or has changed is fetched.

    Each process of a training calls it, and lists the store; one of them fetches. What the store has no longer is
    removed from the copy.

    Args:
        root: the folder or URL.
        key: the configuration key that named it.

    Raises:
        UserError: nothing is below the URL, it can't be listed or fetched, or this disk has no room.
    """
    if not is_url(root):
        return str(Path(root))
    url = joined(root)
    folder = copy_of(url, key)
    with in_one_line(key, url):
        there = {name: state for name, state in files_below(url, key).items() if is_picture(name)}
        if not there:
            raise UserError(f"{key}: {url}: no pictures below it ({', '.join(IMAGE_SUFFIXES)})")
        for file in filter(is_picture, files_under(str(folder))):
            if Path(file).relative_to(folder).as_posix() not in there:
                Path(file).unlink(missing_ok=True)
        fetch(url, folder, there, key)
    return str(folder)


def pictures_here(files: Sequence[str], key: str) -> list[str]:
    """The paths of pictures on this disk, in order; a URL becomes the path of its copy.

    Copies that are missing or have changed are fetched; none is removed. A picture that the store does not have gets the
    path that its copy would have.

    Args:
        files: paths and URLs.
        key: the setting that names them, for messages.

    Raises:
        UserError: a folder can't be listed (a web server's) or fetched, or this disk has no room.
    """
    wanted: dict[str, list[str]] = {}  # names by the URL of their folder
    for file in files:
        if is_url(file):
            folder, _, name = file.rpartition("/")
            wanted.setdefault(folder, []).append(name)
    copies = {url: copy_of(url, key) for url in wanted}
    with ThreadPoolExecutor(AT_ONCE) as pool, in_one_line(key):
        listings = pool.map(partial(files_below, key=key, below=False), wanted)
        for url, there in zip(wanted, listings, strict=True):
            listed = {name: there[name] for name in wanted[url] if name in there}
            fetch(url, copies[url], listed, key)
    paths = []
    for file in files:
        folder, _, name = file.rpartition("/")
        paths.append(f"{copies[folder]}/{name}" if folder in copies else file)
    return paths


def list_at(file: str, key: str) -> bytes:
    """The bytes of a list of pictures, a path or URL; at most :data:`LARGEST_LIST` of them. ``key`` begins messages.

    Raises:
        UserError: it is not there, or can't be read.
    """
    if is_url(file):
        with in_one_line(key, file):
            return small_file(file, LARGEST_LIST, key)
    if not Path(file).is_file():
        raise UserError(f"{key}: {file} not found")
    try:
        return bytes_of(file, LARGEST_LIST)
    except OSError as error:
        raise UserError(f"{key}: {file} can't be read: {error.strerror or error}") from error

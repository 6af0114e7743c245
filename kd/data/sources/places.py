"""Where the files of a source lie: on a disk or in an object store. Sources ask these how to list and read them."""

import hashlib
import os
import posixpath
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from kd.errors import UserError
from kd.machine import cache_dir
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import LARGEST_LIST, bytes_of, open_regular
from kd.storage.objects import (
    LocalCache,
    file_system,
    files_below,
    in_one_line,
    is_url,
    range_of,
    size_in,
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
AT_ONCE = 16  # requests of one process to a store: each waits for its answer many times longer than it works
PREFIX_END = chr(0x10FFFF)  # sorts after every other character


class Disk:
    """This machine's files. Folders and files are named by paths."""

    def is_folder(self, folder: str) -> bool:
        """Whether the path is a folder."""
        return Path(folder).is_dir()

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder, unsorted."""
        return [entry.name for entry in os.scandir(folder) if entry.is_dir()]

    def files(self, folder: str) -> list[str]:
        """Names of all entries in a folder, its folders too, unsorted."""
        return [entry.name for entry in os.scandir(folder)]

    def below(self, folder: str) -> Iterator[str]:
        """All files below it at any depth, in any order; hidden files, hidden folders and :data:`JUNK` are passed over.

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

    def open(self, file: str) -> IO[bytes]:
        """Opens a regular file to read.

        Raises:
            OSError: it can't be opened, is no regular file, or is larger than any picture.
        """
        return open_regular(file, MAX_BYTES)

    def stamp(self, file: str) -> str:
        """Size in bytes and time of change in nanoseconds, each followed by a NUL; "" of a missing file."""
        try:
            stat = Path(file).stat()
        except (OSError, ValueError):  # a missing file is named by the check that decodes it
            return ""
        return f"{stat.st_size}\0{stat.st_mtime_ns}\0"


class Store:
    """Files in an object store, by URL, listed once; each is read whole by one request and kept on the local disk.

    A pickled one knows the files, so that a loader's process lists nothing.

    Args:
        root: names the folder of its copies.
        states: by the URL of each file its size, and a hash of ETag and time (``SIZE-HASH``).
        limit: most bytes of copies, of all processes of the machine; None: all that were read.
    """

    def __init__(self, root: str, states: dict[str, str], limit: int | None) -> None:
        """A store of these files: :meth:`of` and :meth:`holding` list them. Arguments as of the class."""
        self.root = root
        self.limit = limit
        self._states = states

    @classmethod
    def of(cls, root: str, key: str, limit: int | None = None) -> "Store":
        """All files below the URL ``root``; ``limit`` as of the class.

        Raises:
            UserError: they can't be listed; the message names ``key``.
        """
        root = joined(root)
        files = files_below(root, key)
        states = {f"{root}/{name}": state for name, state in files.items()}
        return cls(root, states, limit)

    @classmethod
    def holding(
        cls, root: str, files: Iterable[str], key: str, limit: int | None = None
    ) -> "Store":
        """These files alone: their folders are listed, without what is below those; of others nothing is known.

        Args:
            root: names the folder of its copies.
            files: URLs; one that is not there is left out, and :meth:`open` refuses it.
            key: the setting that names them, for messages.
            limit: as of the class.

        Raises:
            UserError: a folder can't be listed; the message names ``key``.
        """
        wanted = set(files)
        folders = sorted({file.rpartition("/")[0] for file in wanted})
        states = {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            listings = pool.map(partial(files_below, key=key, below=False), folders)
            for folder, listing in zip(folders, listings, strict=True):
                for name, state in listing.items():
                    url = f"{folder}/{name}"
                    if url in wanted:
                        states[url] = state
        return cls(root, states, limit)

    @cached_property
    def _urls(self) -> list[str]:
        """The files' URLs, sorted, to find folders in."""
        return sorted(self._states)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_urls"}

    def _in(self, folder: str) -> list[str]:
        """The names of all files below a folder, relative to it, sorted."""
        start = f"{folder}/"
        first = bisect_left(self._urls, start)
        end = bisect_left(self._urls, start + PREFIX_END)
        return [url.removeprefix(start) for url in self._urls[first:end]]

    def is_folder(self, folder: str) -> bool:
        """Whether a file is below the URL: a store has no empty folders."""
        return bool(self._in(folder))

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder, from the listing."""
        return list({name.partition("/")[0] for name in self._in(folder) if "/" in name})

    def files(self, folder: str) -> list[str]:
        """Names of the files in a folder, from the listing."""
        return [name for name in self._in(folder) if "/" not in name]

    def below(self, folder: str) -> Iterator[str]:
        """URLs of all files below a folder, from the listing; hidden ones, and those in hidden folders, are left
        out.
        """
        for name in self._in(folder):
            if not any(map(is_hidden, name.split("/"))):
                yield f"{folder}/{name}"

    def open(self, file: str) -> IO[bytes]:
        """A file's content, from the local copies where it is among them; else it is fetched whole by this process.

        A fetched file is copied to this disk, unless that is full.

        Raises:
            FileNotFoundError: the listing does not have it.
            OSError: larger than any picture, or it can't be fetched.
        """
        if file not in self._states:
            raise FileNotFoundError(f"{file} not found")
        size = size_in(self._states[file])
        if size > MAX_BYTES:
            raise OSError(f"has {size:,} bytes, more than any picture")
        copies = self._copies()
        name = self._copy(file)
        fetch = partial(range_of, file, 0, size + 1, size)  # one byte more: has it grown?
        content = copies.get(name, fetch, size) if size else b""
        return BytesIO(content)

    def _copies(self) -> LocalCache:
        return _kept(cache_dir() / "pictures" / _hash(self.root)[:16], self.limit)

    def _copy(self, file: str) -> str:
        """Path of a listed file's copy, relative to the folder of copies; a file that has changed has another."""
        name = _hash(f"{file}\0{self._states[file]}")
        return f"{name[:2]}/{name[2:32]}"

    def fetch(self, files: Iterable[str]) -> None:
        """Copies these onto the disk, :data:`AT_ONCE` at a time, where two or more are missing; one is left to :meth:`open`.

        What can't be fetched is skipped: :meth:`open` raises the error for it.
        """
        has = self._copies().has
        listed_files = [file for file in files if file in self._states]
        missing = [file for file in listed_files if not has(self._copy(file))]

        def attempt(file: str) -> None:
            """Copies one file, in a thread."""
            with suppress(OSError, UserError):
                self.open(file)

        if len(missing) > 1:
            with ThreadPoolExecutor(min(AT_ONCE, len(missing))) as pool:
                list(pool.map(attempt, missing))

    def fits(self) -> bool:
        """Whether copies of all that was listed may be kept."""
        return self.limit is None or sum(map(size_in, self._states.values())) <= self.limit

    def stamp(self, file: str) -> str:
        """Size, and a hash of the ETag and of the time of change, as the listing has them; "" of a file not listed."""
        return self._states.get(file, "")


@lru_cache(maxsize=16)
def _kept(folder: Path, limit: int | None) -> LocalCache:
    return LocalCache(folder, limit)  # one a process: it counts what it writes


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


Place = Disk | Store
DISK = Disk()


def is_hidden(name: str) -> bool:
    """Whether a folder or file belongs to a program: its name starts with a dot, or is one of :data:`JUNK`."""
    return name.startswith(".") or name in JUNK


def ending_of(file: str) -> str:
    """A file's ending in lower case with its dot, or "no ending": for a count of files that are left out."""
    return os.path.splitext(file)[1].lower() or "no ending"  # noqa: PTH122 - a Path each is slow


def expanded(path: str) -> str:
    """A path whose ``~`` is the user's folder; a URL as it is."""
    return path if is_url(path) else os.path.expanduser(path)  # noqa: PTH111 - "." stays "."


def open_place(root: str, key: str, limit: int | None = None) -> Place:
    """Where the files below a folder or URL are; a URL is listed at once.

    Args:
        root: the folder or URL.
        key: the configuration key that named it.
        limit: most bytes of copies of files in a store; None: no bound.

    Raises:
        UserError: it can't be listed.
    """
    if is_url(root):
        return Store.of(root, key, limit)
    return DISK


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


def list_at(file: str, key: str) -> bytes:
    """The bytes of a list of pictures, a path or URL; at most :data:`LARGEST_LIST` of them. ``key`` begins messages.

    Raises:
        UserError: it is not there, or can't be read.
    """
    if is_url(file):
        file_system(file, key)  # refuses a protocol by the key
        with in_one_line(key, file):
            return small_file(file, LARGEST_LIST)
    if not Path(file).is_file():
        raise UserError(f"{key}: {file} not found")
    try:
        return bytes_of(file, LARGEST_LIST)
    except OSError as error:
        raise UserError(f"{key}: {file} can't be read: {error.strerror or error}") from error


def pictures_below(folder: str, place: Place = DISK) -> tuple[list[str], dict[str, int]]:
    """Paths (or URLs) of all pictures below a folder at any depth, sorted, and how many other files there are by ending.

    Hidden files and folders, and those of :data:`JUNK`, count as neither.
    """
    pictures: list[str] = []
    others: Counter[str] = Counter()
    for file in place.below(folder):
        if file.lower().endswith(IMAGE_SUFFIXES):
            pictures.append(file)
        else:
            others[ending_of(file)] += 1
    return sorted(pictures), dict(others)

"""What kd's cache folder holds, part by part: how large it is, when it was used, and what may be deleted.

Only entries whose names are like those that kd gives are entries: ``KD_CACHE`` may be a folder with other files in it.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from kd.storage.objects import STORES

DIGEST = r"[0-9a-f]{8,64}"
"""The end of a cached thing's name."""
TEACHER = rf"teachers/[\w.-]+-{DIGEST}"


@dataclass(frozen=True)
class Part:
    """A kind of content below the cache folder."""

    pattern: str
    """A regular expression for the paths of its entries, relative to the cache."""
    content: str
    """What its entries are."""
    loss: str
    """What it costs to delete one."""
    may_go: bool = True
    """Whether ``kd-runs clean`` deletes it."""


PARTS = {
    "answers": Part(
        rf"answers/(?!pixels$)[\w.-]+-{DIGEST}|answers/pixels/{DIGEST}",
        "outputs of a teacher, or views",
        "computed again when needed",
    ),
    "stored": Part(
        rf"stored/[\w.-]+-{DIGEST}",
        "answers of a file or a server",
        "the server is asked again, which may cost money",
        may_go=False,
    ),
    "teachers": Part(
        TEACHER,
        "a teacher that a recipe has trained",
        "trained again, which takes long",
        may_go=False,
    ),
    "unfinished": Part(
        rf"{TEACHER}\.part",
        "an interrupted training of a teacher",
        "it begins anew, and does not resume",
    ),
    "fetched": Part(
        rf"fetched/({'|'.join(STORES)})/[^/]+",
        "copies of files in an object store",
        "downloaded again when needed",
    ),
    "compiled": Part("compiled", "models as torch has compiled them", "compiled again when needed"),
    "lists": Part(rf"lists/{DIGEST}", "names of pictures, of runs that were killed", "nothing"),
    "scans": Part("scans", "which pictures are damaged", "pictures are checked once more"),
    "webdataset": Part("webdataset", "where samples lie in a shard", "shards are read once more"),
    "foodtag": Part(
        r"foodtag-mini-v\d+-(\d+x|test)\d+(-portions)?",
        "drawn pictures",
        "drawn again in half a minute",
    ),
    "runs": Part(
        "runs",
        "local copies of runs whose runs_dir is a URL",
        "what was not uploaded yet is only here",
        may_go=False,
    ),
    "own_runs": Part(
        r"own_runs-\d+",
        "notes on what this machine has trained",
        "files of your own runs need trust=",
        may_go=False,
    ),
}
"""The parts by name; kd/data/README.md lists them."""


@dataclass(frozen=True)
class Entry:
    """A file or folder of the cache that is deleted as a whole."""

    path: Path
    """Its place."""
    part: str
    """A key of :data:`PARTS`."""
    size: int
    """Bytes of its files."""
    used: float
    """Unix time when one of its files was last written or, where the file system notes it, read."""
    locks: tuple[Path, ...] = ()
    """Files beside it that are of no use without it: they go with it."""
    is_held: bool = False
    """Whether a process holds one of its locks: it stays."""


def entries_of(cache: Path) -> list[Entry]:
    """The entries of a cache folder; links and what kd has not named are left out.

    A lock is a part of the entry that it lies beside (:attr:`Entry.locks`).

    Args:
        cache: :func:`kd.machine.cache_dir`; it need not exist.
    """
    entries = []
    for path in without_links(cache, "*", "*/*", "*/*/*"):
        relative = path.relative_to(cache).as_posix()
        name = next((n for n, part in PARTS.items() if re.fullmatch(part.pattern, relative)), None)
        if name is None:
            continue
        lock = cache / f"{relative.removesuffix('.part')}.lock"
        locks = (lock,) if lock.is_file() else ()
        held = any(map(is_held, locks))
        entries.append(Entry(path, name, *size_and_time(path), locks, held))
    return entries


def without_links(folder: Path, *patterns: str) -> list[Path]:
    """What is below a folder, which may be a link itself, by patterns, sorted; without links, and what they lead to."""
    root = folder.resolve()
    found = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return [path for path in found if path.resolve() == root / path.relative_to(folder)]


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock's file; True also where that can't be known, as of a link.

    A free lock is held for the moment of the question.
    """
    try:
        with FileLock(lock, timeout=0):
            return False
    except OSError:
        return True


def regular_files(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The regular files at or below a path, each with what the disk says of it; what goes meanwhile is left out."""
    below = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    for file in (path, *below):
        with suppress(FileNotFoundError):
            status = file.lstat()
            if stat.S_ISREG(status.st_mode):
                yield file, status


def size_and_time(path: Path) -> tuple[int, float]:
    """Bytes of the regular files at or below a path, and the newest Unix time (seconds) that one was written or read.

    Without a regular file the time is when the path itself was last changed; 0 for one that is gone.

    Args:
        path: a file or folder; what goes meanwhile, in it too, has 0 bytes.
    """
    size = 0
    newest = 0.0
    for _, status in regular_files(path):
        size += status.st_size
        newest = max(newest, status.st_mtime, status.st_atime)
    with suppress(FileNotFoundError):
        newest = newest or path.lstat().st_mtime
    return size, newest

"""What one process of a machine finds out, and the others and later runs read from the cache folder."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock
from pydantic import TypeAdapter

from kd.storage.elsewhere import LARGEST_LIST, bytes_of
from kd.storage.writing import make_folder, write_bytes

Found = TypeVar("Found")


def once(
    file: Path,
    kind: TypeAdapter[Found],
    find: Callable[[], Found],
    fits: Callable[[Found], bool] = lambda _: True,
) -> Found:
    """What ``file`` holds, or what ``find`` gives, which is written there.

    Every process calls it; one of them calls ``find``, under a lock, while the others wait. Where the cache folder can't
    be written, each process calls ``find``.

    Args:
        file: JSON in the cache folder. One that is missing, damaged or of another kind counts as nothing.
        kind: of what it holds.
        find: called without arguments; its errors are the caller's.
        fits: whether what the file holds may be taken.
    """
    lock = FileLock(file.with_suffix(".lock"))
    with suppress(OSError):
        make_folder(file.parent)
        lock.acquire()
    try:
        with suppress(OSError, ValueError):
            known = kind.validate_json(bytes_of(file, LARGEST_LIST))
            if fits(known):
                return known
        found = find()
        with suppress(OSError, ValueError):  # a full disk, or a name that is not UTF-8
            write_bytes(file, kind.dump_json(found))
        return found
    finally:
        lock.release()

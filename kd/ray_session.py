"""What the data tier and a search on a cluster do alike around Ray; imports nothing of it."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_FOLDER = 40  # characters: the system allows a socket's path 107, and Ray's own part is long


def own_folder() -> Path:
    """A new folder for the files of a Ray that is started here, with a path that is short enough for its sockets."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="kd-ray-", dir=base if len(base) <= LONGEST_FOLDER else "/tmp"))


@contextmanager
def signals_kept() -> Iterator[None]:
    """Ray, joined within it, puts handlers of its own in the place of ours for SIGTERM and SIGINT: ours come back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def last_line(error: Exception) -> str:
    """A library's own reason stands at the end of what Ray tells."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:200]

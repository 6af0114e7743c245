"""One look for all progress bars; where nobody watches, lines."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

CALM = 10.0  # seconds between two lines in a log file


class Lines:
    r"""A stream for bars whose drawings are lines of a file: no returns to a line's start, nothing wiped.

    >>> Lines(sys.stdout).write("\r  50% \r     ")
    50%
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        """Writes each redrawing of a bar as a line of its own."""
        for part in text.replace("\n", "\r").split("\r"):
            if part.strip():
                self.stream.write(f"{part.strip()}\n")

    def flush(self) -> None:
        """Flushes the stream below."""
        self.stream.flush()


def drawn() -> dict[str, Any]:
    """Where a bar is drawn, and how often: on a terminal, or as a line every ten seconds."""
    if sys.stderr.isatty():
        return {"file": sys.stderr, "mininterval": 0.5}
    return {
        "file": Lines(sys.stderr),
        "mininterval": CALM,
        "miniters": 1,
        "ncols": 80,
        "ascii": True,
    }


def bar(
    iterable: Iterable[Any] | None = None, *, label: str, unit: str = " images", **kwargs: Any
) -> tqdm:
    """A bar on stderr that is erased at its end; without a terminal a line every ten seconds."""
    delay = 0.0 if sys.stderr.isatty() else CALM
    return tqdm(iterable, desc=label, unit=unit, leave=False, delay=delay, **drawn(), **kwargs)

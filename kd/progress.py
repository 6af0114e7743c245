"""Progress bars, all of one look: on a terminal bars, in a log file lines."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TextIO, cast

from tqdm import tqdm
from tqdm.utils import disp_len, disp_trim

CALM = 10.0  # seconds between two lines in a log file
CALM_AT_START = 4.0  # likewise, where nothing else shows life: before the first step


class Lines:
    r"""A stream for bars in a file: each drawing of a bar becomes a line, without returns to a line's start.

    tqdm writes to it where stderr is no terminal (:func:`drawn`).

    >>> Lines(sys.stdout).write("\r  50% \r     ")
    50%
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        """Writes each redrawing of a bar as a line of its own, without blanks around it; nothing where only blanks would
        erase a bar. tqdm calls this with what it would draw on a terminal.
        """
        lines = text.replace("\x1b[A", "\r")  # tqdm's way back up from a second bar
        for part in lines.replace("\n", "\r").split("\r"):
            if part.strip():
                self.stream.write(f"{part.strip()}\n")

    def flush(self) -> None:
        """Flushes the stream below."""
        self.stream.flush()


class Canvas:
    """A terminal's stream for bars, which use control characters to return to their line's start.

    A command's own stream (:class:`kd.run.streams.Unbroken`) shows control characters as text, as they may come from a
    file; its method ``draw`` lets them through, and is ``write`` here. Other streams' own ``write`` is used. All other
    attributes are the stream's.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.write: Callable[[str], object] = getattr(stream, "draw", stream.write)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        """Equal to its stream, so that tqdm knows which bars to clear before it writes a line to that stream."""
        return other is self._stream or other is self

    __hash__ = object.__hash__


class WholeItems(tqdm):
    """A bar that loses whole items, the last first, where a terminal is too narrow for all of them."""

    def __str__(self) -> str:
        """The bar's text, at most ``ncols`` columns wide; tqdm calls this for each drawing.

        Where not all of it fits, the picture (``|###  |``) is left out, then the items between commas one by one, the last
        first; a first item that is still too long is cut. With no ``ncols`` all is drawn.
        """
        facts = self.format_dict
        columns = facts["ncols"]
        whole = self.format_meter(**{**facts, "ncols": None})
        if not columns or disp_len(whole) <= columns:
            return str(self.format_meter(**facts))
        without_picture = (facts["bar_format"] or "").replace("|{bar}|", ",")
        if without_picture:
            whole = self.format_meter(**{**facts, "ncols": None, "bar_format": without_picture})
        items = whole.split(", ")
        while items[1:] and disp_len(", ".join(items)) > columns:
            items.pop()
        return str(disp_trim(", ".join(items), columns))


def part_begins(name: str) -> None:
    """One line on stderr for a part that takes seconds and has nothing to count: ``converting to onnx ...``."""
    print(f"{name} ...", file=sys.stderr, flush=True)


@contextmanager
def uncounted(name: str, calm: float = CALM) -> Iterator[None]:
    """Prints on stderr that a part is running which takes seconds and has nothing to count: a first line
    (:func:`part_begins`), then every ``calm`` seconds how long it has taken, from a thread. At its end nothing is printed.
    """
    part_begins(name)
    begun = time.monotonic()
    is_over = threading.Event()

    def say() -> None:
        """The thread: prints a line every ``calm`` seconds until the part is over."""
        while not is_over.wait(calm):
            print(f"{name}: {time.monotonic() - begun:.0f} s so far", file=sys.stderr, flush=True)

    speaker = threading.Thread(target=say, name="uncounted", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        is_over.set()
        speaker.join()


COUNTED = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left"
"""A bar whose end is known."""


def drawn(calm: float = CALM) -> dict[str, Any]:
    """tqdm's arguments for where and how often a bar is drawn, on stderr: on a terminal at most twice a second; else as
    lines of at most 80 columns, one every ``calm`` seconds or less often.
    """
    if sys.stderr.isatty():
        return {"file": Canvas(sys.stderr), "mininterval": 0.5}
    return {
        "file": Lines(sys.stderr),
        "mininterval": calm,
        "miniters": 1,
        "ncols": 80,
        "ascii": True,
    }


def bar_at_start(
    iterable: Iterable[Any] | None = None,
    *,
    label: str,
    total: int | None = None,
    unit: str = " images",
) -> tqdm:
    """A :func:`bar` of something before the first step, with the same arguments: only the first process shows it, in a log
    file with a line every :data:`CALM_AT_START` seconds at most.
    """
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

    hidden = getattr(rank_zero_only, "rank", 0) != 0
    return bar(iterable, label=label, unit=unit, total=total, calm=CALM_AT_START, disable=hidden)


def bar(
    iterable: Iterable[Any] | None = None,
    *,
    label: str,
    unit: str = " images",
    total: int | None = None,
    calm: float | None = None,
    **kwargs: Any,
) -> tqdm:
    """A progress bar on stderr that is erased at its end; without a terminal at most a line every ``calm`` seconds.

    It shows its share in per cent, the total and the time left, so it needs a total.

    Args:
        iterable: what is counted; None: the caller updates the bar.
        label: the text before the bar, such as what is being done; runs of blanks become one.
        unit: of what is counted, with a space before it.
        total: how many; default: the length of ``iterable``.
        calm: the least number of seconds between two lines in a log file, and before the first; None: :data:`CALM`.
        kwargs: further arguments of tqdm (``disable``, ``initial``, ...).

    Returns:
        tqdm's bar: to iterate over, or, without ``iterable``, to ``update(n)`` and ``close()``.

    Raises:
        TypeError: neither a total nor a length.
    """
    if total is None:
        total = len(cast(Sized, iterable))
    calm = CALM if calm is None else calm
    delay = 0.0
    if not sys.stderr.isatty():
        delay = calm
    label = " ".join(label.split())
    return WholeItems(
        iterable,
        desc=label,
        unit=unit,
        leave=False,
        delay=delay,
        total=total,
        bar_format=COUNTED,
        dynamic_ncols=sys.stderr.isatty(),
        **drawn(calm),
        **kwargs,
    )

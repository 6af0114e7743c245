"""One look for all progress bars."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def bar(iterable: Iterable[Any] | None = None, *, label: str, unit: str = " images", **kwargs: Any) -> tqdm:
    """A bar on stderr that leaves nothing behind; in a log file it writes every ten seconds only."""
    calm = 0.3 if sys.stderr.isatty() else 10.0
    return tqdm(iterable, desc=label, unit=unit, file=sys.stderr, leave=False, mininterval=calm, **kwargs)

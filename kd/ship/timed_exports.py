"""Which exports of a run can be timed. Torch is not imported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.ship.export.base import formats_with
from kd.storage.of_weights import exports, on_stderr

Runtimes = dict[str, dict[str, Any]]
"""Exports by name, as ``export/export.json`` describes them; ``torch``: nothing."""


def runtimes_of(run: Path, names: str | None, made_here: Callable[[Path], bool]) -> Runtimes:
    """The run's exports that can be timed, by name. Left out are those of a format that is not timed, of other weights than
    the student's present ones (reported on stderr), or without a file.

    Args:
        run: its folder.
        names: of exports, separated by commas; ``torch`` is the student itself. None: ``torch`` and all exports.
        made_here: whether this machine has written a file: a ``torch_export`` from elsewhere may run code, and is left out.

    Raises:
        UserError: one of ``names`` is no such export.
    """
    runnable = formats_with("timed")
    found: Runtimes = {"torch": {}}
    for name, export in exports(run, on_stderr).items():
        file = Path(export["file"])
        if export["to"] not in runnable or not file.exists():
            continue
        if export["to"] != "torch_export" or made_here(file):
            found[name] = export
    if names is None:
        return found
    chosen: Runtimes = {}
    for name in names.split(","):
        if name not in found:
            made = f"that this machine made (kd-export {run} to={name}; --trust takes any)"
            raise UserError(f"runtime: {run} has no export '{name}' {made}")
        chosen[name] = found[name]
    return chosen

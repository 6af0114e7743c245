"""Warnings of libraries that call for nothing: they stay off the terminal, and a run's folder keeps them."""

import re
import warnings
from pathlib import Path
from typing import TextIO

from kd.storage.writing import appended

NAME = "warnings.txt"
"""The file in a run's folder: a line for each known warning, with the library's file that gave it."""

# The last one: before the copy the module adds the teacher's answers, also to a loader that is not ours; after it
# the data make the views. Lightning has one hook for each, and warns of any that a module has beside a data module.
KNOWN = (
    ".*does not have many workers.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*exists and is not empty.*",
    ".*`_scheduled_optimizer_step`.*",
    ".*number of training batches.*smaller than the logging interval.*",
    ".*dataloader is not resumable.*",
    ".*lr_scheduler.step.*before.*optimizer.step.*",
    ".*in eval mode at the start of training.*",
    ".*It is recommended to use `self.log.*sync_dist=True.*",
    ".*Total length of `\\w*Loader` across ranks is zero.*",
    ".*`srun` command is available on your system but is not used.*",
    ".*You have overridden `on_before_batch_transfer`.*",
)
"""The messages, as ``warnings.filterwarnings`` takes them."""


class KnownWarnings:
    """Stands in the place of ``warnings.showwarning``: what matches :data:`KNOWN` goes to a file, all else is shown.

    What comes before there is a folder is written when :meth:`keep_in` names it.
    """

    def __init__(self) -> None:
        self._show = warnings.showwarning
        self._waiting: list[str] = []
        self._file: Path | None = None

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Takes the arguments of ``warnings.showwarning``."""
        text = str(message)
        if not any(re.match(known, text, re.IGNORECASE) for known in KNOWN):
            self._show(message, category, filename, lineno, file, line)
            return
        self._waiting.append(f"{filename}:{lineno}: {category.__name__}: {' '.join(text.split())}")
        self._write()

    def keep_in(self, folder: Path) -> None:
        """Writes to :data:`NAME` in ``folder`` what has come and what will come; one process of a job calls it."""
        self._file = folder / NAME
        self._write()

    def _write(self) -> None:
        """Appends what waits to the file, if there is one; a file that can't be written loses it."""
        if self._file is None or not self._waiting:
            return
        lines = "".join(f"{line}\n" for line in self._waiting)
        self._waiting.clear()
        try:
            with appended(self._file) as file:
                file.write(lines)
        except OSError:
            pass  # on a full disk the run fails at what matters more, and says so


def quiet_warnings() -> None:
    """Keeps known warnings off the terminal, to the end of the process or of an enclosing ``catch_warnings``."""
    if not isinstance(warnings.showwarning, KnownWarnings):
        warnings.showwarning = KnownWarnings()
    for message in KNOWN:
        warnings.filterwarnings("default", message=message)


def keep_warnings_in(folder: Path) -> None:
    """Has known warnings written to ``folder``, a run's; nothing where they are not kept apart (a test's own reader)."""
    if isinstance(warnings.showwarning, KnownWarnings):
        warnings.showwarning.keep_in(folder)

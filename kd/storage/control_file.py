"""The file ``monitor`` in a run's folder: what is watched is changed while the job runs."""

from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.storage.checkpoints import run_folder
from kd.storage.elsewhere import RefusedFile, text_of
from kd.storage.writing import write_text

CONTROL = "monitor"  # the file's name
WORDS = "on, off, interval=SECONDS, health=BATCHES, kernels=BATCHES, nvtx=on|off"
LEAST = {"interval": 0.05, "health": 0, "kernels": 1}
"""The least number that may follow each word: seconds between samples of the machine, batches between readings of the
model's health (0: none), and batches to profile."""
LARGEST = 2**16  # bytes of the file


def parse(text: str) -> dict[str, Any]:
    """The commands that the file's words give (kd/report/README.md). Spaces or lines separate words, and of each kind the
    last counts.

    Returns:
        A key for each kind of word that is there, {} for an empty text: ``on`` and ``nvtx`` (bool), ``interval``
        (seconds, float), ``health`` and ``kernels`` (batches, int).

    Raises:
        ValueError: names a word that is not known, or whose value is no number, infinite or below :data:`LEAST`.

    >>> parse("off kernels=5 nvtx=on")
    {'on': False, 'kernels': 5, 'nvtx': True}
    """
    command: dict[str, Any] = {}
    for word in text.lower().split():
        key, _, value = word.partition("=")
        try:
            if word in ("on", "off"):
                command["on"] = word == "on"
            elif key == "nvtx":
                command["nvtx"] = {"on": True, "off": False}[value]
            else:
                number = float(value) if key == "interval" else int(value)
                if not LEAST[key] <= number < float("inf"):
                    raise ValueError
                command[key] = number
        except (ValueError, KeyError):
            raise ValueError(f"'{word}' is not known; known: {WORDS}") from None
    return command


def read_command(folder: Path) -> tuple[str, int]:
    """The file's text, and when it was written: the same words written again are a new command.

    Called all through a run: by rank 0, once a second at most, and by the sampling thread of each machine.

    Returns:
        Text and time in nanoseconds of the file's clock; ``("", 0)`` without a file, or where it can't be read.

    Raises:
        RefusedFile: it is no regular file, or larger than :data:`LARGEST`.
    """
    file = folder / CONTROL
    try:
        return text_of(file, LARGEST), file.stat().st_mtime_ns
    except RefusedFile:
        raise
    except (OSError, ValueError):
        return "", 0


def send(place: str, words: list[str]) -> Path:
    """Writes words for a run that trains into its folder; returns the file. The run reads it some seconds later.

    Args:
        place: the run's folder on this machine (or on a file system that both share), or a recipe's ``latest``.
        words: of :data:`WORDS`.

    Raises:
        UserError: a word that is not known, a URL, or no such run.
    """
    text = "\n".join(words) + "\n"
    try:
        parse(text)
    except ValueError as error:
        raise UserError(f"--set: {error}") from error
    folder = run_folder(Path(place))
    if not (folder / "config.yaml").is_file():
        raise UserError(f"--set: must be a run's folder on the machine that trains, got {place}")
    write_text(folder / CONTROL, text)
    return folder / CONTROL

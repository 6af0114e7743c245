"""The file ``monitor`` in a run's folder: what is watched is changed while the job runs, also through an object store."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.storage.checkpoints import run_folder
from kd.storage.elsewhere import RefusedFile, text_of
from kd.storage.objects import file_system, in_one_line, is_url, small_file, tried, url_of_run
from kd.storage.run_urls import tag_of
from kd.storage.writing import write_bytes, write_text

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CONTROL = "monitor"  # the file's name
WORDS = "on, off, interval=SECONDS, health=BATCHES, kernels=BATCHES, nvtx=on|off"
LEAST = {"interval": 0.05, "health": 0, "kernels": 1}
"""The least number that may follow each word: seconds between samples of the machine, batches between readings of the
model's health (0: none), and batches to profile."""
LARGEST = 2**16  # bytes of the file


def parse(text: str) -> dict[str, Any]:
    """What the words of the file order (kd/report/README.md); spaces or lines lie between them, the last of a kind
    counts.

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
                if key == "interval":
                    number = float(value)
                else:
                    number = int(value)
                if not LEAST[key] <= number < float("inf"):
                    raise ValueError
                command[key] = number
        except (ValueError, KeyError):
            raise ValueError(f"'{word}' is not known; known: {WORDS}") from None
    return command


def read(folder: Path) -> tuple[str, int]:
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


def send(place: str, words: list[str]) -> str:
    """Writes words for a run that trains: into its folder, or into its copy in an object store.

    Args:
        place: the run's folder or URL, or a recipe's ``latest``.
        words: of :data:`WORDS`.

    Returns:
        Where they were written: the file's path or URL. The run reads it some seconds later (:func:`read`,
        :class:`RemoteControl`).

    Raises:
        UserError: a word that is not known, no such run, or a store that can't be written.
    """
    text = "\n".join(words) + "\n"
    try:
        parse(text)
    except ValueError as error:
        raise UserError(f"--set: {error}") from error
    if not is_url(place):
        folder = run_folder(Path(place))
        if not (folder / "config.yaml").is_file():
            raise UserError(f"--set: run folder {place} not found")
        write_text(folder / CONTROL, text)
        return str(folder / CONTROL)
    url = url_of_run(place, "--set")
    files, path = file_system(url, "--set")
    with in_one_line(f"--set: {url} can't be written"):
        files.invalidate_cache()
        if not tried(lambda: files.exists(f"{path}/config.yaml"), f"{url} can't be read"):
            raise UserError(f"--set: run {url} not found")
        tried(lambda: files.pipe_file(f"{path}/{CONTROL}", text.encode()), url)
    return f"{url}/{CONTROL}"


class RemoteControl:
    """Brings the file ``monitor`` of a run's copy in an object store to the run's folder, where it changes there.

    What the store has when the run begins, or resumes, is an earlier command and is not brought, unless the store can't
    be read at that moment. The thread of :class:`kd.storage.mirror.Mirror` calls :meth:`look` every few seconds.

    Args:
        files: fsspec's file system of the store.
        path: of the run's copy there.
        folder: of the run here.
    """

    def __init__(self, files: "AbstractFileSystem", path: str, folder: Path) -> None:
        """Remembers the tag of the file as it is: only later versions are fetched.

        Args:
            files: the store.
            path: of the run in the store.
            folder: of the run on this disk, where the file is copied to.
        """
        self._files = files
        self._path = f"{path}/{CONTROL}"
        self._file = folder / CONTROL
        self._tag = self._newest_tag()

    def _newest_tag(self) -> str:
        """What changes with the object; "" without one, or where the store does not answer."""
        self._files.invalidate_cache()
        with suppress(Exception):  # the object stores' clients raise many kinds
            return tag_of(self._files.info(self._path))
        return ""

    def look(self) -> None:
        """One request to the store; a second one where the object has changed.

        Raises:
            OSError: the object is too large, or can't be read; it is not read again before it changes.
        """
        tag = self._newest_tag()
        if not tag or tag == self._tag:
            return
        self._tag = tag  # one that can't be read is reported once and left
        content = small_file(self._files, self._path, f"{self._path} can't be read", LARGEST)
        write_bytes(self._file, content)

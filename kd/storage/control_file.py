"""The file ``monitor`` in a run's folder: what is watched is changed while the job runs, also through an object store."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.storage.checkpoints import run_folder
from kd.storage.elsewhere import RefusedFile, plain_name, text_of
from kd.storage.objects import file_system, in_one_line, is_url, small_file, tried
from kd.storage.run_urls import tag_of
from kd.storage.writing import write_bytes, write_text

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CONTROL = "monitor"  # the file's name
WORDS = "on, off, interval=SECONDS, health=BATCHES, kernels=BATCHES, nvtx=on|off"
LEAST = {"interval": 0.05, "health": 0, "kernels": 1}
"""The least number that may follow each word; of seconds, steps and a window's steps."""
LARGEST = 2**16  # bytes of the file


def parse(text: str) -> dict[str, Any]:
    """The words of the file, with spaces or lines between them (kd/report/README.md).

    Raises:
        ValueError: names a word that is not known.

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
        Where they were written.

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
    url = place.rstrip("/")
    files, path = file_system(url, "--set")
    with in_one_line(f"--set: {url} can't be written"):
        if url.endswith("/latest"):
            name = plain_name(_newest(files, path, url), url)
            url = url.removesuffix("latest") + name
            path = path.removesuffix("latest") + name
        files.invalidate_cache()
        if not tried(lambda: files.exists(f"{path}/config.yaml"), f"{url} can't be read"):
            raise UserError(f"--set: run {url} not found")
        tried(lambda: files.pipe_file(f"{path}/{CONTROL}", text.encode()), url)
    return f"{url}/{CONTROL}"


def _newest(files: "AbstractFileSystem", path: str, url: str) -> str:
    """The name of a recipe's newest run, from the object ``latest``.

    Args:
        files: the store.
        path: of the object.
        url: of the recipe's runs, for messages.
    """
    try:
        return small_file(files, path, f"{url} can't be read").decode(errors="replace").strip()
    except FileNotFoundError as error:
        raise UserError(f"--set: run {url} not found") from error


class RemoteControl:
    """Brings the file ``monitor`` of a run's copy in an object store to the run's folder, where it changes there.

    What the store has when the run begins, or goes on, is an earlier command and is not brought.

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
            UserError: the object is too large, or can't be read; it is not read again before it changes.
        """
        tag = self._newest_tag()
        if not tag or tag == self._tag:
            return
        self._tag = tag  # one that can't be read is reported once and left
        content = small_file(self._files, self._path, f"{self._path} can't be read", LARGEST)
        write_bytes(self._file, content)

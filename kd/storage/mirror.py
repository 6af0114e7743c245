"""A run's folder in an object store (``runs_dir=s3://...``): written on this disk, put there after each checkpoint."""

import math
import sys
import threading
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

from kd.errors import first_line
from kd.storage.checkpoints import PREVIOUS
from kd.storage.objects import (
    file_system,
    in_one_line,
    mark_copy,
    put_whole,
    small_file,
    tried,
)
from kd.storage.run_urls import CLAIM, LATEST, OWNER, owner_in
from kd.storage.writing import second_name, write_text

EVERY_S = 5.0  # between two looks for a new checkpoint
WHOLE_S = 300.0  # between two uploads of what grows: records, metrics


class Mirror:
    """Puts the folder of a run into an object store.

    Every process of a run may make one; the first alone calls :meth:`claim` (of a new run) and :meth:`follow`, and
    :meth:`close` at the end. In between a thread uploads. Files that are deleted here stay in the store. Of several
    machines that train the same run, the one that has begun last sends it.

    Args:
        url: of the folder of all runs.
        key: by which the user has given the place, for messages.

    Raises:
        UserError: nothing can be written there, or the URL is refused (:func:`kd.storage.objects.file_system`).
    """

    def __init__(self, url: str, key: str) -> None:
        """Writes and deletes an empty file at ``url``, so that a place that can't be written is refused at the start.

        Arguments as of the class.
        """
        self.key = key
        self.url = url.rstrip("/")
        self.files, self.root = file_system(self.url, key)
        self.owner = uuid.uuid4().hex
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of each file of the run, as it was sent."""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = ""  # why nothing more is sent
        probe = f"{self.root}/.kd-{self.owner}"
        with in_one_line(f"{key}: {self.url} can't be written"):
            tried(lambda: self.files.pipe_file(probe, b""), "no file can be written there")
        with suppress(Exception):  # who may write may not be allowed to delete
            self.files.rm_file(probe)

    def claim(self, recipe: str, name: str) -> None:
        """Takes a run's name, before any other machine does.

        Raises:
            FileExistsError: it is taken.
            OSError: the store can't be read or written.
        """
        path = f"{self.root}/{recipe}/{name}"
        files = tried(lambda: self.files.find(path), f"{self.url} can't be read")
        if files:
            raise FileExistsError(path)
        owner = self.owner.encode()
        write = partial(self.files.pipe_file, f"{path}/{CLAIM}", owner, mode="create")
        tried(write, f"{self.url} can't be written")

    def follow(self, folder: Path, *markers: str) -> None:
        """Becomes the run's owner in the store, and starts the thread that uploads; a second call changes nothing.

        Args:
            folder: of the run, ``RECIPE/NAME``: these two name it in the store.
            markers: names of files beside it that name the run, as ``latest`` does.

        Raises:
            OSError: the store can't be written.
        """
        if self._thread is not None:
            return
        self.folder = folder
        recipe = f"{self.root}/{folder.parent.name}"
        self.run_url = f"{self.url}/{folder.parent.name}/{folder.name}"
        # the same as before in a folder that has sent: a start that is killed here changes nothing
        self.owner = owner_in(folder) or self.owner
        write_text(folder / OWNER, self.owner)
        # once: of two runs at the same time, the newer one is the latest
        name = f"{folder.name}\n".encode()
        contents = {f"{folder.name}/{CLAIM}": self.owner.encode()}
        contents |= dict.fromkeys(("latest", *markers), name)
        for file, content in contents.items():
            write = partial(self.files.pipe_file, f"{recipe}/{file}", content)
            tried(write, f"{self.url} can't be written")
        self._thread = threading.Thread(target=self._run, name="kd-mirror", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Ends the thread, sends what is left, and prints where; False, after a line on stderr, where that failed.

        Nothing happens where nothing was followed. An upload that is under way is waited for.
        """
        if self._thread is None:
            return True
        self._end.set()
        self._thread.join()
        try:
            self._send()
        except Exception as error:  # the object stores' clients raise many kinds
            left = f"{self.run_url} lacks the last files: {first_line(error)}"
            print(f"{self.key}: {left}; they are in {self.folder}", file=sys.stderr)
            return False
        print(f"uploaded: {self.run_url}", flush=True)
        return True

    def _run(self) -> None:
        """The thread: sends all that has changed when there is a new checkpoint, else every :data:`WHOLE_S` seconds.

        A problem that stays is reported once.
        """
        # the first time at once: who asks for the run from outside finds its settings
        sent_at = -math.inf
        reported = ""
        while not self._end.wait(EVERY_S):
            try:
                new = any(name.startswith("checkpoints/") for name in self._changed())
                if new or time.monotonic() > sent_at + WHOLE_S:
                    sent_at = time.monotonic()
                    self._send()
            except Exception as error:  # the thread must survive it
                problem = first_line(error)
                if problem != reported:
                    reported = problem
                    then = "" if self._lost else "; the upload is tried again"
                    print(f"{self.key}: warning: {problem}{then}", file=sys.stderr)

    def _changed(self) -> dict[str, tuple[int, int]]:
        """Size and time of the files that have changed since this process sent them, by name; ``last.ckpt`` comes last: a
        machine that resumes can cut records that are newer than it, but can't restore missing ones.

        Without links, hidden files, unfinished ones (``.part``), and the previous checkpoint, which is for a ``last.ckpt``
        that was cut: a store replaces a file whole.
        """
        states = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            is_left_out = (
                path.name.startswith(".") or path.suffix == ".part" or path.name == PREVIOUS
            )
            if is_left_out or path.is_symlink() or not path.is_file():
                continue
            with suppress(OSError):  # gone, or replaced at this moment
                state = _state_of(path)
                if self._sent.get(name) != state:
                    states[name] = state
        return dict(sorted(states.items(), key=lambda item: (item[0] == LATEST, item[0])))

    def _send(self) -> None:
        """Uploads the files that have changed since they were last sent.

        Raises:
            OSError: a file can't be sent; those before it count as sent. Or another machine trains the same run: then
                each later call raises it too.
        """
        changed = self._changed()
        self._check_owner()
        last = self.folder / ".last"  # training may replace last.ckpt while the others are sent
        if LATEST in changed:
            second_name(self.folder / LATEST, last)
        for name, state in changed.items():
            file = self.folder / name
            if name == LATEST:
                self._check_owner()
                file = last
            try:
                there = put_whole(file, f"{self.run_url}/{name}", self.key)
            except OSError:  # a file that has changed or gone meanwhile is left for the next time
                if file.is_file() and _state_of(file) == state:
                    raise
                continue
            self._sent[name] = state
            if name == LATEST:  # ``last`` is a second name of last.ckpt, whose time this sets
                mark_copy(last, there)
                self._sent[name] = _state_of(last)
                last.unlink()

    def _check_owner(self) -> None:
        """Raises an OSError, now and at each later try, where another machine has begun to train the run."""
        owner = small_file(f"{self.run_url}/{CLAIM}").decode(errors="replace")
        if owner != self.owner:
            self._lost = f"{self.run_url}: another machine trains there; nothing more is sent from {self.folder}"
        if self._lost:
            raise OSError(self._lost)


def _state_of(file: Path) -> tuple[int, int]:
    """Size of a file of this disk in bytes, and the time of its last change in nanoseconds; an OSError without it."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns

"""A run's folder in an object store (``runs_dir=s3://...``): written on this disk, followed by a copy there."""

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kd.errors import UserError, first_line
from kd.storage.control_file import CONTROL, RemoteControl
from kd.storage.objects import file_system, tried
from kd.storage.run_urls import LATEST, Copies, state_of, tag_of

EVERY_S = 5.0  # between two looks for a new checkpoint
WHOLE_S = 300.0  # between two uploads of what grows: records, metrics
LARGE = 32 * 2**20  # bytes; a larger file is sent from the disk, a smaller one from memory
CLAIM = ".claimed"  # in a run's folder in the store: the file that takes the run's name


class Mirror:
    """Follows the folder of a run with a copy in an object store.

    Every process of a run may make one; the first alone calls :meth:`claim` (of a new run) and :meth:`follow`, and
    :meth:`close` at the end. In between a thread uploads. Files that are deleted here stay in the store.

    Args:
        url: of the folder of all runs.
        key: by which the user has given the place, for messages.
        of_kd: whether ``kd-train`` can resume the run.

    Raises:
        UserError: nothing can be written there, or the URL is refused (:func:`kd.storage.objects.file_system`).
    """

    def __init__(self, url: str, key: str, of_kd: bool = True) -> None:
        """Writes and deletes an empty file at ``url``, so that a place that can't be written is refused at the start.

        Arguments as of the class.
        """
        self.of_kd = of_kd
        self.key = key
        self.url = url.rstrip("/")
        self.files, self.root = file_system(self.url, key)
        self.sent_bytes = 0
        self.sent_files = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = ""  # why nothing more is sent
        self._reported: set[str] = set()  # problems, in words
        probe = f"{self.root}/.kd-{socket.gethostname()}-{os.getpid()}"
        try:
            tried(lambda: self.files.pipe_file(probe, b""), "no file can be written there")
            with suppress(Exception):  # who may write may not be allowed to delete
                self.files.rm_file(probe)
        except OSError as error:
            raise UserError(f"{key}: {self.url} can't be written: {first_line(error)}") from error

    def numbers(self, recipe: str) -> list[int]:
        """Numbers of a recipe's runs in the store, unsorted, for the next run to take a larger one; [] without runs.

        Runs that have a name instead of a number are left out. An OSError where the store can't be read.
        """
        self.files.invalidate_cache()
        folder = f"{self.root}/{recipe}"
        try:
            paths = tried(lambda: self.files.ls(folder, detail=False), f"{self.url} can't be read")
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        return [int(name) for name in names if name.isdecimal()]

    def claim(self, recipe: str, name: str) -> None:
        """Takes a run's name, before any other machine does.

        Raises:
            FileExistsError: it is taken.
            OSError: the store can't be written.
        """
        path = f"{self.root}/{recipe}/{name}"
        try:
            if tried(lambda: self.files.find(path), f"{self.url} can't be read"):
                raise FileExistsError(path)
            self.files.pipe_file(f"{path}/{CLAIM}", socket.gethostname().encode(), mode="create")
        except OSError:
            raise
        except Exception as error:  # the object stores' clients raise many kinds
            raise OSError(f"{self.url} can't be written: {first_line(error)}") from error

    def follow(self, folder: Path, *beside: Path) -> None:
        """Starts the thread that uploads, unless it runs already: a second call changes nothing.

        Args:
            folder: of the run, ``RECIPE/NAME``: these two name it in the store.
            beside: files next to it that belong to it, sent once (a job's marker).
        """
        if self._thread is not None:
            return
        self.folder = folder
        self.beside = beside
        self.place = f"{folder.parent.name}/{folder.name}"
        self._copies = Copies(folder, f"{self.url}/{self.place}")
        self._copies.save()
        self._control = RemoteControl(self.files, f"{self.root}/{self.place}", folder)
        self._pointed = False
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
            self._send(self._files())
        except Exception as error:  # the object stores' clients raise many kinds
            left = f"{self._copies.url} lacks the last files: {first_line(error)}"
            more = ""
            if self.of_kd and not self._lost:
                more = f"; kd-train resume={self.folder} sends them"
            print(f"{self.key}: {left}{more}", file=sys.stderr)
            return False
        sent = f"{self.sent_files} files, {self.sent_bytes / 1e6:.1f} MB"
        resume = ""
        if self.of_kd:
            resume = f"; kd-train resume={self._copies.url}"
        print(f"uploaded: {self._copies.url} ({sent}){resume}", flush=True)
        return True

    def _run(self) -> None:
        """The thread: sends all that has changed when there is a new checkpoint, else every :data:`WHOLE_S` seconds.

        Each :data:`EVERY_S` seconds it looks for one, and for commands in the store (:class:`RemoteControl`).
        """
        # the first time at once: who asks for the run from outside finds its settings
        sent_at = -math.inf
        while not self._end.wait(EVERY_S):
            # the thread must survive both; commands that can't be read hold no upload up
            try:
                self._control.look()
            except Exception as error:
                self._warn(error, "the commands in it are not followed")
            try:
                files = self._files()
                changed = self._changed(files)
                new = any(Path(name).parent.name == "checkpoints" for name in changed)
                if new or time.monotonic() > sent_at + WHOLE_S:
                    sent_at = time.monotonic()
                    self._send(files)
            except Exception as error:
                self._warn(error, "" if self._lost else "the upload is tried again")

    def _warn(self, error: Exception, then: str) -> None:
        """Reports each problem once.

        Args:
            error: what went wrong.
            then: what follows from it; "" where the error says so.
        """
        problem = first_line(error)
        if problem in self._reported:
            return
        self._reported.add(problem)
        command = "kd-train" if self.of_kd else "kd.Monitor"
        consequence = f"; {then}" if then else ""
        print(f"{command}: warning: {problem}{consequence}", file=sys.stderr)

    def _files(self) -> dict[str, Path]:
        """The run's files by name, in the order in which they are sent; without links, hidden files, unfinished ones
        (``.part``) and the file ``monitor``, which comes from the store.

        A checkpoint that others replace comes before the one that replaces it, and last.ckpt after the records of its
        steps: a machine that resumes cuts what is newer but can't make what is missing.
        """
        from_store = self.folder / CONTROL
        files = {}
        for path in self.folder.rglob("*"):
            is_unfinished = path.name.startswith(".") or path.name.endswith(".part")
            if path == from_store or is_unfinished:
                continue
            if path.is_file() and not path.is_symlink():
                name = path.relative_to(self.folder).as_posix()
                files[name] = path

        def order(name: str) -> tuple[bool, bool, str]:
            """A file's place: the previous checkpoint first, the newest last, the others by name between them."""
            is_last = name == LATEST
            is_previous = name.startswith("checkpoints/previous")
            return is_last, not is_previous, name

        return {name: files[name] for name in sorted(files, key=order)}

    def _changed(self, files: Mapping[str, Path]) -> list[str]:
        """Names of files that the store lacks, or has in another state, by the notes, without a request.

        Args:
            files: by name, as of :meth:`_files`, whose order is kept.
        """
        changed = []
        for name in files:
            with suppress(OSError):  # gone, or replaced at this moment
                if name not in self._copies.known or self._copies.changed_here(name):
                    changed.append(name)
        return changed

    def _send(self, files: Mapping[str, Path]) -> None:
        """Uploads the files that have changed since they were last sent; once, it also writes ``latest`` and the files
        beside.

        Args:
            files: by the name that they have below the run in the store, as of :meth:`_files`.

        Raises:
            OSError: a file can't be sent; those before it count as sent. Or another machine trains the same run: then
                each later call raises it too.
        """
        if self._lost:
            raise OSError(self._lost)
        if not self._pointed:  # once: of two runs at the same time, the newer one is the latest
            recipe = self.folder.parent.name
            self._write(f"{recipe}/latest", f"{self.folder.name}\n".encode())
            for file in self.beside:
                if file.is_file():
                    self._write(f"{recipe}/{file.name}", file.read_bytes())
            self._pointed = True
        changed = self._changed(files)
        if changed:
            self._check_ours()
        linked = self.folder / ".last"  # training may replace last.ckpt while the others are sent
        if LATEST in changed:
            _link(files[LATEST], linked)
        for name in changed:
            of_link = name == LATEST and linked.exists()
            self._upload(linked if of_link else files[name], name)
        linked.unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        """Writes ``data`` to the file ``name`` below the store's root, with retries."""
        tried(
            lambda: self.files.pipe_file(f"{self.root}/{name}", data),
            f"{self.url}: {name} can't be written",
        )

    def _upload(self, file: Path, name: str) -> None:
        """Sends one file, whole; one that changes meanwhile is left for the next time.

        What the store has under another name (the last checkpoint before this one) is copied there. The size of what is
        sent is noted beforehand, so that an upload which was killed still counts as this machine's; the file counts as
        sent once the store has as many bytes.

        Raises:
            OSError: it has not, though the file is unchanged here, or gone; or the store can't be reached.
        """
        path = f"{self.root}/{self.place}/{name}"
        try:
            if name == LATEST:
                self._check_ours()
            state = state_of(file)
            twin = self._twin(name, state)
            if twin:
                tried(
                    lambda: self.files.cp_file(twin, path), f"{self.url}: {name} can't be written"
                )
            elif state[0] > LARGE:
                state = self._put(file, path, name)
            else:
                data = file.read_bytes()
                state[0] = len(data)
                self._copies.sending(name, state)
                self._write(f"{self.place}/{name}", data)
        except FileNotFoundError:  # gone from this disk, or the bucket is
            if file.exists():
                raise
            return
        size = state[0]
        in_store = self._info(path, name)
        if in_store is not None and int(in_store["size"]) == size:
            self._copies.note(name, state, in_store)
            self.sent_bytes += size
            self.sent_files += 1
        elif not file.is_file() or state_of(file) == state:
            size_there = None
            if in_store is not None:
                size_there = in_store["size"]
            raise OSError(f"{self.url}: {name} has {size_there} bytes there, {size} here")

    def _check_ours(self) -> None:
        """Raises an OSError, now and at each later try, where another machine has written the last checkpoint."""
        copies = self._copies
        if LATEST not in copies.known:
            return
        in_store = self._info(f"{self.root}/{self.place}/{LATEST}", LATEST)
        if in_store is not None and not copies.is_ours(LATEST, in_store):
            self._lost = f"{self._copies.url}: another machine trains there; nothing more is sent from {self.folder}"
            raise OSError(self._lost)

    def _info(self, path: str, name: str) -> Mapping[str, Any] | None:
        """What the store says of the file at ``path`` now, as fsspec has it; None where it has none.

        ``name``: of the file, for messages.
        """
        self.files.invalidate_cache()
        with suppress(FileNotFoundError):
            return dict(
                tried(lambda: self.files.info(path), f"{self.url}: {name} can't be read back")
            )
        return None

    def _put(self, file: Path, path: str, name: str) -> list[int]:
        """Sends a large file from the disk, by a second name: the first may come to mean another file meanwhile.

        Args:
            file: on this disk.
            path: of it in the store.
            name: of it in the run's folder.

        Returns:
            The state of what was sent (:func:`kd.storage.run_urls.state_of`).
        """
        second = self.folder / ".uploading"
        source = file
        if _link(file, second):
            source = second
        try:
            state = state_of(source)
            self._copies.sending(name, state)
            tried(
                lambda: self.files.put_file(str(source), path),
                f"{self.url}: {name} can't be written",
            )
        finally:
            second.unlink(missing_ok=True)
        return state

    def _twin(self, name: str, state: list[int]) -> str:
        """Path in the store of a checkpoint that is this file under another name, "" without one: the last one becomes
        the previous one.

        Args:
            name: of the file in the run's folder.
            state: of it now; equal size and time of change mean an equal file.
        """
        for other, known in self._copies.known.items():
            is_checkpoint = other != name and "ckpt" in other
            if is_checkpoint and known.get("here") == state:
                path = f"{self.root}/{self.place}/{other}"
                in_store = self._info(path, other)
                # somebody may have deleted or replaced it there
                if in_store is not None and tag_of(in_store) == known.get("there"):
                    return path
        return ""


def _link(file: Path, name: Path) -> bool:
    """Gives a file a second name on the same disk, in place of what had it; False without hard links.

    Raises:
        FileNotFoundError: the file is gone.
    """
    name.unlink(missing_ok=True)
    try:
        os.link(file, name)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True

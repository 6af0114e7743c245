"""A run's folder in an object store (``runs_dir=s3://...``): written on this disk, followed by a copy there."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from kd.checkpoints import run_folder, write_whole
from kd.errors import UserError, first_line
from kd.machine import cache_dir
from kd.object_store import file_system, is_url, tried

EVERY_S = 5.0  # between two looks for a new checkpoint
WHOLE_S = 300.0  # between two uploads of what grows: records, metrics
LARGE = 32 * 2**20  # bytes; a larger file is sent from the disk, a smaller one from memory
CLAIM, KEPT = ".claimed", ".uploaded.json"


def on_disk(place: str) -> Path:
    """Where ``runs_dir`` or a run's folder lies on this machine: a URL has its folder in the cache.

    >>> on_disk("runs/food").as_posix()
    'runs/food'
    """
    return cache_dir() / "runs" / place.rstrip("/").replace("://", "/") if is_url(place) else Path(place)


def run_at(place: str) -> Path:
    """A run's folder as the commands take it: a folder, a recipe's ``latest``, or either by URL, fetched first."""
    return fetched_run(place, "run", checkpoints=False) if is_url(place) else run_folder(Path(place))


def folder_of_runs(place: str, command: str) -> Path:
    """``runs_dir`` of a command that writes many runs side by side.

    Raises:
        UserError: it is a URL.
    """
    if is_url(place):
        raise UserError(f"runs_dir: {command} writes to a folder of this machine, got {place}")
    return Path(place)


def fetched_marker(place: str, marker: Path) -> None:
    """Brings the file by which a restarted job finds its run, and that run, to this machine.

    Args:
        place: ``runs_dir``; nothing happens where it is a folder.
        marker: the file here.
    """
    if not is_url(place):
        return
    recipe = f"{place.rstrip('/')}/{marker.parent.name}"
    files, path = file_system(recipe, "runs_dir")
    with suppress(FileNotFoundError):
        name = tried(lambda: files.cat_file(f"{path}/{marker.name}"), f"{recipe} can't be read").decode()
        fetched_run(f"{recipe}/{name.strip()}", "runs_dir")
        marker.write_text(name, encoding="utf-8")


def fetched_run(url: str, key: str = "resume", checkpoints: bool = True) -> Path:
    """The folder of a run in an object store, on this machine's disk.

    A file that is here and has not changed there stays: it may be newer, where an upload was cut.

    Args:
        url: of the folder, or of its recipe's ``latest``.
        key: that named it, for messages.
        checkpoints: fetch these, too.

    Raises:
        UserError: it is not there, or can't be fetched.
    """
    url = url.rstrip("/")
    try:
        files, path = file_system(url, key)
        if url.endswith("/latest"):
            name = tried(lambda: files.cat_file(path), f"{url} can't be read").decode().strip()
            url, path = (f"{of.removesuffix('latest')}{name}" for of in (url, path))
        there = tried(lambda: files.find(path, detail=True), f"{url} can't be read")
        if f"{path}/config.yaml" not in there:
            raise UserError(f"{key}: there is no run {url}")
        folder = on_disk(url)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".fetching"):  # one of all processes fetches
            copy = _Copies(folder)
            for name, found in ((full.removeprefix(f"{path}/"), found) for full, found in there.items()):
                wanted = not Path(name).name.startswith(".") and (checkpoints or not name.startswith("checkpoints/"))
                if wanted and copy.is_stale(name, found):
                    _fetch(files.get_file, f"{path}/{name}", folder / name, int(found["size"]))
                    copy.note(name, _state(folder / name), found)
            copy.save()
        return folder
    except FileNotFoundError as error:
        raise UserError(f"{key}: there is no run {url}") from error
    except OSError as error:
        raise UserError(f"{key}: {url} can't be fetched: {first_line(error)}") from error


def _fetch(get: Callable[[str, str], object], path: str, file: Path, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")

    def attempt() -> None:
        get(path, str(part))
        if part.stat().st_size != size:
            raise OSError(f"{part.stat().st_size} bytes of {path} came, it has {size}")

    tried(attempt, f"{path} can't be fetched")
    part.replace(file)


def _state(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def _tag(found: dict[str, Any]) -> str:
    """What changes when a file in the store does."""
    return " ".join(str(found.get(name)) for name in ("size", "ETag", "LastModified", "mtime", "created"))


class _Copies:
    """What is known of both sides: each file's state here, and its tag there, when they were the same."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, dict[str, dict[str, Any]]()
        with suppress(OSError, ValueError):
            self.known = json.loads((folder / KEPT).read_text(encoding="utf-8"))

    def is_stale(self, name: str, found: dict[str, Any]) -> bool:
        """Whether the store has another file than the one that was here at the last look."""
        return not (self.folder / name).is_file() or self.known.get(name, {}).get("there") != _tag(found)

    def has_changed(self, name: str, state: list[int]) -> bool:
        """Whether the file here is another than the one in the store."""
        return bool(self.known.get(name, {}).get("here") != state)

    def note(self, name: str, state: list[int], found: dict[str, Any]) -> None:
        """Both sides have the same."""
        self.known[name] = {"here": state, "there": _tag(found)}

    def save(self) -> None:
        """For the next process."""
        write_whole(self.folder / KEPT, lambda file: file.write(json.dumps(self.known).encode()))


class Mirror:
    """Follows the folder of a run with a copy in an object store.

    A thread sends each new checkpoint, and now and then what grows; nothing in training waits for it. What fails is
    tried again, and then with the next checkpoint. Only the job's first process has one.

    Args:
        url: ``runs_dir``.

    Raises:
        UserError: nothing can be written there.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.files, self.root = file_system(self.url, "runs_dir")
        self.sent_bytes, self.sent_files = 0, 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        probe = f"{self.root}/.kd-{socket.gethostname()}-{os.getpid()}"
        try:
            tried(lambda: self.files.pipe_file(probe, b""), "no file can be written there")
            self.files.rm_file(probe)
        except OSError as error:
            raise UserError(f"runs_dir: {self.url} can't be written: {first_line(error)}") from error

    def numbers(self, recipe: str) -> list[int]:
        """Of the runs that are there."""
        try:
            found = tried(lambda: self.files.ls(f"{self.root}/{recipe}", detail=False, refresh=True), self.url)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in found]
        return [int(name) for name in names if name.isdigit()]

    def claim(self, recipe: str, name: str) -> None:
        """Takes a run's name, before any other machine does.

        Raises:
            FileExistsError: it is taken.
        """
        path = f"{self.root}/{recipe}/{name}/{CLAIM}"
        if self.files.exists(f"{self.root}/{recipe}/{name}"):
            raise FileExistsError(path)
        self.files.pipe_file(path, socket.gethostname().encode(), mode="create")

    def follow(self, folder: Path, *beside: Path) -> None:
        """Begins.

        Args:
            folder: of the run.
            beside: files next to it that belong to it.
        """
        self.folder, self.beside = folder, beside
        self.place = f"{folder.parent.name}/{folder.name}"
        self._copies = _Copies(folder)
        self._thread = threading.Thread(target=self._run, name="kd-mirror", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Sends what is left, and says so; False where that failed. Nothing happens where nothing was followed."""
        if self._thread is None:
            return True
        self._end.set()
        self._thread.join()
        there = f"{self.url}/{self.place}"
        try:
            self._send(self._files())
        except OSError as error:
            left = f"{there} lacks the last files: {first_line(error)}"
            print(f"runs_dir: {left}; kd-train resume={self.folder} sends them", file=sys.stderr)
            return False
        print(f"uploaded: {there} ({self.sent_files} files, {self.sent_bytes / 1e6:.1f} MB)", flush=True)
        return True

    def _run(self) -> None:
        whole_at = time.monotonic()
        while not self._end.wait(EVERY_S):
            whole = time.monotonic() > whole_at + WHOLE_S
            found = self._files()
            new = any(Path(name).parent.name == "checkpoints" for name in self._changed(found))
            if not (whole or new):
                continue
            try:
                self._send(found)
            except OSError as error:
                print(f"kd-train: warning: {first_line(error)}; the next checkpoint is tried again", file=sys.stderr)
            whole_at = time.monotonic()

    def _files(self) -> dict[str, Path]:
        """All that belongs there, by name; a checkpoint that others replace comes before the one that replaces it."""
        inside = (p for p in self.folder.rglob("*") if p.is_file() and not p.is_symlink())
        found = {p.relative_to(self.folder).as_posix(): p for p in inside if not _is_passing(p)}
        first = sorted(found, key=lambda name: (not name.startswith("checkpoints/previous"), name))
        return {name: found[name] for name in first}

    def _changed(self, found: dict[str, Path]) -> list[str]:
        changed = []
        for name, file in found.items():
            with suppress(OSError):  # gone, or replaced at this moment
                if self._copies.has_changed(name, _state(file)):
                    changed.append(name)
        return changed

    def _send(self, found: dict[str, Path]) -> None:
        for name in self._changed(found):
            self._upload(found[name], name)
        for name in self._copies.known.keys() - found.keys():
            with suppress(OSError):
                self.files.rm_file(f"{self.root}/{self.place}/{name}")
            del self._copies.known[name]
        self._copies.save()
        recipe = f"{self.root}/{self.folder.parent.name}"
        tried(lambda: self.files.pipe_file(f"{recipe}/latest", f"{self.folder.name}\n".encode()), self.url)
        for file in self.beside:
            if file.is_file():
                tried(partial(self.files.pipe_file, f"{recipe}/{file.name}", file.read_bytes()), self.url)

    def _upload(self, file: Path, name: str) -> None:
        """One file, whole; one that changes meanwhile is left for the next time."""
        path = f"{self.root}/{self.place}/{name}"
        try:
            state = _state(file)
            twin = self._twin(name, state)
            if twin:
                tried(lambda: self.files.cp_file(twin, path), f"{self.url}: {name} can't be written")
            elif state[0] > LARGE:
                kept = self.folder / ".uploading"  # a second name: the first may come to mean another file
                kept.unlink(missing_ok=True)
                os.link(file, kept)
                state = _state(kept)
                tried(lambda: self.files.put_file(str(kept), path), f"{self.url}: {name} can't be written")
                kept.unlink()
            else:
                data = file.read_bytes()
                state[0] = len(data)
                tried(lambda: self.files.pipe_file(path, data), f"{self.url}: {name} can't be written")
        except FileNotFoundError:  # gone from this disk, or the bucket is
            if file.exists():
                raise
            return
        self.files.invalidate_cache()
        there = tried(lambda: self.files.info(path), f"{self.url}: {name} can't be read back")
        if int(there["size"]) != state[0]:
            raise OSError(f"{self.url}: {name} has {there['size']} bytes there, {state[0]} here")
        self._copies.note(name, state, there)
        self.sent_bytes, self.sent_files = self.sent_bytes + state[0], self.sent_files + 1

    def _twin(self, name: str, state: list[int]) -> str:
        """What the store has already, under another name: the checkpoint that was the last one is the previous now."""
        same = (n for n, k in self._copies.known.items() if n != name and "ckpt" in n and k["here"] == state)
        return next((f"{self.root}/{self.place}/{n}" for n in same), "")


def _is_passing(file: Path) -> bool:
    """Locks, and what is being written."""
    return file.name.startswith(".") or file.name.endswith(".part")

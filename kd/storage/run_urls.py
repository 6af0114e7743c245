"""The folders of runs in an object store, and where they lie on this machine's disk."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from kd.errors import UserError, first_line
from kd.machine import cache_dir
from kd.storage.checkpoints import LAST, PREVIOUS, holder_of, run_folder
from kd.storage.elsewhere import (
    LARGEST_LOG,
    LARGEST_WEIGHTS,
    inside,
    json_of,
    plain_name,
    text_of,
    too_large,
)
from kd.storage.objects import fetch_whole, file_system, is_url, small_file, tried
from kd.storage.weights_files import FILES
from kd.storage.writing import guard, make_folder, write_text

LONGEST_NAME = 1000  # bytes of a file that names a run
MOST_FILES = 100_000  # of a run in a store
# endings of a run's large files
WEIGHTS = (".ckpt", ".safetensors", ".pt2", ".onnx", ".data", ".bin", ".gz", ".npz")
KEPT, LATEST = ".uploaded.json", f"checkpoints/{LAST}"
TAGS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "created")
"""Names under which object stores keep what changes with a file's content; the first that is there counts."""


def on_disk(place: str, key: str) -> Path:
    """Where ``runs_dir`` or a run's folder lies on this machine: a URL has its folder in the cache.

    Args:
        place: a folder, or a URL.
        key: by which the user has given it, for the message.

    Raises:
        UserError: a URL that leads out of the cache.
    """
    if not is_url(place):
        return Path(place)
    return inside(cache_dir() / "runs", place.rstrip("/").replace("://", "/"), key)


def run_at(place: str) -> Path:
    """A run's folder as the commands take it: a folder, a recipe's ``latest``, or either by URL, fetched first."""
    if is_url(place):
        folder = fetched_run(place, "run", checkpoints=False)
    else:
        folder = run_folder(Path(place))
    if folder.is_dir():
        return guard(folder)
    return folder


def names_run(word: str) -> bool:
    """Whether a word of the command line names a run, and not a bare weights file or a folder of timm's."""
    path = run_at(word)
    is_weights = path.suffix in FILES and not path.is_dir()
    return not (path.is_file() or is_weights or (path / "config.json").is_file())


def finished_at(place: str, *needed: str) -> Path:
    """A finished run's folder: one with a student and the files that are needed of it.

    Raises:
        UserError: no such folder, or a file is missing.
    """
    folder = run_at(place)
    if not folder.exists():
        raise UserError(f"run folder {folder} not found (kd-runs lists the runs)")
    for name in (*needed, "student.safetensors"):
        if (folder / name).is_file():
            continue
        several = sorted(path.parent.name for path in folder.glob("students/*/student.safetensors"))
        if several:
            raise UserError(
                f"{folder} holds several students: name one, {folder}/students/{several[0]}"
            )
        raise UserError(f"{folder} is no finished run: it has no {name}{latest_hint(folder)}")
    return folder


def latest_hint(folder: Path) -> str:
    """The end of a message about a folder of runs that was named as a run: its latest finished run; "" without one."""
    students = [
        file
        for pattern in ("*/student.safetensors", "*/*/student.safetensors")
        for file in folder.glob(pattern)
        if not (file.parent.is_symlink() or file.parent.parent.is_symlink())
    ]
    if not students:
        return ""
    latest = max(students, key=lambda file: (file.stat().st_mtime, str(file)))
    return f"; the latest finished run in it is {latest.parent}"


def folder_of_runs(place: str, command: str) -> Path:
    """``runs_dir`` of a command that writes many runs side by side.

    Raises:
        UserError: it is a URL.
    """
    if is_url(place):
        raise UserError(f"runs_dir: {command} writes to a folder of this machine, got {place}")
    return Path(place)


def url_of(folder: Path) -> str:
    """Where the store has a run's folder; empty where it has none."""
    return Copies(folder).url


def fetched_marker(place: str, marker: Path, together: bool) -> None:
    """Fetches the marker by which a restarted job finds its run, and that run; nothing for a ``runs_dir`` on disk."""
    if not is_url(place):
        return
    recipe = f"{place.rstrip('/')}/{marker.parent.name}"
    files, path = file_system(recipe, "runs_dir")
    try:
        content = small_file(
            files, f"{path}/{marker.name}", f"{recipe} can't be read", LONGEST_NAME
        )
        name = _name_in(content, recipe)
        config = f"{path}/{name}/config.yaml"
        in_store = tried(lambda: files.exists(config), f"{recipe} can't be read")
    except FileNotFoundError:
        in_store = False
    except OSError as error:
        raise UserError(f"runs_dir: {first_line(error)}") from error
    if in_store:
        fetched_run(f"{recipe}/{name}", "runs_dir", together=together)
        write_text(marker, name + "\n")
    elif together:
        marker.unlink(missing_ok=True)


def fetched_run(url: str, key: str, checkpoints: bool = True, together: bool = False) -> Path:
    """The local folder of a run in an object store; what continued here after its last upload stays.

    Args:
        url: of the run, or of ``latest`` beside it.
        key: by which the user has given it, for messages.
        checkpoints: whether these are fetched too.
        together: whether several machines resume the run (:func:`_fetch_all`).

    Raises:
        UserError: no such run, or it can't be fetched.
    """
    url = url.rstrip("/")
    try:
        files, path = file_system(url, key)
        files.invalidate_cache()
        if url.endswith("/latest"):
            content = small_file(files, path, f"{url} can't be read", LONGEST_NAME)
            name = _name_in(content, f"{key}: {url}")
            url, path = (f"{of.removesuffix('latest')}{name}" for of in (url, path))
        folder = on_disk(url, key)
        if folder.is_dir() and holder_of(folder):  # it is trained here: nothing there is newer
            return folder
        if not tried(lambda: files.exists(f"{path}/config.yaml"), f"{url} can't be read"):
            if (folder / "config.yaml").is_file() and not together:  # nothing of it was sent yet
                return folder
            raise UserError(f"{key}: run {url} not found")
        make_folder(guard(folder))
        with FileLock(folder / ".fetching"):  # one of all processes fetches
            infos = tried(lambda: files.find(path, detail=True), f"{url} can't be read")
            in_store = {full.removeprefix(f"{path}/"): info for full, info in infos.items()}
            copies = Copies(folder, url)
            _fetch_all(files.get_file, path, in_store, copies, key, checkpoints, together)
        return folder
    except FileNotFoundError as error:
        raise UserError(f"{key}: run {url} not found") from error
    except OSError as error:
        raise UserError(f"{key}: {url} can't be fetched: {first_line(error)}") from error


def _name_in(content: bytes, where: str) -> str:
    return plain_name(content.decode(errors="replace").strip(), where)


def _fetch_all(
    get: Callable[[str, str], object],
    path: str,
    in_store: Mapping[str, Mapping[str, Any]],
    copies: "Copies",
    key: str,
    checkpoints: bool,
    together: bool,
) -> None:
    """Fetches the files of a run that the store has in another state.

    Args:
        get: the store's own way, ``get_file`` of its file system.
        path: of the run there.
        in_store: what the store says of each file, by name.
        copies: what is known of both sides.
        key: the setting, for messages.
        checkpoints: fetch these, too.
        together: several machines resume the run: what one of them has alone does not count.
    """
    if together and checkpoints:
        for name in {LATEST, f"checkpoints/{PREVIOUS}"} - in_store.keys():
            (copies.folder / name).unlink(missing_ok=True)
    continued_here = checkpoints and not together and copies.changed_here(LATEST)
    if continued_here and LATEST in in_store and not copies.is_ours(LATEST, in_store[LATEST]):
        raise UserError(
            f"{key}: the run has continued both in {copies.folder} and, from another machine, in "
            f"{copies.url}; remove the folder to resume from there"
        )
    _check_sizes(in_store, copies, key)
    for name, info in in_store.items():
        file = inside(copies.folder, name, key)
        if file.name.startswith(".") or (name.startswith("checkpoints/") and not checkpoints):
            continue
        changed = copies.changed_here(name)
        if continued_here and changed:  # newer than the store's
            continue
        if copies.differ(name, info) or (together and changed):
            make_folder(file.parent)
            fetch_whole(get, f"{path}/{name}", file, int(info["size"]))
            copies.note(name, state_of(file), info)


def _check_sizes(in_store: Mapping[str, Mapping[str, Any]], copies: "Copies", key: str) -> None:
    """Raises a UserError for a run that no run is like: files that are too large to be read, or more than fit here."""
    if len(in_store) > MOST_FILES:
        raise UserError(
            f"{key}: {copies.url} has {len(in_store):,} files, at most {MOST_FILES:,} are fetched"
        )
    missing = 0  # bytes
    for name, info in in_store.items():
        size = int(info["size"])
        largest = LARGEST_LOG
        if Path(name).suffix in WEIGHTS:
            largest = LARGEST_WEIGHTS
        if size > largest:
            raise UserError(f"{key}: {too_large(f'{copies.url}/{name}', size, largest)}")
        if copies.differ(name, info):
            missing += size
    free = shutil.disk_usage(copies.folder).free
    if missing > free:
        raise UserError(
            f"{key}: {copies.url} has {missing / 1e6:,.0f} MB to fetch, {copies.folder} has room for "
            f"{free / 1e6:,.0f} MB"
        )


def state_of(file: Path) -> list[int]:
    """What changes when a file on this disk does: its size, and the time of its last change."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def tag_of(info: Mapping[str, Any]) -> str:
    """What changes with a file in the store; times in whole seconds, as stores give more digits at some times."""
    name = next((name for name in TAGS if info.get(name)), "")
    value = info.get(name, "")
    if hasattr(value, "timestamp"):
        value = value.timestamp()
    if isinstance(value, float):
        value = int(value)
    return f"{info['size']} {name} {value}"


class Copies:
    """What is known of both sides: each file's state here, and its tag there, when they were the same.

    Args:
        folder: of the run here.
        url: of the run there; what is known of another place counts for nothing. Empty: the place that is known.
    """

    def __init__(self, folder: Path, url: str = "") -> None:
        """Reads which files of a run were fetched, from its folder; damaged notes count as none.

        Args:
            folder: of the run on this disk.
            url: of the run in the store; "": as the notes name it.
        """
        self.folder = folder
        self.url = url
        self.known: dict[str, dict[str, Any]] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved = json_of(text_of(folder / KEPT))
            saved_url = saved["url"]
            saved_files = saved["files"]
            if url in ("", saved_url):
                self.url = saved_url
                self.known = saved_files

    def sending(self, name: str, state: list[int]) -> None:
        """A file is on its way: a kill before its end is known must not make it another machine's."""
        known = self.known.setdefault(name, {"here": None, "there": ""})
        known["sending"] = state[0]
        self.save()

    def is_ours(self, name: str, info: Mapping[str, Any]) -> bool:
        """Whether this machine has sent the file that the store has, or was sending it."""
        known = self.known.get(name, {})
        if known.get("there") == tag_of(info):
            return True
        size = int(info["size"])
        return known.get("sending") == size

    def differ(self, name: str, info: Mapping[str, Any]) -> bool:
        """Whether the file is missing here, or the store has another one than was last seen there."""
        if not (self.folder / name).is_file():
            return True
        last_seen = self.known.get(name, {}).get("there")
        return last_seen != tag_of(info)

    def changed_here(self, name: str) -> bool:
        """Whether the file here is another than the one that was the same as the store's."""
        file = self.folder / name
        return name in self.known and file.is_file() and self.known[name]["here"] != state_of(file)

    def note(self, name: str, state: list[int], info: Mapping[str, Any]) -> None:
        """Both sides have the same; kept at once: a newer file must not be taken for the one that was sent."""
        self.known[name] = {"here": state, "there": tag_of(info)}
        self.save()

    def save(self) -> None:
        """Writes, in the run's folder, where its copy is and what is known of each file."""
        write_text(self.folder / KEPT, json.dumps({"url": self.url, "files": self.known}))

"""The folders of runs in an object store, and where they lie on this machine's disk."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
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
    mapping_in,
    mapping_of,
    plain_name,
    text_in,
    too_large,
)
from kd.storage.objects import (
    LONGEST_NAME,
    fetch_whole,
    file_system,
    is_url,
    small_file,
    state_of_object,
    tried,
    url_of_run,
)
from kd.storage.weights_files import FILES
from kd.storage.writing import guard, make_folder, write_text

MOST_FILES = 100_000  # of a run in a store
# endings of a run's large files
WEIGHTS = (".ckpt", ".safetensors", ".pt2", ".onnx", ".data", ".bin", ".gz", ".npz")
RUN_FILES = ("config.yaml", "summary.json", "student.safetensors")
"""Files of which a run's folder has one at least."""
KEPT, LATEST = ".uploaded.json", f"checkpoints/{LAST}"


def on_disk(place: str, key: str) -> Path:
    """Where ``runs_dir`` or a run's folder lies on this machine: a URL has its folder in the cache.

    Args:
        place: a folder, or a URL.
        key: by which the user has given it, for the message.

    Raises:
        UserError: a URL that leads out of the cache. Nothing is fetched or made.
    """
    if not is_url(place):
        return Path(place)
    return inside(cache_dir() / "runs", place.rstrip("/").replace("://", "/"), key)


def folder_of_recipe(runs_dir: str | Path, recipe: str) -> Path:
    """Where the runs of a recipe lie on this machine: ``runs_dir/RECIPE``; of a URL that folder is in the cache.

    Args:
        runs_dir: the setting, a folder or a URL.
        recipe: name of the recipe.

    Raises:
        UserError: a URL that leads out of the cache. Nothing is fetched or made.
    """
    return on_disk(str(runs_dir), "runs_dir") / recipe


def run_at(place: str) -> Path:
    """A run's folder as the commands take it: a folder, a recipe's ``latest``, or either by URL, fetched first.

    By URL all but its checkpoints is fetched, each time what has changed. The folder is guarded
    (:func:`kd.storage.writing.guard`); one that is no run's, or does not exist, is returned all the same.

    Raises:
        UserError: a URL of no run, or one that can't be fetched.
    """
    if is_url(place):
        folder = fetched_run(place, "run", checkpoints=False)
    else:
        folder = run_folder(Path(place))
    # a folder of pictures is no run: what its links lead to is the user's
    if any(os.path.lexists(folder / name) for name in RUN_FILES):
        return guard(folder)
    return folder


def names_run(word: str) -> bool:
    """Whether a word of the command line names a run, and not a bare weights file or a folder of timm's.

    What does not exist counts as a run unless its name ends like a weights file's. A URL always names a run, which is
    fetched (:func:`run_at`, whose errors it raises).
    """
    path = run_at(word)
    is_weights = path.suffix in FILES and not path.is_dir()
    return not (path.is_file() or is_weights or (path / "config.json").is_file())


def finished_at(place: str, *needed: str) -> Path:
    """A finished run's folder: one with a student and the files that are needed of it.

    Args:
        place: as of :func:`run_at`.
        needed: names of files that the caller reads, beside ``student.safetensors``.

    Raises:
        UserError: no such folder, or a file is missing.
    """
    folder = run_at(place)
    if not folder.exists():
        raise UserError(f"run folder {folder} not found (kd-runs lists the runs)")
    for name in (*needed, "student.safetensors"):
        if not (folder / name).is_file():
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
    """``runs_dir`` of a command that takes no URL (``kd-tune``, ``kd-size``, ``kd-scale``, ``kd-launch``), as a path.

    Args:
        place: the setting.
        command: its name, for the message.

    Raises:
        UserError: it is a URL.
    """
    if is_url(place):
        raise UserError(f"runs_dir: {command} writes to a folder of this machine, got {place}")
    return Path(place)


def url_of(folder: Path) -> str:
    """URL of the copy of a run's folder, by the notes in the folder (:class:`Copies`); "" for a run without a copy."""
    return Copies(folder).url


def fetched_marker(place: str, marker: Path, together: bool) -> None:
    """Fetches the marker by which a restarted job finds its run, and that run; nothing for a ``runs_dir`` on disk.

    Every process of the job calls it.

    Args:
        place: ``runs_dir``.
        marker: the file on this disk, in the recipe's folder; it holds the name of a run's folder beside it.
        together: whether several machines resume the run: then a marker that the store does not have, or whose run it
            does not have, is deleted here, so that all of them begin a new run.

    Raises:
        UserError: the store can't be read, or the marker holds no name of a folder.
    """
    if not is_url(place):
        return
    recipe = f"{place.rstrip('/')}/{marker.parent.name}"
    files, path = file_system(recipe, "runs_dir")
    try:
        content = small_file(
            files, f"{path}/{marker.name}", f"{recipe} can't be read", LONGEST_NAME
        )
        name = plain_name(content.decode(errors="replace").strip(), recipe)
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

    Returns:
        The folder, below the cache folder. As it is, without a look at the files in the store, where the run is being
        trained here, or where the store has nothing of it yet (not ``together``).

    Raises:
        UserError: no such run, or it can't be fetched.
    """
    url = url_of_run(url, key)
    try:
        files, path = file_system(url, key)
        files.invalidate_cache()
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
        copies: what is known of both sides; noted anew after each file.
        key: the setting, for messages.
        checkpoints: fetch these, too. Hidden files are never fetched.
        together: several machines resume the run: what one of them has alone does not count. Checkpoints that the
            store lacks are deleted here, files that have changed here are fetched again.

    Raises:
        UserError: the run has continued here and from another machine, or no run is like it: too many files, one that is
            too large to be read, or more bytes than this disk has room for.
        OSError: a file can't be fetched.
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
    if len(in_store) > MOST_FILES:
        raise UserError(
            f"{key}: {copies.url} has {len(in_store):,} files, at most {MOST_FILES:,} are fetched"
        )
    sizes: dict[str, int] = {}  # of the files to fetch, in bytes
    for name, info in in_store.items():
        is_checkpoint = name.startswith("checkpoints/")
        if name.rpartition("/")[2].startswith(".") or (is_checkpoint and not checkpoints):
            continue
        changed = copies.changed_here(name)
        if not (continued_here and changed) and (
            copies.differ(name, info) or (together and changed)
        ):
            sizes[name] = int(info["size"])
            largest = LARGEST_WEIGHTS if Path(name).suffix in WEIGHTS else LARGEST_LOG
            if sizes[name] > largest:
                raise UserError(f"{key}: {too_large(f'{copies.url}/{name}', sizes[name], largest)}")
    free = shutil.disk_usage(copies.folder).free
    missing = sum(sizes.values())
    if missing > free:
        raise UserError(
            f"{key}: {copies.url} has {missing / 1e6:,.0f} MB to fetch, {copies.folder} has room for "
            f"{free / 1e6:,.0f} MB"
        )
    for name, size in sizes.items():
        file = inside(copies.folder, name, key)
        make_folder(file.parent)
        fetch_whole(get, f"{path}/{name}", file, size)
        copies.note(name, state_of(file), in_store[name])


def state_of(file: Path) -> list[int]:
    """What changes when a file on this disk does: its size in bytes, and the time of its last change in nanoseconds."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


class Copies:
    """What is known of both sides: each file's state here, and its tag there, when they were the same.

    Kept in the run's folder (:data:`KEPT`), as JSON: ``url``, and ``files`` by name, each with ``here`` (:func:`state_of`;
    None before the first upload has ended), ``there`` (:func:`~kd.storage.objects.state_of_object`; "" likewise) and,
    while it is sent, ``sending`` (bytes). :func:`fetched_run` and :class:`kd.storage.mirror.Mirror` write them.

    Args:
        folder: of the run here.
        url: of the run there; what is known of another place counts for nothing. Empty: the place that is known.
    """

    def __init__(self, folder: Path, url: str = "") -> None:
        """Reads the notes in the run's folder; damaged ones count as none. Arguments as of the class."""
        self.folder = folder
        self.url = url
        self.known: dict[str, dict[str, Any]] = {}
        saved = mapping_of(folder / KEPT)
        saved_url = text_in(saved, "url")
        files = mapping_in(saved, "files")
        if url in ("", saved_url):
            self.url = saved_url
            self.known = {name: mapping_in(files, name) for name in files}

    def sending(self, name: str, state: list[int]) -> None:
        """Notes that a file is on its way: a kill before its end is known must not make it another machine's.

        Args:
            name: of the file in the run's folder.
            state: of :func:`state_of`, as it is sent; its size counts.
        """
        known = self.known.setdefault(name, {"here": None, "there": ""})
        known["sending"] = state[0]
        self.save()

    def is_ours(self, name: str, info: Mapping[str, Any]) -> bool:
        """Whether this machine has sent the file that the store has, or was sending one of its size.

        Args:
            name: of the file in the run's folder.
            info: what the store says of it.
        """
        known = self.known.get(name, {})
        if known.get("there") == state_of_object(info):
            return True
        size = int(info["size"])
        return known.get("sending") == size

    def differ(self, name: str, info: Mapping[str, Any]) -> bool:
        """Whether the file is missing here, or the store has another one than was last seen there."""
        if not (self.folder / name).is_file():
            return True
        last_seen = self.known.get(name, {}).get("there")
        return last_seen != state_of_object(info)

    def changed_here(self, name: str) -> bool:
        """Whether the file here is another than the one that was the same as the store's.

        False for one that was never noted, or is missing here.
        """
        file = self.folder / name
        if name not in self.known or not file.is_file():
            return False
        return self.known[name].get("here") != state_of(file)

    def note(self, name: str, state: list[int], info: Mapping[str, Any]) -> None:
        """Both sides have the same; kept at once: a newer file must not be taken for the one that was sent."""
        self.known[name] = {"here": state, "there": state_of_object(info)}
        self.save()

    def save(self) -> None:
        """Writes, in the run's folder, where its copy is and what is known of each file."""
        write_text(self.folder / KEPT, json.dumps({"url": self.url, "files": self.known}))

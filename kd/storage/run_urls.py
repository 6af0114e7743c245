"""The folders of runs in an object store, and where they lie on this machine's disk."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock

from kd.errors import UserError
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
    in_one_line,
    is_url,
    small_file,
    state_of_object,
    tried,
    url_of_run,
)
from kd.storage.shown import HIDDEN, without_secrets
from kd.storage.weights_files import FILES
from kd.storage.writing import guard, make_folder, write_text

Info: TypeAlias = Mapping[str, Any]
"""What a store says of a file, as fsspec has it."""
MOST_FILES = 100_000  # of a run in a store
# endings of a run's large files
WEIGHTS = (".ckpt", ".safetensors", ".pt2", ".onnx", ".data", ".bin", ".gz", ".npz")
RUN_FILES = ("config.yaml", "summary.json", "student.safetensors")
"""Files of which a run's folder has one at least."""
KEPT, LATEST = ".uploaded.json", f"checkpoints/{LAST}"


def on_disk(place: str, key: str) -> Path:
    """Where ``runs_dir`` or a run's folder lies on this machine: a URL has its folder in the cache, whose path
    holds no password.

    Args:
        place: a folder, or a URL.
        key: by which the user has given it, for the message.

    Raises:
        UserError: a URL that leads out of the cache. Nothing is fetched or made.
    """
    if not is_url(place):
        return Path(place)
    without_user = without_secrets(place.rstrip("/")).replace(f"://{HIDDEN}@", "://")
    return inside(cache_dir() / "runs", without_user.replace("://", "/"), key)


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
    name = ""
    with in_one_line("runs_dir"), suppress(FileNotFoundError):
        what = f"{recipe} can't be read"
        content = small_file(files, f"{path}/{marker.name}", what, LONGEST_NAME)
        name = plain_name(content.decode(errors="replace").strip(), recipe)
        if not tried(lambda: files.exists(f"{path}/{name}/config.yaml"), what):
            name = ""
    if name:
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
        together: whether several machines resume the run (:func:`_to_fetch`).

    Returns:
        The folder, below the cache folder. As it is, without a look at the files in the store, where the run is being
        trained here, or where the store has nothing of it yet (not ``together``).

    Raises:
        UserError: no such run, or it can't be fetched.
    """
    url = url_of_run(url, key)
    files, path = file_system(url, key)
    folder = on_disk(url, key)
    if folder.is_dir() and holder_of(folder):  # it is trained here: nothing there is newer
        return folder
    with in_one_line(f"{key}: {url} can't be fetched"):
        files.invalidate_cache()
        infos = tried(lambda: files.find(path, detail=True), f"{url} can't be read")
        in_store = {full.removeprefix(f"{path}/"): info for full, info in infos.items()}
        if "config.yaml" not in in_store:
            if (folder / "config.yaml").is_file() and not together:  # nothing of it was sent yet
                return folder
            raise UserError(f"{key}: run {url} not found")
        make_folder(guard(folder))
        with FileLock(folder / ".fetching"):  # one of all processes fetches
            copies = Copies(folder, url)
            for name, info in _to_fetch(in_store, copies, key, checkpoints, together).items():
                file = inside(folder, name, key)
                make_folder(file.parent)
                fetch_whole(files.get_file, f"{path}/{name}", file, int(info["size"]))
                copies.note(name, state_of(file), info)
    return folder


def _to_fetch(
    in_store: Mapping[str, Info], copies: "Copies", key: str, checkpoints: bool, together: bool
) -> dict[str, Info]:
    """The files of a run that the store has in another state, by name, with what it says of each.

    Args:
        in_store: what the store says of each file, by name.
        copies: what is known of both sides.
        key: the setting, for messages.
        checkpoints: fetch these, too. Hidden files are never fetched.
        together: several machines resume the run: what one of them has alone does not count. Checkpoints that the
            store lacks are deleted here, files that have changed here are fetched again.

    Raises:
        UserError: the run has continued here and from another machine, or no run is like it: too many files, one that is
            too large to be read, or more bytes than this disk has room for.
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
    wanted: dict[str, Info] = {}
    for name, info in in_store.items():
        is_left_out = name.startswith("checkpoints/") and not checkpoints
        if is_left_out or name.rpartition("/")[2].startswith("."):
            continue
        changed = copies.changed_here(name)
        fetched = (copies.folder / name).is_file() and copies.there(name) == state_of_object(info)
        if together and changed:
            fetched = False
        elif continued_here and changed:
            fetched = True
        if not fetched:
            wanted[name] = info
    _check_room(wanted, copies, key)
    return wanted


def _check_room(wanted: Mapping[str, Info], copies: "Copies", key: str) -> None:
    """Refuses, by a UserError, more files than a run has, a larger one than is read, and more than the disk has room for."""
    if len(wanted) > MOST_FILES:
        raise UserError(
            f"{key}: {copies.url} has {len(wanted):,} files, at most {MOST_FILES:,} are fetched"
        )
    for name, info in wanted.items():
        largest = LARGEST_WEIGHTS if Path(name).suffix in WEIGHTS else LARGEST_LOG
        if int(info["size"]) > largest:
            raise UserError(
                f"{key}: {too_large(f'{copies.url}/{name}', int(info['size']), largest)}"
            )
    free = shutil.disk_usage(copies.folder).free
    needed = sum(int(info["size"]) for info in wanted.values())
    if needed > free:
        raise UserError(
            f"{key}: {copies.url} has {needed / 1e6:,.0f} MB to fetch, {copies.folder} has room for "
            f"{free / 1e6:,.0f} MB"
        )


def state_of(file: Path) -> list[int]:
    """What changes when a file on this disk does: its size in bytes, and the time of its last change in nanoseconds."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


class Copies:
    """What is known of both sides: each file's state here, and its state there, when they were the same.

    Kept in the run's folder (:data:`KEPT`), as JSON: ``url``, and ``files`` by name, each with ``here`` (:func:`state_of`)
    and ``there`` (:func:`~kd.storage.objects.state_of_object`); while a file is sent ``here`` is null and ``there``
    empty. :func:`fetched_run` and :class:`kd.storage.mirror.Mirror` write them.

    Args:
        folder: of the run here.
        url: of the run there; what is known of another place counts for nothing. Empty: the place that is known.
    """

    def __init__(self, folder: Path, url: str = "") -> None:
        """Reads the notes in the run's folder; damaged ones count as none. Arguments as of the class."""
        self.folder = folder
        saved = mapping_of(folder / KEPT)
        saved_url = text_in(saved, "url")
        self.url = url or saved_url
        self.known: dict[str, dict[str, Any]] = {}
        files = mapping_in(saved, "files")
        if self.url != saved_url:
            files = {}
        for name in files:
            self.known[name] = mapping_in(files, name)

    def there(self, name: str) -> object:
        """The file's state in the store when it was last the same as here; "" while it is sent, None where unknown."""
        return self.known.get(name, {}).get("there")

    def is_ours(self, name: str, info: Info) -> bool:
        """Whether this machine has sent the file that the store has, or was sending it when it was killed."""
        return self.there(name) in ("", state_of_object(info))

    def changed_here(self, name: str) -> bool:
        """Whether the file here is another than the one that was the same as the store's.

        False for one that was never noted, or is missing here.
        """
        file = self.folder / name
        if name not in self.known or not file.is_file():
            return False
        return self.known[name].get("here") != state_of(file)

    def note(self, name: str, state: list[int] | None, info: Info | None) -> None:
        """Both sides have the same, or (without both) this machine begins to send it; kept at once: neither a newer file
        nor a killed upload must be taken for another machine's.
        """
        self.known[name] = {"here": state, "there": state_of_object(info) if info else ""}
        self.save()

    def save(self) -> None:
        """Writes, in the run's folder, where its copy is and what is known of each file."""
        write_text(self.folder / KEPT, json.dumps({"url": self.url, "files": self.known}))

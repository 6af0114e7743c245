"""The folders of runs in an object store, and where they lie on this machine's disk."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kd.errors import UserError
from kd.storage.checkpoints import LAST, PREVIOUS, holder_of, run_folder
from kd.storage.elsewhere import text_of
from kd.storage.objects import (
    TIMES,
    ObjectState,
    copy_of,
    fetch,
    files_below,
    in_one_line,
    is_copy,
    is_url,
    name_in,
    small_file,
    url_of_run,
)
from kd.storage.weights_files import FILES
from kd.storage.writing import guard, make_folder, write_text

RUN_FILES = ("config.yaml", "summary.json", "student.safetensors")
"""Files of which a run's folder has one at least."""
MOST_FILES = 100_000  # of a run in a store
OWNER, LATEST = ".owner", f"checkpoints/{LAST}"
CLAIM = ".claimed"
"""In a run's folder in the store: the file that takes the run's name, and holds the owner (:func:`owner_in`)."""


def on_disk(place: str, key: str) -> Path:
    """Where ``runs_dir`` or a run's folder lies on this machine: a URL has its folder in the cache, whose path
    holds no password.

    Args:
        place: a folder, or a URL.
        key: by which the user has given it, for the message.

    Raises:
        UserError: a URL that leads out of the cache. Nothing is fetched or made.
    """
    return copy_of(place, key, "runs") if is_url(place) else Path(place)


def folder_of_recipe(runs_dir: str | Path, recipe: str) -> Path:
    """Where the runs of a recipe lie on this machine: ``runs_dir/RECIPE``; of a URL that folder is in the cache.

    Args:
        runs_dir: the setting, a folder or a URL.
        recipe: name of the recipe.

    Raises:
        UserError: a URL that leads out of the cache. Nothing is fetched or made.
    """
    return on_disk(str(runs_dir), "runs_dir") / recipe


def only_run(home: Path, recipe: str) -> Path:
    """The folder of the only run of a recipe in a folder that kd has made for it; begun with :func:`words_of_only_run`."""
    return folder_of_recipe(home, recipe) / "000"


def words_of_only_run(home: Path) -> list[str]:
    """Words of ``kd-train``'s command line by which a run gets the folder :func:`only_run`, also of a recipe with a name
    for its runs.
    """
    return [f"runs_dir={home}", "name=null"]


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
    students = [*folder.glob("*/student.safetensors"), *folder.glob("*/*/student.safetensors")]
    if not students:
        return ""
    latest = max(students, key=lambda file: (file.stat().st_mtime, file.parent.name != "latest"))
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
    with in_one_line("runs_dir"), suppress(FileNotFoundError):
        name = name_in(f"{recipe}/{marker.name}", "runs_dir")
        small_file(f"{recipe}/{name}/config.yaml")  # has the run been sent?
        fetched_run(f"{recipe}/{name}", "runs_dir", together=together)
        write_text(marker, name + "\n")
        return
    if together:
        marker.unlink(missing_ok=True)


def owner_in(folder: Path) -> str:
    """The random name under which a folder of this machine sends its run to the store; "" before it has sent anything.

    The store's :data:`CLAIM` holds the name of the folder that has begun to send last.
    """
    try:
        return text_of(folder / OWNER)
    except (OSError, ValueError):
        return ""


def fetched_run(url: str, key: str, checkpoints: bool = True, together: bool = False) -> Path:
    """Fetches a run from an object store to its folder on this disk; files that are newer here than its last upload stay.

    Args:
        url: of the run, or of ``latest`` beside it.
        key: by which the user has given it, for messages.
        checkpoints: whether these are fetched too.
        together: whether several machines resume the run: what one of them has alone does not count.

    Returns:
        The folder, below the cache folder. As it is, without a look at the files in the store, where the run is being
        trained here, or where the store has nothing of it yet (not ``together``).

    Raises:
        UserError: no such run, it can't be fetched, it has continued both here and from another machine, or this disk has
            no room for it.
    """
    url = url_of_run(url, key)
    folder = on_disk(url, key)
    if holder_of(folder):  # it is trained here: nothing there is newer
        return folder
    with in_one_line(key):
        there = files_below(url, key)
    if "config.yaml" not in there:
        if (folder / "config.yaml").is_file() and not together:  # nothing of it was sent yet
            return folder
        raise UserError(f"{key}: run {url} not found")
    with in_one_line(f"{key}: {url} can't be fetched"):
        make_folder(guard(folder))
        is_ours = _is_ours(url, folder, there)
        last = folder / LATEST
        is_new = last.exists() and last.stat().st_mtime >= TIMES  # it was never in the store
        if checkpoints and together:
            for name in {LATEST, f"checkpoints/{PREVIOUS}"} - there.keys():
                (folder / name).unlink(missing_ok=True)
        elif checkpoints and LATEST in there and is_new and not is_ours:
            raise UserError(
                f"{key}: the run has continued both in {folder} and, from another machine, in {url}; remove the "
                "folder to resume from there"
            )
        wanted = {}
        for name, state in there.items():
            is_hidden = name.rpartition("/")[2].startswith(".")
            if is_hidden or (name.startswith("checkpoints/") and not checkpoints):
                continue
            if together or not (is_ours and (folder / name).is_file()):
                wanted[name] = state
        if len(wanted) > MOST_FILES:
            raise UserError(
                f"{key}: {url} has {len(wanted):,} files, at most {MOST_FILES:,} are fetched"
            )
        # the last checkpoint after all else: where it is as in the store, the rest is
        for files in (wanted.keys() - {LATEST}, wanted.keys()):
            fetch(url, folder, {name: wanted[name] for name in files}, key)
    return folder


def _is_ours(url: str, folder: Path, there: Mapping[str, ObjectState]) -> bool:
    """Whether no other machine has sent this run since the folder here was as in the store: then all files here are as new.

    Args:
        url: of the run.
        folder: its copy here.
        there: states of the run's files in the store, by name.
    """
    if LATEST in there and is_copy(folder / LATEST, there[LATEST]):
        return True
    return CLAIM in there and small_file(f"{url}/{CLAIM}").decode() == owner_in(folder)

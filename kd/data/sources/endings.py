"""Whether a list's paths name files: completes those that lack their endings (``0001`` for ``0001.jpg``)."""

import os
import posixpath
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from kd.data.sources.files import printable
from kd.data.sources.places import IMAGE_SUFFIXES
from kd.errors import UserError
from kd.storage.objects import is_url, listed


def complete_endings(paths: Sequence[str], key: str) -> tuple[list[str], str]:
    """The paths with the endings of their pictures; a path that names a file stays as it is, and so does a missing one.

    Args:
        paths: of a list's pictures, or their URLs.
        key: of the list, for messages.

    Returns:
        The paths in their order, and a note for the user; "" where none was completed.

    Raises:
        UserError: two pictures fit a path.
    """
    folders: dict[str, dict[str, list[str]]] = {}
    complete_paths = []
    examples = []
    for path in paths:
        folder, name = posixpath.split(path)
        if name.lower().endswith(IMAGE_SUFFIXES):
            complete_paths.append(path)
            continue
        if folder not in folders:
            folders[folder] = _files_by_stem(folder, key)
        fitting = folders[folder].get(name, [])
        if len(fitting) > 1 and name not in fitting:
            raise UserError(
                f"{key}: two pictures fit '{printable(path)}': {' and '.join(map(printable, fitting[:2]))}; write the "
                "endings into the list, or move one of them to another folder"
            )
        if not fitting or name in fitting:
            complete_paths.append(path)
            continue
        complete_paths.append(posixpath.join(folder, fitting[0]))
        examples.append(f"'{printable(name)}' is {printable(fitting[0])}")
    if not examples:
        return complete_paths, ""
    count = f"{len(examples)} paths lack" if len(examples) > 1 else "one path lacks"
    return complete_paths, f"{count} an ending, which the files beside them give: {examples[0]}"


def _files_by_stem(folder: str, key: str) -> dict[str, list[str]]:
    """Names of the pictures in a folder by their name without the ending; a file without one is listed too."""
    if is_url(folder):
        names = list(listed(folder, key, below=False))
    elif Path(folder).is_dir():
        names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    else:
        names = []
    by_stem = defaultdict(list)
    for name in sorted(names):
        stem, ending = posixpath.splitext(name)
        if ending.lower() in IMAGE_SUFFIXES:
            by_stem[stem].append(name)
        else:
            by_stem[name].append(name)
    return dict(by_stem)


def check_some_exist(paths: Sequence[str], start: str, key: str) -> None:
    """Refuses a list of which no file is on this disk.

    Args:
        paths: of the list's pictures.
        start: the folder that its relative paths start at.
        key: of the list, or its file.

    Raises:
        UserError: none exists; names a folder in ``start`` that has the first.
    """
    if not paths or any(Path(path).exists() for path in paths):
        return
    folders = [Path(path).parent for path in paths]
    root = os.path.commonpath(folders)
    first = paths[0]
    holder = _holder_of(Path(first), Path(start))
    raise UserError(
        f"{key}: none of the {len(paths)} files exists: paths start at {printable(root)} (the first is "
        f"{printable(first)}); another one: data.source.image_dir={holder}"
    )


def _holder_of(missing: Path, start: Path) -> str:
    """The folder in ``start`` that has a missing picture, with or without its ending; else ``FOLDER``."""
    if not start.is_dir() or not missing.is_relative_to(start):
        return "FOLDER"
    name = missing.relative_to(start)
    for folder in sorted(start.iterdir()):
        if any(Path(f"{folder / name}{ending}").is_file() for ending in ("", *IMAGE_SUFFIXES)):
            return printable(str(folder))
    return "FOLDER"

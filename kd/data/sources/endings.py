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

    A path with a picture's ending is not looked up; the folder of any other is listed once.

    Args:
        paths: of a list's pictures, or their URLs.
        key: of the list, for messages.

    Returns:
        The paths in their order, and a note for the user; "" where none was completed.

    Raises:
        UserError: two pictures fit a path, or the folder of a URL can't be listed.
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
    """Names of a folder's files: pictures by their name without the ending, all others by their whole name.

    A folder that does not exist has none; "" is the working folder. A URL is listed in the store, and ``key`` begins the
    message where it can't be.
    """
    if is_url(folder):
        names = list(listed(folder, key, below=False))
    elif Path(folder).is_dir():
        names = [entry.name for entry in os.scandir(folder or ".") if entry.is_file()]
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


def check_some_exist(
    paths: Sequence[str], key: str, list_folder: str, image_dir: str | None
) -> None:
    """Refuses a list of which no file is on this disk; an empty one passes.

    Args:
        paths: of the list's pictures.
        key: the setting that names the list, or the list's file; begins the message.
        list_folder: where the list is; its relative paths start there without ``image_dir``.
        image_dir: ``data.source.image_dir``.

    Raises:
        UserError: none exists; says where relative paths start, and names a folder nearby that has the first picture.
    """
    if not paths or any(Path(path).exists() for path in paths):
        return
    first = paths[0]
    start = str(Path(image_dir or list_folder).absolute())
    if image_dir and not Path(image_dir).is_dir():
        is_relative = not Path(image_dir).is_absolute()
        base = f" in {printable(str(Path.cwd()))}" if is_relative else ""
        problem = f"data.source.image_dir: folder {printable(image_dir)} not found{base}"
    else:
        problem = (
            f"{key}: none of the {len(paths)} files exists: relative paths start at {printable(start)} (the first is "
            f"{printable(first)})"
        )
    holder = _holder_of(Path(first).absolute(), start, list_folder)
    if holder is None:
        remedy = "data.source.image_dir=FOLDER says where the list's relative paths start"
    else:
        remedy = f"data.source.image_dir={printable(holder)} has the pictures"
    raise UserError(f"{problem}; {remedy}")


def _holder_of(missing: Path, start: str, list_folder: str) -> str | None:
    """The folder from which the path of a missing picture leads to a file, with or without its ending.

    The list's folder is searched, the working folder, and the folders in both. None: no such folder, or the list gives a
    path that is not below ``start``.

    Args:
        missing: the picture, an absolute path.
        start: the absolute folder that it was looked for in.
        list_folder: the folder of the list.
    """
    if not missing.is_relative_to(start):
        return None
    name = missing.relative_to(start)
    for parent in (Path(list_folder), Path()):
        if not parent.is_dir():
            continue
        inner = sorted(folder for folder in parent.iterdir() if folder.is_dir())
        for folder in (parent, *inner):
            for ending in ("", *IMAGE_SUFFIXES):
                if Path(f"{folder / name}{ending}").is_file():
                    return str(folder)
    return None

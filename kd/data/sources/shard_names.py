"""Which tar files a person means: by a folder, a pattern, a list, and by the split in their names."""

import glob
import math
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from kd.data.sources.places import expanded, is_hidden
from kd.data.sources.split_names import choose, split_of
from kd.errors import UserError
from kd.storage.elsewhere import RefusedFile, text_of

MOST_SHARDS = 1_000_000


def expanded_places(places: str | Sequence[str] | None) -> str | list[str] | None:
    """The places of a setting (one, or a list) with ``~`` as the user's folder; None for no place."""
    if places is None or places == "":
        return None
    if isinstance(places, str):
        return expanded(places)
    return [expanded(place) for place in places]


def shards_of_split(places: str | Sequence[str] | None, split: str, key: str) -> list[str] | None:
    """The shards of a folder whose names mean the split, where names tell splits apart; else None.

    Shards in the folder itself: their names must be of several splits; the list is empty where none is of this one. No
    shards there: those in the folder below whose name means the split; None without such a folder. A test split validates
    where there is no validation split.

    Args:
        places: the setting; only a single folder is looked into.
        split: ``train``, ``val`` or ``test``.
        key: of the setting, for messages.

    Raises:
        UserError: some shards have a split's name and others none (but for those of ``train`` alone), none is of ``train``
            where that is wanted, or two folders mean the split.
    """
    if not isinstance(places, str) or not Path(places).is_dir():
        return None
    folder = Path(places)
    files = sorted(folder.glob("*.tar"))

    # A folder for each split.
    if not files:
        folders = [path.name for path in folder.iterdir() if path.is_dir()]
        visible = sorted(name for name in folders if not is_hidden(name))
        name = choose(visible, split, key, places)
        if name is None:
            return None
        return sorted(str(file) for file in (folder / name).glob("*.tar"))

    # All shards in one folder, their split in their names.
    split_of_file = {file: split_of(file.stem) for file in files}
    splits = set(split_of_file.values())
    if len(splits) < 2:
        return None
    named_splits = sorted(name for name in splits if name is not None)
    if None in splits:
        if named_splits == ["train"]:
            return None
        unnamed = next(file for file in files if split_of_file[file] is None)
        raise UserError(
            f"{key}: {places} has shards of the splits {', '.join(named_splits)} and others "
            f"({unnamed.name}); give a pattern of those that are {split}"
        )
    wanted = split
    if split == "val" and "val" not in splits:
        wanted = "test"
    if split == "train" and "train" not in splits:
        raise UserError(
            f"{key}: {places} has shards of the splits {', '.join(named_splits)} and none of train; give a pattern of "
            "those to train with"
        )
    return [str(file) for file in files if split_of_file[file] == wanted]


def shards_of(places: str | Sequence[str], key: str) -> list[str]:
    """Paths of the tar files that folders, patterns and lists name, in order.

    Raises:
        UserError: one that names none, a missing file, or a URL.
    """
    shards: list[str] = []
    for place in [places] if isinstance(places, str) else places:
        files = _shards_at(place, key)
        if not files:
            raise UserError(f"{key}: no tar files: {place}")
        for file in files:
            if not Path(file).is_file():
                raise UserError(f"{key}: {file} not found")
        shards += files
    return shards


def _shards_at(place: str, key: str) -> list[str]:
    """The files that a folder, a list or a pattern names; those of a list and of braces need not exist.

    A list is a ``.txt`` file with one path a line, relative to its folder. A pattern has braces (:func:`braces`), and
    ``*``, ``?`` and ``[]`` as of :mod:`glob`. A URL is refused.
    """
    if "://" in place or place.startswith("pipe:"):
        raise UserError(
            f"{key}: {place} is not on a disk; copy the shards there, or pack them (kd-pack)"
        )
    path = Path(place)
    if path.is_dir():
        return sorted(str(file) for file in path.glob("*.tar"))
    if path.suffix == ".txt":
        return [str(path.parent / line) for line in lines_of(path, key, "shards")]
    files = []
    for name in braces(place, key):
        if re.search(r"[*?\[]", name):
            files += sorted(glob.glob(name))  # noqa: PTH207 - any root
        else:
            files.append(name)
    return files


def lines_of(file: Path, key: str, what: str) -> list[str]:
    """The lines of a text file, stripped, without empty ones; a UserError names ``key`` and ``what`` they are."""
    try:
        lines = text_of(file).splitlines()
    except RefusedFile as error:
        raise UserError(f"{key}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {file} can't be read as a list of {what}") from error
    return [line.strip() for line in lines if line.strip()]


def braces(pattern: str, key: str = "") -> list[str]:
    """A pattern's names, as a shell writes them; a UserError with ``key`` refuses more than :data:`MOST_SHARDS`, and
    numbers that count down.

    >>> braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    >>> braces("{a,b}/{0..1}")
    ['a/0', 'a/1', 'b/0', 'b/1']
    """
    choices = []  # of each part of the pattern
    parts = re.split(r"\{([^{}]*)\}", pattern)
    for i, part in enumerate(parts):
        is_braced = i % 2 == 1
        texts = [part]
        if is_braced:
            texts = _choices(part, key)
        choices.append(texts)
    count = math.prod(map(len, choices))
    if count > MOST_SHARDS:
        raise UserError(f"{key}: {pattern} names more than {MOST_SHARDS:,} shards")
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(braced: str, key: str) -> list[str]:
    """What stands for a pair of braces: the numbers of ``08..10``, or the words of ``a,b``; errors as of :func:`braces`."""
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", braced)
    if numbers is None:
        return braced.split(",")
    first = int(numbers[1])
    last = int(numbers[2])
    if not first <= last < first + MOST_SHARDS:
        raise UserError(f"{key}: {{{braced}}} must count up, at most {MOST_SHARDS:,} shards")
    width = 1
    if numbers[1].startswith("0"):
        width = len(numbers[1])
    return [f"{number:0{width}d}" for number in range(first, last + 1)]

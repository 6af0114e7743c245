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
    """Places whose ``~`` is the user's folder."""
    if places is None or isinstance(places, str):
        return expanded(places) if places else None
    return [expanded(place) for place in places]


def shards_of_split(places: str | Sequence[str] | None, split: str, key: str) -> list[str] | None:
    """The shards of a folder whose names mean the split, where the folder's shards are of several splits; else None.

    Raises:
        UserError: some shards have a split's name and others none.
    """
    if not isinstance(places, str) or not Path(places).is_dir():
        return None
    folder = Path(places)
    files = sorted(folder.glob("*.tar"))
    meaning = {file: split_of(file.stem) for file in files}
    if not files:  # a folder for each split
        inner = sorted(
            path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)
        )
        name = choose(inner, split, key, places)
        return sorted(map(str, (folder / name).glob("*.tar"))) if name is not None else None
    kinds = {*meaning.values()}
    if len(kinds) < 2:
        return None
    if None in kinds and kinds & {"val", "test"}:
        stranger = next(file for file in files if meaning[file] is None)
        raise UserError(
            f"{key}: {places} has shards of the splits {', '.join(sorted(filter(None, kinds)))} and others "
            f"({stranger.name}); give a pattern of those that are {split}"
        )
    wanted = "test" if split == "val" and "val" not in kinds else split
    return [str(file) for file in files if meaning[file] == wanted] if None not in kinds else None


def shards_of(places: str | Sequence[str], key: str) -> list[str]:
    """The tar files that folders, patterns and lists name, in order.

    Raises:
        UserError: one that names none, or a missing file.
    """
    found: list[str] = []
    for place in [places] if isinstance(places, str) else places:
        if "://" in place or place.startswith("pipe:"):
            raise UserError(
                f"{key}: {place} is not on a disk; copy the shards there, or pack them (kd-pack)"
            )
        path = Path(place)
        if path.is_dir():
            mine = sorted(str(file) for file in path.glob("*.tar"))
        elif path.suffix == ".txt":
            mine = [str(path.parent / line) for line in lines_of(path, key, "shards")]
        else:
            named = braces(place, key)
            found_by = [sorted(glob.glob(n)) if re.search(r"[*?\[]", n) else [n] for n in named]  # noqa: PTH207 - any root
            mine = [file for files in found_by for file in files]
        missing = next((file for file in mine if not Path(file).is_file()), None)
        if missing or not mine:
            raise UserError(
                f"{key}: there is no {missing}" if missing else f"{key}: no tar files: {place}"
            )
        found += mine
    return found


def lines_of(file: Path, key: str, what: str) -> list[str]:
    """The lines of a text file, without blanks and empty lines; a UserError names ``key`` and ``what`` they are."""
    try:
        lines = text_of(file).splitlines()
    except RefusedFile as error:
        raise UserError(f"{key}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {file} can't be read as a list of {what}") from error
    return [line.strip() for line in lines if line.strip()]


def braces(pattern: str, key: str = "") -> list[str]:
    """A pattern's names, as a shell writes them.

    >>> braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    >>> braces("{a,b}/{0..1}")
    ['a/0', 'a/1', 'b/0', 'b/1']
    """
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [_choices(part, key) if i % 2 else [part] for i, part in enumerate(parts)]
    if math.prod(map(len, choices)) > MOST_SHARDS:
        raise UserError(f"{key}: {pattern} names more than {MOST_SHARDS:,} shards")
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(braced: str, key: str) -> list[str]:
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", braced)
    if not numbers:
        return braced.split(",")
    first, last = int(numbers[1]), int(numbers[2])
    if not first <= last < first + MOST_SHARDS:
        raise UserError(f"{key}: {{{braced}}} must count up, at most {MOST_SHARDS:,} shards")
    width = len(numbers[1]) if numbers[1].startswith("0") else 1
    return [f"{number:0{width}d}" for number in range(first, last + 1)]

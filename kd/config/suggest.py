"""Suggestions for an unknown key: up to three accepted keys, the likeliest first."""

import difflib
import json
import re
from collections.abc import Container, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MOST = 3
"""Suggestions in a message."""
FILE = Path(__file__).with_name("words.json")
"""Words of other programs: ``keys`` (words -> our keys that may be meant, the likeliest first; ``{loss}`` in a key is each
of the recipe's losses), ``needless`` (words that no setting replaces -> why), ``architecture`` (timm's arguments of an
architecture, which go below ``kwargs``) and ``meant`` (words for these), ``optimizer`` (arguments of optimizers, below
``optim.kwargs``), ``groups`` (a group -> the setting that a plain value in its place is meant for), ``values`` (setting ->
word -> ours), ``reasons`` (setting -> value -> why a run can't use it)."""


@cache
def words() -> dict[str, Any]:
    """The content of :data:`FILE`, each word apart."""
    table: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    synonyms: dict[str, list[str]] = {}
    for several, keys in table["keys"].items():
        for word in several.split():
            of_word = synonyms.setdefault(word, [])
            of_word.extend(keys)
    needless = {}
    for several, why in table["needless"].items():
        for word in several.split():
            needless[word] = why
    table["keys"] = synonyms
    table["needless"] = needless
    table["architecture"] = table["architecture"].split()
    table["optimizer"] = table["optimizer"].split()
    return table


def suggest(key: str, accepted: Iterable[str], losses: Iterable[str] = ()) -> list[str]:
    """The accepted keys that ``key`` may mean.

    The last part decides, whole or by its words (``mixup_alpha``): an accepted key that ends in it, a synonym, or
    else one that is spelt alike. The words before it choose between those found (a student's key for a student's).
    An argument of optimizers or of timm's architectures that no accepted key ends in is suggested below ``kwargs``.

    Args:
        key: what was given.
        accepted: all keys that would be taken.
        losses: names of the recipe's distillation losses; empty: ``kd``.

    Returns:
        At most :data:`MOST`, the likeliest first; no accepted key is suggested for itself.

    >>> suggest("lr", ["optim.lr", "seed", "optim.lr_batch"])
    ['optim.lr']
    >>> suggest("model.student.drop_path_rate", [])
    ['model.student.kwargs.drop_path_rate']
    """
    known = list(accepted)
    by_last_part: dict[str, list[str]] = {}
    for name in known:
        _, _, last_part = name.rpartition(".")
        by_last_part.setdefault(last_part, []).append(name)
    synonyms = _synonyms(known, list(losses) or ["kd"])

    *above, last = key.lower().replace("-", "_").split(".")
    if last in words()["optimizer"] and last not in by_last_part:
        return [f"optim.kwargs.{last}"]
    if last in words()["architecture"] and last not in by_last_part:
        of_teacher = any("teacher" in part for part in [*above, last])
        side = "teacher" if of_teacher else "student"
        return [f"model.{side}.kwargs.{words()['meant'].get(last, last)}"]

    candidates: list[str] = []
    for run in _runs(last):
        candidates = synonyms.get(run, []) + by_last_part.get(run, [])
        if candidates:
            break
    if not candidates:
        words_known = [*by_last_part, *synonyms]
        for word in difflib.get_close_matches(last, words_known, MOST, 0.75):
            candidates += by_last_part.get(word, []) + synonyms.get(word, [])
    if not candidates:
        candidates = difflib.get_close_matches(key, known, 1, 0.75)

    # of several the ones whose groups the key names too: a student's key for a student's
    context = {*above, *last.split("_")}
    shared = {}
    for name in candidates:
        *groups, _ = name.split(".")
        shared[name] = len(context.intersection(groups))
    most_shared = max(shared.values(), default=0)
    nearest = []
    for name, count in shared.items():
        if count == most_shared and name != key:
            nearest.append(name)
    return nearest[:MOST]


def _synonyms(known: Container[str], losses: Sequence[str]) -> dict[str, list[str]]:
    """The known keys that each word of :data:`FILE` means; ``{loss}`` in a key is each of ``losses``."""
    synonyms: dict[str, list[str]] = {}
    for word, names in words()["keys"].items():
        of_word = []
        for name in names:
            of_losses = [name.format(loss=loss) for loss in losses]
            of_word += [key for key in of_losses if key in known]
        synonyms[word] = of_word
    return synonyms


def _runs(name: str) -> list[str]:
    """Runs of a name's words, the longest first, the last ones before the first ones.

    >>> _runs("mixup_alpha")
    ['mixup_alpha', 'alpha', 'mixup']
    """
    parts = name.split("_")
    runs: list[str] = []
    count = len(parts)
    for size in range(count, 0, -1):
        for first in range(count - size, -1, -1):
            run = parts[first : first + size]
            runs.append("_".join(run))
    return runs


def why_needless(word: str) -> str:
    """Why there is no such setting, option or overlay, as the end of a message; "" for any other word."""
    why = words()["needless"].get(word.lower())
    return f": {why}" if why else ""


def hint(key: str, accepted: Iterable[str], losses: Iterable[str] = ()) -> str:
    """What follows an unknown key in a message: why there is no such setting, suggestions, which keys its group takes, or
    where all keys are listed.

    Args:
        key: as given.
        accepted: all keys that would be taken.
        losses: names of the recipe's distillation losses.
    """
    known = list(accepted)
    place, _, last = key.rpartition(".")
    first = key.partition(".")[0]
    why = why_needless(last) or why_needless(first)
    if why:
        return why
    names = suggest(key, known, losses)
    siblings = [name for name in known if place.count(".") and name.startswith(f"{place}.")]
    if any(name.startswith(f"{place}.") and name != key for name in names):
        return as_question(names)
    if key == "data.source.root":
        return ": the data.source of this recipe has none; data.source=ImageFolder data.source.root=DIR reads a folder"
    if siblings:  # what was right is kept
        return f" ({place} takes {', '.join(name.rpartition('.')[2] for name in siblings)})"
    return as_question(names) or " (kd-train --keys)"


@cache
def timm_names(part: str) -> frozenset[str]:
    """Names of timm's models, or of its optimizers, from its source: timm, which imports torch, is not imported.

    Empty without timm, or where its source is written in another way.

    Args:
        part: ``optim`` or ``models``.
    """
    timm = find_spec("timm")
    if timm is None:
        return frozenset()
    root = Path(next(iter(timm.submodule_search_locations or ())))
    files = [root / "optim" / "_optim_factory.py"]
    # entries, aliases, and the names of bitsandbytes' optimizers, which stand in tuples
    pattern = r"(?:^\s+name=|register_alias\(|^\s+(?=[\"']bnb))[\"'](\w+)[\"']"
    if part == "models":
        files = [*(root / "models").glob("*.py")]
        pattern = r"^@register_model\s*\n(?:@.*\n)*def (\w+)"
    texts = [file.read_text("utf-8") for file in files if file.is_file()]
    return frozenset(name for text in texts for name in re.findall(pattern, text, re.M))


def near(given: object, names: Iterable[str], most: int = 1) -> str:
    """The names that are spelt alike, as the end of a message; "" where none is.

    Args:
        given: the unknown name.
        names: the known ones.
        most: how many to suggest.
    """
    return as_question(nearest(given, names, most))


def nearest(given: object, names: Iterable[str], most: int = 1) -> list[str]:
    """The names that begin with what was given, the shortest first, or else those that are spelt like it; at most
    ``most``. A hyphen is an underscore; names without dots are compared with what is before the first one.
    """
    known = {}
    for name in names:
        plain = name.lower().replace("-", "_")
        known[plain] = name
    text = str(given).lower().replace("-", "_")
    has_dots = any("." in name for name in known)
    if not has_dots:
        text, _, _ = text.partition(".")
    found = [name for name in known if text and name.startswith(text)]
    found.sort(key=lambda name: (len(name), name))
    if not found:
        found = difflib.get_close_matches(text, known, most, 0.6)
    return [known[name] for name in found[:most]]


def as_question(names: Iterable[str]) -> str:
    """Names as a question at the end of a message; "" for no names.

    >>> as_question(["a", "b", "c"])
    "; did you mean 'a', 'b' or 'c'?"
    """
    quoted = [f"'{name}'" for name in names]
    if not quoted:
        return ""
    *others, last = quoted
    if not others:
        return f"; did you mean {last}?"
    return f"; did you mean {', '.join(others)} or {last}?"

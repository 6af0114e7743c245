"""Suggestions for an unknown key or word: accepted ones, the likeliest first."""

import difflib
import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MOST = 3
"""Suggestions in a message."""
FILE = Path(__file__).with_name("words.json")
"""Words of other programs: ``keys`` (word -> our keys that may be meant, the likeliest first; ``{loss}`` in a key is each of
the recipe's losses, ``{side}`` teacher or student), ``needless`` (a word or key that no setting replaces -> why; after
``option:`` a command's own), ``groups`` (a group -> the setting that a plain value in its place is meant for), ``values``
(setting -> word -> ours), ``reasons`` (setting -> value, ``*`` for any -> why a run can't use it). And ``idle``: settings
that others switch off, by a pattern of their keys; whether ``any``, ``all`` or ``none`` ``of`` the deciding settings must
be on for something to read them (of none: nothing ever does); why."""


@cache
def words() -> dict[str, Any]:
    """The content of :data:`FILE`."""
    table: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return table


def suggest(key: str, accepted: Iterable[str]) -> list[str]:
    """The accepted keys that an unknown ``key`` may mean, or keys below ``kwargs``, where any name is accepted.

    The key's last part is looked up, first whole, then by its words (``mixup_alpha``, then ``alpha``, then ``mixup``): as a
    word of :data:`FILE`, or as the last part of an accepted key. If nothing is found, names that are spelt alike are taken.
    Of several keys found those count whose groups (the parts before the last) share most words with ``key``: a student's
    key for a student's.

    Args:
        key: what was given.
        accepted: all keys that would be taken.

    Returns:
        At most :data:`MOST`, the likeliest first; no accepted key is suggested for itself.

    >>> suggest("lr", ["optim.lr", "seed", "optim.lr_batch"])
    ['optim.lr']
    >>> suggest("model.student.drop_path_rate", [])
    ['model.student.kwargs.drop_path_rate']
    """
    known = dict.fromkeys(accepted)
    side = "teacher" if "teacher" in key else "student"
    named = re.findall(r"^model\.distill_losses\.(\w+)\.", "\n".join(known), re.M)
    losses = dict.fromkeys(named or ["kd"])
    by_last: dict[str, list[str]] = {}
    for name in known:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)

    def meant(word: str) -> list[str]:
        """The keys that a word may mean: those of the table, and those that end in it."""
        found = []
        for pattern in words()["keys"].get(word, ()):
            for loss in losses:
                name = pattern.format(loss=loss, side=side)
                if name in known or ".kwargs." in name:
                    found.append(name)
        return found + by_last.get(word, [])

    *above, last = key.lower().replace("-", "_").split(".")
    parts = last.split("_")
    count = len(parts)
    runs = [  # all runs of words in the last part, the longest first, of equal ones the last first
        "_".join(parts[first : first + size])
        for size in range(count, 0, -1)
        for first in range(count - size, -1, -1)
    ]
    candidates = next(filter(None, map(meant, runs)), [])
    if not candidates:
        near_words = difflib.get_close_matches(last, {**words()["keys"], **by_last}, MOST, 0.75)
        candidates = [name for word in near_words for name in meant(word)]
    if not candidates:
        candidates = difflib.get_close_matches(key, known, 1, 0.75)

    context = {*above, *parts}
    shared = {name: len(context.intersection(name.split(".")[:-1])) for name in candidates}
    most_shared = max(shared.values(), default=0)
    likeliest = [name for name, count in shared.items() if count == most_shared and name != key]
    return likeliest[:MOST]


def why_needless(*names: str) -> str:
    """Why kd needs no setting, option or overlay of this name, as the end of a message (": ..."); of several names the first
    that :data:`FILE` explains. "" where it explains none.
    """
    reasons = [words()["needless"].get(name.lower()) for name in names]
    return next((f": {why}" for why in reasons if why), "")


def hint(key: str, accepted: Iterable[str]) -> str:
    """The end of the message for an unknown key, the first of these that applies: why there is no such setting; the keys
    that its group takes, where the group is right and no suggestion is in it; suggestions; where all keys are listed.

    Args:
        key: as given.
        accepted: all keys that would be taken.
    """
    known = list(accepted)
    place, _, last = key.rpartition(".")
    names = suggest(key, known)
    siblings = [name for name in known if place.count(".") and name.startswith(f"{place}.")]
    is_below = any(name.startswith(f"{place}.") for name in names)
    first, _, _ = key.partition(".")
    why = why_needless(last, first) or ("" if is_below else why_needless(key))
    if why:
        return why
    if siblings and not is_below:
        last_parts = [name.rpartition(".")[2] for name in siblings]
        return f" ({place} takes {', '.join(last_parts)})"
    return as_question(names) or " (kd-train --keys)"


@cache
def timm_names(part: str) -> frozenset[str]:
    """Names of timm's models, or of its optimizers, read from its source files: timm is not imported, as it imports torch.

    Empty where timm is not installed, or its source has another form.

    Args:
        part: ``optim`` or ``models``.
    """
    timm = find_spec("timm")
    if timm is None:
        return frozenset()
    root = Path(next(iter(timm.submodule_search_locations or ())))
    files = [root / "optim" / "_optim_factory.py"]
    # entries, aliases, and the names of bitsandbytes' optimizers, which are in tuples
    pattern = r"(?:^\s+name=|register_alias\(|^\s+(?=[\"']bnb))[\"'](\w+)[\"']"
    if part == "models":
        files = [*(root / "models").glob("*.py")]
        pattern = r"^@register_model\s*\n(?:@.*\n)*def (\w+)"
    texts = [file.read_text("utf-8") for file in files if file.is_file()]
    return frozenset(name for text in texts for name in re.findall(pattern, text, re.M))


def near(given: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that is spelt alike (:func:`nearest`, with the same arguments), as a question at the end of a message;
    "" without one.
    """
    return as_question(nearest(given, names, cutoff))


def nearest(given: object, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The known name that was probably meant, as a list of one; [] without one.

    It is the shortest name that begins with what was given, if that has three letters or more; else the one that is spelt
    most alike. Case does not count, and a hyphen equals an underscore. Where no name has a dot, only the part of the given
    word before its first dot is compared.

    Args:
        given: the unknown word.
        names: the known ones.
        cutoff: likeness from which on a name is near, the ratio of :mod:`difflib`: 1 is the same word, 0 shares no letter.
    """
    known = {}
    for name in names:
        plain = name.lower().replace("-", "_")
        known[plain] = name
    text = str(given).lower().replace("-", "_")
    has_dots = any("." in name for name in known)
    if not has_dots:
        text, _, _ = text.partition(".")
    found = []
    if len(text) > 2:
        found = [name for name in known if name.startswith(text)]
    found.sort(key=len)
    if not found:
        found = difflib.get_close_matches(text, known, 1, cutoff)
    return [known[name] for name in found[:1]]


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

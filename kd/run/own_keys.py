"""A command's own ``key=value`` items. Imports nothing heavy."""

import re
from collections.abc import Mapping
from pathlib import Path

from kd.errors import UserError, did_you_mean
from kd.run.request import Request


def take(request: Request, *keys: str) -> dict[str, str]:
    """Removes a command's own ``key=value`` items from the request; the last of each counts.

    Returns:
        The text of each key that was given.
    """
    taken: dict[str, str] = {}
    others: list[str] = []
    for item in request.overrides:
        key, _, text = item.partition("=")
        if key in keys:
            taken[key] = text
        else:
            others.append(item)
    request.overrides = others
    return taken


def refuse_words(request: Request, most: int = 0, hint: str = "recipes recipe=NAME") -> None:
    """Refuses words of a command line that are no settings, of a command that takes at most so many.

    Args:
        request: the command line.
        most: how many words the command takes (a run's folder is one).
        hint: what the command's words look like, beside ``key=value``.

    Raises:
        UserError: the first word too many.
    """
    if len(request.rest) > most:
        raise UserError(f"what is '{request.rest[most]}'? Settings are key=value, {hint}")


def whole_number(
    own: Mapping[str, object], key: str, default: int, low: int = 1, high: int | None = None
) -> int:
    """A whole number from ``low`` to ``high`` among a command's own keys; ``default`` without one.

    ``high`` of None: no limit but nine digits.

    Raises:
        UserError: anything else.
    """
    text = str(own.get(key, default))
    if re.fullmatch(r"\d{1,9}", text, re.ASCII):
        number = int(text)
        if low <= number and (not high or number <= high):
            return number
    if high:
        allowed = f"from {low} to {high}"
    else:
        allowed = f">= {low}"
    raise UserError(f"{key}: must be a whole number {allowed}, got '{text}'")


def whole_numbers(own: Mapping[str, str], key: str, default: str) -> list[int]:
    """The whole numbers > 0 of a command's own key, with commas between (brackets and blanks beside the commas are
    allowed), sorted, each once.

    Args:
        own: the command's keys.
        key: of the numbers.
        default: their text where it is not given.

    Raises:
        UserError: anything else.
    """
    numbers: set[int] = set()
    text = own.get(key, default).strip("[]")
    for part in text.split(","):
        word = part.strip()
        if not re.fullmatch(r"\d+", word, re.ASCII) or int(word) == 0:
            raise UserError(
                f"{key}: must be whole numbers > 0 with commas between, got '{own[key]}'"
            )
        numbers.add(int(word))
    return sorted(numbers)


def positive(key: str, text: str, below: float = 1e6, or_zero: bool = False) -> float:
    """The number in ``text``: > 0 (or 0 where ``or_zero``) and < ``below``.

    ``below`` keeps a slip of the keyboard out; ``math.inf`` allows any finite number.

    Raises:
        UserError: anything else; ``key`` is named.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < below or (or_zero and value == 0)):
        allowed = f"{'>=' if or_zero else '>'} 0{f' and < {below:g}' if value >= below else ''}"
        raise UserError(f"{key}: must be a number {allowed}, got '{text}'")
    return value


def truth(own: Mapping[str, str], key: str) -> bool:
    """A yes or no of a command's own keys: ``true`` or ``false`` in any case; False where it is not given.

    Raises:
        UserError: anything else.
    """
    text = own.get(key, "false").lower()
    if text not in ("true", "false"):
        raise UserError(f"{key}: must be true or false, got '{own[key]}'")
    return text == "true"


def out_path(own: Mapping[str, str]) -> Path | None:
    """The file or folder that ``out=`` of a command's own keys names; None where it is not given.

    Raises:
        UserError: it is empty: as a path that would be the working directory.
    """
    text = own.get("out")
    if text is None:
        return None
    if not text:
        raise UserError("out: must name a file or a folder, got nothing")
    return Path(text)


def take_all(request: Request, *keys: str, of_data: bool = True) -> dict[str, str]:
    """Removes a command's own items; refuses all others, but for those of the data and the teachers (``of_data``).

    Args:
        request: loses the own items.
        keys: the command's own keys.
        of_data: whether ``data.*`` and ``model.teacher*`` stay in the request, as settings of a finished run.

    Returns:
        The text of each own key that was given.

    Raises:
        UserError: another key.
    """
    own = take(request, *keys)
    foreign = [
        item
        for item in request.overrides
        if not (of_data and item.startswith(("data.", "model.teacher")))
    ]
    if foreign:
        key, _, _ = foreign[0].partition("=")
        known = [f"{own_key}=" for own_key in keys]
        if of_data:
            known.append("data.*")
        raise UserError(f"no key '{key}' (it takes {', '.join(known)}){did_you_mean(key, keys)}")
    return own

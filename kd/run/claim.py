"""The keys of a certificate: ``margin=``, ``confidence=``, ``groups=``. Imports nothing heavy."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from kd.errors import UserError
from kd.proof.certificate import ProofMargin

KEYS = ("margin", "confidence", "groups")
"""The command's own keys that :func:`claim_of` reads."""


@dataclass(frozen=True)
class Claim:
    """What ``margin=`` asks for, checked."""

    wanted: ProofMargin
    """Margin (a fraction: ``margin=1`` is 0.01) and confidence."""
    groups: re.Pattern[str] | None = None
    """Its first brackets match what pictures that belong together share in their names; None: each is its own group."""


def claim_of(options: Mapping[str, str], has_cascade: bool = False) -> Claim | None:
    """The claim of a command's own keys; None without ``margin``.

    Args:
        options: the keys that were given, as text; ``margin`` in points (hundredths).
        has_cascade: the command takes ``cascade=true`` too, which reads ``confidence``; for the message.

    Raises:
        UserError: a value out of range, or a key that has no effect without ``margin``.
    """
    if "margin" not in options:
        for key in ("confidence", "groups"):
            if key in options:
                other = " or cascade=true" if key == "confidence" and has_cascade else ""
                raise UserError(f"{key}: has no effect without margin=POINTS{other}")
        return None
    margin = number_between(
        options, "margin", low=0, high=100, allowed="a number of points > 0 and < 100"
    )
    confidence = confidence_of(options)
    groups = None
    if "groups" in options:
        groups = _pattern(options["groups"])
    return Claim(ProofMargin(margin / 100, confidence), groups)


def confidence_of(options: Mapping[str, str]) -> float:
    """The confidence of a command's own keys, one-sided, > 0.5 and <= 0.999; 0.95 where none is given.

    The exact test spends :data:`kd.proof.paired.NUISANCE`, 0.0001, of the error on the share of pictures on which the
    models differ; above 0.999 too little would be left.

    Raises:
        UserError: out of range.
    """
    given = {"confidence": "0.95", **options}
    above_most = math.nextafter(0.999, 1)
    return number_between(
        given, "confidence", low=0.5, high=above_most, allowed="a number > 0.5 and <= 0.999"
    )


def number_between(
    options: Mapping[str, str], key: str, low: float, high: float, allowed: str
) -> float:
    """A number between two bounds, without these.

    Args:
        options: a command's own keys.
        key: of the number.
        low: it is larger.
        high: it is smaller.
        allowed: what is allowed, in words.

    Raises:
        UserError: anything else.
    """
    with suppress(ValueError):
        value = float(options[key])
        if low < value < high:
            return value
    raise UserError(f"{key}: must be {allowed}, got '{options[key]}'")


def _pattern(text: str) -> re.Pattern[str]:
    """The regular expression of ``groups=``; a user's error for a text that is none, or without a group in brackets."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UserError(f"groups: '{text}' is not a regular expression: {error}") from error
    if pattern.groups < 1:
        raise UserError(
            f"groups: must have brackets around what pictures that belong together share, "
            f"such as groups='(.*)_\\d+\\.jpg', got '{text}'"
        )
    return pattern

"""The keys of ``kd-eval cascade=true``. Imports nothing heavy."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kd.errors import UserError
from kd.proof.cascade import SCORES, Goal, Score
from kd.run.claim import confidence_of, number_between
from kd.run.own_keys import truth

KEYS = ("cascade", "accuracy", "share", "latency_ms", "score")
"""The command's own keys that :func:`wish_of` reads, beside ``margin`` and ``confidence``."""
GOALS = ("accuracy", "share", "latency_ms")
"""Keys of which at most one may be given."""


@dataclass(frozen=True)
class CascadeWish:
    """What a cascade should reach, checked."""

    goal: Goal | None
    """None where milliseconds are given: these become a share once both models are timed."""
    text: str
    """The goal as it was given."""
    confidence: float
    """With which the goal is met, > 0.5 and <= 0.999."""
    score: Score
    """The measure of how sure the student is (:data:`kd.proof.cascade.SCORES`)."""
    latency_ms: float | None = None
    """Most milliseconds that a picture takes, on average over those that the student alone answers and those that the
    teacher is asked for too; None: the goal is no time."""


def wish_of(options: Mapping[str, str]) -> CascadeWish | None:
    """The wish of a command's own keys; None without ``cascade=true``.

    Without a goal it is ``accuracy=teacher``, within ``margin`` points (hundredths; 1 where it is not given).

    Raises:
        UserError: a value out of range, two goals, or a key that has no effect.
    """
    if not truth(options, "cascade"):
        for key in KEYS[1:]:
            if key in options:
                raise UserError(f"{key}: has no effect without cascade=true")
        return None
    if "groups" in options:
        raise UserError("groups: has no effect on cascade=true")
    goals = [key for key in GOALS if key in options]
    if len(goals) > 1:
        raise UserError(f"{goals[1]}: can't be given together with {goals[0]}=: one goal")
    score = _score(options.get("score", "probability"))
    goal = None
    text = "accuracy=teacher"
    latency = None
    if "latency_ms" in options:
        latency = number_between(options, "latency_ms", low=0, high=1e6, allowed="a number > 0")
        text = f"latency_ms={latency:g}"
    elif "share" in options:
        share = number_between(options, "share", low=0, high=1, allowed="a number > 0 and < 1")
        goal = Goal(share=share)
        text = f"share={share:g}"
    else:
        text = f"accuracy={options.get('accuracy', 'teacher')}"
        goal = _accuracy(options)
    if "margin" in options and text != "accuracy=teacher":
        raise UserError(f"margin: has no effect on {text}; it belongs to accuracy=teacher")
    return CascadeWish(goal, text, confidence_of(options), score, latency)


def _score(text: str) -> Score:
    """The score of that name; a user's error lists the scores there are."""
    for score in SCORES:
        if text == score:
            return score
    raise UserError(f"score: must be one of {', '.join(SCORES)}, got '{text}'")


def _accuracy(options: Mapping[str, str]) -> Goal:
    """The accuracy that a cascade is to reach: ``teacher`` less ``margin`` points, ``0.99*teacher``, or a number in (0,
    1). A user's error for anything else.
    """
    text = options.get("accuracy", "teacher")
    allowed = "teacher, a share of it such as 0.99*teacher, or a number > 0 and < 1"
    if text == "teacher":
        given = {"margin": "1", **options}
        margin = number_between(
            given, "margin", low=0, high=100, allowed="a number of points > 0 and < 100"
        )
        return Goal(of_teacher=margin / 100)
    match = re.fullmatch(r"(\d*\.?\d+)\*teacher", text)
    if match and not 0 < float(match[1]) < 1:
        raise UserError(f"accuracy: must be {allowed}, got '{text}'")
    number = number_between(
        {"accuracy": match[1] if match else text}, "accuracy", low=0, high=1, allowed=allowed
    )
    if match:
        return Goal(share_of_teacher=number)
    return Goal(accuracy=number)

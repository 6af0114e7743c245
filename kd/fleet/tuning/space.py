"""What a search may vary: choices and ranges, by configuration key."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.storage.elsewhere import yaml_of

if TYPE_CHECKING:
    import optuna

FORMS = "[a, b, c] a choice, 1..8 integers, 0.1..0.9 any number between, log:1e-5..1e-3 likewise on a log scale"


@dataclass(frozen=True)
class Space:
    """The values that a search may give one key: choices, or a range with both ends included."""

    key: str
    """Key of the configuration."""
    choices: tuple[Any, ...] | None = None
    """The values to choose from; None for a range."""
    low: float = 0
    """The least value of a range."""
    high: float = 0
    """The largest value; both ends are integers or both are floats."""
    log: bool = False
    """Whether the range is even on a logarithmic scale."""
    above: str | None = None
    """A searched key whose choice decides whether this key exists; None: it exists in every trial."""
    under: tuple[Any, ...] = ()
    """The choices of :attr:`above` under which this key exists; not used where ``above`` is None."""

    @property
    def integer(self) -> bool:
        """Whether it is a range of integers."""
        return self.choices is None and isinstance(self.low, int)

    @property
    def labels(self) -> list[Any]:
        """The choices as Optuna stores them, in the same order: a list, dict or None as its JSON; [] for a range."""
        plain = str | int | float | bool
        return [c if isinstance(c, plain) else json.dumps(c) for c in self.choices or ()]

    def examples(self) -> list[Any]:
        """Values by which one checks that the configuration takes the space: all choices, or both ends."""
        if self.choices is not None:
            return list(self.choices)
        return [self.low, self.high]

    def suggest(self, trial: "optuna.trial.BaseTrial") -> object:
        """The trial's value for this key, chosen by the sampler: a choice as given, not as its label.

        Asked again of one trial, Optuna returns the value that it remembers.
        """
        if self.choices is not None:
            labels = self.labels
            label = trial.suggest_categorical(self.key, labels)
            place = labels.index(label)
            return self.choices[place]
        if self.integer:
            low = int(self.low)
            high = int(self.high)
            return trial.suggest_int(self.key, low, high, log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    def text(self) -> str:
        """The space as one writes it on a command line; a resumed search compares it."""
        if self.choices is not None:
            return json.dumps(self.choices)
        return f"{'log:' if self.log else ''}{self.low}..{self.high}"


def space_of(key: str, text: object) -> Space:
    """A space from the command line or from YAML.

    Args:
        key: of the configuration.
        text: a list of choices, or a range as text (:data:`FORMS`).

    Returns:
        The space, which exists in every trial. Choices that are text and look like a number become one; a range with a
        float end is one of floats.

    Raises:
        UserError: none of these forms, an empty list or range, or a range on a log scale that does not begin above 0.

    >>> space_of("optim.lr", "log:1e-5..1e-3")
    Space(key='optim.lr', choices=None, low=1e-05, high=0.001, log=True, above=None, under=())
    >>> space_of("data.batch_size", "[16, 32]").choices
    (16, 32)
    """
    wrong = UserError(f"search.{key}: {FORMS}; got {text}")
    value = text
    if isinstance(text, str):
        try:
            value = yaml_of(text)
        except ValueError as error:
            raise wrong from error
    if isinstance(value, list):
        if not value:
            raise UserError(f"search.{key}: must have a choice at least, got []")
        return Space(key, tuple(_number(v) if isinstance(v, str) else v for v in value))
    log = isinstance(value, str) and value.startswith("log:")
    ends = [_number(word.strip()) for word in str(value).removeprefix("log:").split("..", 1)]
    if len(ends) != 2:
        raise wrong
    low, high = ends
    if isinstance(low, str) or isinstance(high, str):
        raise wrong
    if isinstance(low, float) or isinstance(high, float):
        low, high = float(low), float(high)
    if not low < high:
        raise UserError(
            f"search.{key}: an empty range, {text}: the first number must be below the second"
        )
    if log and low <= 0:
        raise UserError(f"search.{key}: a log scale begins above 0, got {text}")
    return Space(key, None, low, high, log)


def _number(text: str) -> str | int | float:
    """The finite number that a text is (YAML takes 1e-5 for a text); else the text."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        number = float(text)
        if math.isfinite(number):
            return number
    return text


def suggest(spaces: Sequence[Space], trial: "optuna.trial.BaseTrial") -> dict[str, Any]:
    """A trial's values by key, as :meth:`Space.suggest` gives them; one that does not exist under its choices is left
    out.

    Args:
        spaces: of all keys; one that others depend on comes before them.
        trial: of Optuna, which remembers the values under the same keys.
    """
    chosen: dict[str, Any] = {}
    for space in spaces:
        if space.above is not None:
            exists = space.above in chosen and chosen[space.above] in space.under
            if not exists:
                continue
        chosen[space.key] = space.suggest(trial)
    return chosen

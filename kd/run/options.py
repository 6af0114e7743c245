"""A command's own words: ``key=value`` options as a typed group, and the help that is made of it. Imports nothing heavy.

The group is checked as settings are (:mod:`kd.config.kinds`): type, default, range and help of an option stand once.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import field
from dataclasses import fields as declared
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast, get_origin

from pydantic import TypeAdapter, ValidationError

from kd.config.kinds import (
    Checked,
    fields,
    problem_in,
)
from kd.config.kinds import (
    read as kind_of,
)
from kd.config.suggest import near, why_needless
from kd.errors import UserError
from kd.run.request import Request
from kd.run.resolve import Word, read_word

Group = TypeVar("Group", bound="CommandOptions")
Others = Literal["run", "data", "none"]
"""What a command takes beside its own options: any setting of a run, those of data and teachers, or nothing."""


class CommandOptions(Checked):
    """The base of a command's options. The text under a field is its help; a field of ``kw_only`` is no option.

    A dict of texts is given a key at a time: ``channel.train=URL`` and ``channel.val=URL`` for the field ``channel``.
    """

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Options that have no effect alone: name -> words (``margin=POINTS``), one of which must be given too."""
    EXCLUDES: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Options that can't be given together: name -> names."""
    OTHERS: ClassVar[Others] = "none"
    """What the command line may have beside them."""
    WORDS: ClassVar[tuple[int, int]] = (0, 0)
    """Fewest and most words that are no ``key=value``; a command of none needs a recipe."""
    HINT: ClassVar[str] = "recipes recipe=NAME"
    """Of a command without words: what there is beside ``key=value``, for the message about a word."""
    given: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The names of those that were given."""

    def __post_init__(self) -> None:
        """Refuses options that have no effect, or exclude each other."""
        for name, others in self.EXCLUDES.items():
            if not self._is_on(name):
                continue
            for other in others:
                if self._is_on(other):
                    raise UserError(f"{name}: can't be given together with {other}=")
        for name, words in self.NEEDS.items():
            if name not in self.given:
                continue
            needed = [word.partition("=")[0] for word in words]
            if not any(getattr(self, other) for other in needed):
                allowed = " or ".join(words)
                raise UserError(f"{name}: has no effect without {allowed}")

    def _is_on(self, name: str) -> bool:
        return name in self.given and getattr(self, name) is not False


def names_of(group: type[CommandOptions]) -> list[str]:
    """The names of a command's options, in order."""
    return [one.name for one in declared(group) if not one.kw_only]


def take(request: Request, *keys: str) -> dict[str, str]:
    """Removes ``key=value`` items from a command line; the last of each counts.

    Returns:
        The text of each key that was given.
    """
    items = [item.partition("=") for item in request.overrides]
    request.overrides = ["".join(item) for item in items if item[0] not in keys]
    return {key: text for key, _, text in items if key in keys}


def take_options(group: type[Group], request: Request) -> Group:
    """Takes a command's options out of a command line.

    Args:
        group: the options.
        request: loses them.

    Raises:
        UserError: another key than the group's :attr:`CommandOptions.OTHERS`, a recipe for a command of words, or a value
            that an option does not take.
    """
    names = names_of(group)
    dicts = tuple(f"{one.name}." for one in declared(group) if one.default_factory is dict)
    for item in request.overrides:
        key, _, _ = item.partition("=")
        if key.startswith(dicts):
            names.append(key)
    taken = take(request, *names)
    of_no_use = {
        "recipe": group.WORDS[1] and request.recipe,
        "config": group.OTHERS == "none" and request.overlays,
    }
    for key, given in of_no_use.items():
        if given:
            raise UserError(f"{key}: has no effect here: a run has settings of its own")
    if group.OTHERS != "run":
        refuse_others(request, names, of_data=group.OTHERS == "data")
    return options_of(group, taken)


def read_options(group: type[Group], request: Request) -> Group | None:
    """The options of a command line as of :func:`take_options`; None where the command's help is to be shown.

    That is where the line asks for it, or lacks the recipe or the words that the command needs.
    """
    if "help" in request.flags:
        return None
    fewest, most = group.WORDS
    if most:
        enough = fewest <= len(request.rest) <= most
    else:
        refuse_words(request, group.HINT)
        enough = request.recipe is not None
    return take_options(group, request) if enough else None


def options_of(group: type[Group], given: Mapping[str, object]) -> Group:
    """The options of a group by name, text as on a command line; a UserError names the option that is wrong."""
    known = fields(cast(Any, group))
    values: dict[str, Any] = {}
    for key, value in given.items():
        name, _, inner = key.partition(".")
        if inner:
            values.setdefault(name, {})[inner] = value
        else:
            values[name] = _read(name, value, known[name].kind)
    try:
        made: Group = _validator(cast(Any, group)).validate_python(
            {**values, "given": frozenset(values)}
        )
    except ValidationError as error:
        key, problem = problem_in(error)
        raise UserError(f"{key}: {problem}") from error
    return made


@cache
def _validator(group: type[CommandOptions]) -> TypeAdapter[Any]:
    return TypeAdapter(group)


def _read(key: str, value: object, kind: object) -> object:
    """An option's text as a value of its kind; a list may lack its brackets, a path stays text. Other values stay as they
    are; an empty text is a UserError.
    """
    if not isinstance(value, str):
        return value
    if value == "":
        raise UserError(f"{key}: must not be empty")
    types = [get_origin(one) or one for one in kind_of(kind).types]
    if list in types:
        return read_word(f"[{value.removeprefix('[').removesuffix(']')}]")
    if Path in types:
        return value
    return Word(value, read_word(value)).of(kind)


def refuse_others(request: Request, names: Sequence[str], of_data: bool) -> None:
    """Refuses settings that a command does not take.

    Args:
        request: the command line without the command's options.
        names: of these.
        of_data: ``data.*`` and ``model.teacher*`` are taken, as settings of a finished run.

    Raises:
        UserError: names the first one.
    """
    taken = ("data.", "model.teacher") if of_data else ()
    for item in request.overrides:
        key, _, _ = item.partition("=")
        if item.startswith(taken):
            continue
        known = [f"{name}=" for name in names]
        if of_data:
            known.append("data.*")
        takes = ", ".join(known) or "none"
        remedy = f" (it takes {takes}){near(key, names)}"
        if not near(key, names, 0.8):
            remedy = why_needless(f"option:{key}", key) or remedy
        raise UserError(f"no key '{key}'{remedy}")


def refuse_words(request: Request, hint: str = CommandOptions.HINT) -> None:
    """Raises a UserError for the first word of a command line that is no setting; ``hint`` as of
    :attr:`CommandOptions.HINT`.
    """
    for word in request.rest:
        raise UserError(f"what is '{word}'? Settings are key=value, {hint}")


def options_help(group: type[CommandOptions], base: type[CommandOptions] = CommandOptions) -> str:
    """The options as ``--help`` prints them: a line or more each, with the default (of a switch its opposite, as one would
    type it) and the text under the field.

    Args:
        group: the options.
        base: whose options are left out.
    """
    lines = []
    names = names_of(group)
    for name in names[len(names_of(base)) :]:
        key = fields(cast(Any, group))[name]
        default = getattr(options_of(group, {}), name)
        shown = "" if default is None else str(default)
        if isinstance(default, list):
            shown = ",".join(map(str, default))
        elif isinstance(default, bool):
            shown = str(not default).lower()
        elif isinstance(default, float):
            shown = f"{default:.10g}"
        elif isinstance(default, dict):
            name, shown = f"{name}.NAME", ""
        first, *others = textwrap.wrap(key.text, 98)
        word = f"{name}={shown}"
        lines.append(f"  {word:<18} {first}" if len(word) < 19 else f"  {word}  {first}")
        lines += [f"{'':<21}{line}" for line in others]
    return "".join(f"{line}\n" for line in lines)

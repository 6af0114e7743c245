"""Types of settings: what each takes, as YAML and a command line write it, and what is said of a value that it refuses.

A *kind* is a type as :mod:`typing` has it: ``float | None``, ``Annotated[int, Range("> 0")]``, ``dict[str, Any]``.
:mod:`kd.settings` and the arguments of classes (:mod:`kd.config.parts`) are made of these; pydantic checks values by them.
"""

import dataclasses
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import pydantic.dataclasses
from pydantic import (
    ConfigDict,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from kd.config.suggest import near, timm_names
from kd.errors import UserError

# by the sign in a Range's text
COMPARED = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
CONFIG = ConfigDict(
    extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False, arbitrary_types_allowed=True,
    use_attribute_docstrings=True,
)  # fmt: skip
"""Of all groups: a number may be text (a folder called 7), NaN and infinity are no numbers; the text under a field is its
description."""
TAKE_WORDS = ("strategy", "profiler", "plugin", "logger", "schedule")
"""Kinds of classes whose settings also take Lightning's words (ddp, simple, gpu), or a truth value."""
TYPES: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "settings (NAME: VALUE)",
    list: "a list",
    tuple: "a list",
}
"""What types are called."""
Handler: TypeAlias = Callable[[object], Any]
Value: TypeAlias = Any
"""What YAML can hold, or what a setting is made of it."""


class PartChecker(Protocol):
    """What a class that settings name is checked by: the context of a validation."""

    def part(self, value: object, kind: str) -> object:
        """The class's node in full, of its node as the settings give it."""
        ...


@dataclasses.dataclass(frozen=True)
class AnyClass:
    """Marks the type of a setting or an argument that takes a class by its path."""

    kind: str
    """What it takes: ``loss``, ``source``, ..."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """A class's node is checked by the context of the validation; without one, it is an object already."""

        def node(value: object, info: ValidationInfo) -> object:
            return info.context.part(value, self.kind) if info.context else value

        return core_schema.with_info_plain_validator_function(node)


class Duration:
    """A duration that is written as ``0:30:00``, ``1 day, 0:00:00``, ``PT30M`` or as seconds; it stays as it is written."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Takes what is one (:func:`duration`), but for a truth value."""

        def written(value: object) -> object:
            if isinstance(value, bool):
                raise ValueError("no duration")
            duration(value)
            return value

        return core_schema.no_info_plain_validator_function(written)


def duration(value: object) -> timedelta:
    """The time that a :class:`Duration` says.

    Raises:
        ValidationError: pydantic's, for any other value.
    """
    with suppress(TypeError, ValueError):
        value = float(str(value))
    return TypeAdapter(timedelta).validate_python(value)


TYPES[Duration] = "a duration (0:30:00, or seconds)"


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers that a setting takes, of a list or dict each of its members; goes into the type's ``Annotated``.

    >>> Range("> 0 and <= 1").refuses(2)
    'must be > 0 and <= 1'
    """

    text: str
    """Bounds, joined by ``and``: a sign of :data:`COMPARED`, a blank, a number."""

    def refuses(self, value: object) -> str:
        """What is wrong with a value: "must be > 0"; "" for one that is inside, or no number.

        Of a list or dict each number must be inside. NaN is outside of every range; a truth value counts as 0 or 1.
        """
        several: Iterable[object] = [value]
        if isinstance(value, dict):
            several = value.values()
        elif isinstance(value, list | tuple):
            several = value
        numbers = [one for one in several if isinstance(one, int | float)]
        for part in self.text.split(" and "):
            sign, limit = part.split()
            compare = COMPARED[sign]
            if not all(compare(number, float(limit)) for number in numbers):
                return f"must be {self.text}"
        return ""


@dataclasses.dataclass(frozen=True)
class Like:
    """Texts that a setting takes; a number counts as it is written."""

    pattern: str
    """A regular expression for the whole of it."""

    text: str
    """What a message says of any other text, after the field's name."""

    def refuses(self, value: object) -> str:
        """What is wrong with a value: :attr:`text`; "" for one that fits, and for what is no text and no number (a truth
        value, None, a list).
        """
        text = isinstance(value, str | int | float) and not isinstance(value, bool)
        return self.text if text and not re.fullmatch(self.pattern, str(value)) else ""

    @property
    def words(self) -> list[str]:
        """Those alternatives of the pattern that the message names."""
        patterns = self.pattern.split("|")
        return [word for word in re.findall(r"\w+", self.text) if word in patterns]


@dataclasses.dataclass(frozen=True)
class TimmName:
    """Names of timm's models or optimizers, read from its source."""

    part: Literal["models", "optim"]
    also: tuple[str, ...] = ()
    """Further names."""

    def refuses(self, value: object) -> str:
        """What is wrong with a name that timm lacks; "" for a name with a hub's prefix, and without timm."""
        name = str(value).removeprefix("timm/")
        known = timm_names(self.part)
        timm = sys.modules.get("timm")
        is_known = name.partition(".")[0] in known or value in (None, "", *self.also)
        if is_known or not known:
            return ""
        if self.part == "optim":
            return "must be one of timm's optimizers"
        # where timm is imported, models of one's own may be registered
        if ":" in name or (timm and timm.is_model(name)):
            return ""
        if "/" in name:
            return "must be one of timm's models (model.teacher=OWNER/NAME loads one of transformers' from the hub)"
        return "must be one of timm's models (builder=CLASS takes one of your own)"

    @property
    def words(self) -> list[str]:
        """The names."""
        return sorted(timm_names(self.part))


Limit: TypeAlias = Range | Like | TimmName
TimeLimit: TypeAlias = Annotated[
    str | dict[str, int],
    Like(r"\d{1,6}(:\d{1,6}){3}", "must be DAYS:HOURS:MINUTES:SECONDS, each below 1000000"),
    Range(">= 0 and < 1000000"),
]
"""As Lightning's Timer takes it: a text, or ``timedelta``'s arguments by name."""


def parts_of(kind: object) -> Iterator[Any]:
    """What a type is made of: the members of unions, also of those in it, and the marks of ``Annotated``; of what a
    container holds nothing.

    >>> [*parts_of(Annotated[int, Range("> 0")] | list[float] | None)]
    [<class 'int'>, Range(text='> 0'), list[float], <class 'NoneType'>]
    """
    if get_origin(kind) in (Union, UnionType, Annotated):
        for part in get_args(kind):
            yield from parts_of(part)
    else:
        yield kind


def plain_members(kind: object) -> list[Any]:
    """The types of a union without their limits, also of unions in it.

    >>> plain_members(Annotated[int, Range("> 0")] | list[float])
    [<class 'int'>, list[float]]
    """
    return [part for part in parts_of(kind) if not isinstance(part, AnyClass | Limit)]


def marks_in(kind: object) -> Iterator[Any]:
    """All marks in a type, also of what its containers hold."""
    yield from getattr(kind, "__metadata__", ())
    for part in get_args(kind):
        yield from marks_in(part)


def words_in(kind: object) -> list[object]:
    """The words (members of ``Literal``) that a type takes; those of a container's entries are none of its own."""
    literals = [part for part in parts_of(kind) if get_origin(part) is Literal]
    return [word for literal in literals for word in get_args(literal)]


def inner_kind(kind: object, container: type) -> object:
    """The type of what a dict or list holds (``container``: which of the two); ``Any`` where nothing is said of it."""
    for part in parts_of(kind):
        if get_origin(part) is container and get_args(part):
            return get_args(part)[-1]
    return Any


def class_in(kind: object) -> AnyClass | None:
    """The mark of a type that takes a class (:class:`AnyClass`), alone or in a union or container; else None."""
    return next((mark for mark in marks_in(kind) if isinstance(mark, AnyClass)), None)


def group_in(kind: object) -> type | None:
    """The group of settings that a type takes; None where it takes none."""
    groups = (p for p in parts_of(kind) if isinstance(p, type) and dataclasses.is_dataclass(p))
    return next(groups, None)


def shown(kind: object) -> str:
    """A type in words, with its ranges: ``a number or null > 0``."""
    ranges = [limit.text for limit in limits(kind) if isinstance(limit, Range)]
    null = " or null" if NoneType in plain_members(kind) else ""
    return " ".join([in_words(kind) + null, *ranges])


# -- a value and its type --------


def check(kind: object, value: object, handler: Handler, parts: PartChecker | None = None) -> Value:
    """The value of a setting in its type and within its limits, of what YAML or a command line has.

    Args:
        kind: the setting's type.
        value: as it is given.
        handler: pydantic's check of the type.
        parts: checks classes; None: a class is an object already.

    Raises:
        ValueError: the type refuses it; the text follows the setting's key.
        ValidationError: something below it is refused.
    """
    mark = class_in(kind)
    if parts is not None and mark and inner_kind(kind, dict) is Any:
        takes_any = value is None or mark.kind in TAKE_WORDS
        if isinstance(value, Mapping | list) or not takes_any:
            return parts.part(value, mark.kind)
    words = allowed_words(kind)
    try:
        checked = handler(spelled(kind, value))
    except ValidationError as error:
        kinds = [part for part in plain_members(kind) if part is not NoneType]
        if group_in(kind) or (len(kinds) == 1 and error.errors()[0]["loc"]):
            raise
        problem = "can't be null" if value is None else f"must be {in_words(kind)}, got '{value}'"
        raise ValueError(problem + near(value, words)) from error
    for limit in limits(kind):
        problem = limit.refuses(checked)
        if problem:
            got = f"'{value[:80]}'" if isinstance(value, str) else value
            raise ValueError(f"{problem}, got {got}{near(value, words)}")
    return checked


def spelled(kind: object, value: object) -> object:
    """A value as Python writes it: YAML 1.1 reads the words ``on`` and ``off`` as truth values, which are no numbers.

    Raises:
        ValidationError: a truth value where the type takes none, or a number or a text in the place of one.
    """
    types = {get_origin(part) or part for part in plain_members(kind)}
    words = words_in(kind)
    if Any in types or type(value) in types or any(value is word for word in words):
        return value
    if isinstance(value, bool):
        word = "on" if value else "off"
        if word in words:
            return word
        raise refused("", "")
    if bool in types and isinstance(value, int | float | str) and value not in words:
        raise refused("", "")
    return value


def refused(name: str, problem: str) -> ValidationError:
    """The error for a field of a group that its others contradict: ``milestones`` and ``must ascend``."""
    error = PydanticCustomError("refused", "{problem}", {"problem": problem})
    place = (name,) if name else ()
    return ValidationError.from_exception_data("", [{"type": error, "loc": place, "input": None}])


def in_words(kind: object) -> str:
    """What a type takes, in words: ``a whole number or one of auto``; null in a union is left out."""
    takes_class = any(isinstance(part, AnyClass) for part in parts_of(kind))
    words: dict[str, None] = {}
    for part in plain_members(kind):
        plain = get_origin(part) or part
        inside = get_args(part)
        if part is NoneType:
            continue
        if plain is Any:
            word = "a class" if takes_class else "any value"
        elif plain is Literal:
            values = dict.fromkeys(map(str, inside))
            word = f"one of {', '.join(values)}"
        elif plain is tuple and ... not in inside:
            word = f"a list of {len(inside)}"
        else:
            name = getattr(plain, "__name__", str(plain))
            word = TYPES.get(plain, name)
        words[word] = None
    return " or ".join(words)


def allowed_words(kind: object) -> list[str]:
    """The words that a type takes, for a suggestion: of each ``Literal``, and those of its limits."""
    words = [str(word) for word in words_in(kind)]
    for limit in limits(kind):
        if isinstance(limit, Like | TimmName):
            words += limit.words
    return words


def limits(kind: object) -> list[Limit]:
    """The limits in a type such as ``Annotated[int, Range("> 0")] | None``, also those in its parts; [] without any."""
    return [mark for mark in marks_in(kind) if isinstance(mark, Limit)]


@cache
def adapter(kind: object) -> TypeAdapter[Any]:
    """Pydantic's check of a type, made once; :func:`problem_in` says what it refuses."""

    def inside(value: object, handler: Handler) -> object:
        return check(kind, value, handler)

    whole: Any = Annotated[kind, WrapValidator(inside)]
    return TypeAdapter(whole, config=CONFIG)


def takes(kind: object, value: object) -> bool:
    """Whether a type takes a value; yes where only the class that is built can tell."""
    return not wrong(kind, value)


def wrong(kind: object, value: object) -> str:
    """What is wrong with a value of a type: "must be a number, got 'x'"; "" where it fits, and for ``${KEY}``."""
    if "${" in str(value):
        return ""
    try:
        adapter(kind).validate_python(value)
    except ValidationError as error:
        return problem_in(error)[1]
    return ""


def fitted(kind: object, value: object) -> object:
    """A value in a type, where it fits; else the value itself, of which the class that is built has to say more."""
    return value if wrong(kind, value) else adapter(kind).validate_python(value)


def problem_in(error: ValidationError) -> tuple[str, str]:
    """The first thing that is wrong: its key, and what is said of it after the key.

    Raises:
        UserError: it is one already.
    """
    first, *others = error.errors()
    for other in others:  # of a union the part that comes furthest
        is_of_it = other["loc"][:1] == first["loc"][:1]
        if is_of_it and len(other["loc"]) > len(first["loc"]):
            first = other
    names = [str(name) for name in first["loc"]]
    names = [name for name in names if name != "float" and "[" not in name]
    *above, last = names or [""]
    place = ".".join(above)
    if first["type"] == "missing":
        return place, f"needs {last} ({last}=VALUE)"
    mistake = first.get("ctx", {}).get("error")
    if isinstance(mistake, UserError):
        raise mistake from error
    problem = str(mistake or first["msg"])
    if problem.startswith(("Input should ", "String should ")):
        problem = f"must {problem.partition(' should ')[2]}"
        problem = re.sub(", unable to .*", "", problem)
        problem += f", got '{first['input']}'"
    if last.isdecimal():  # of a list
        return place, f"each {problem}"
    return f"{place}.{last}".lstrip("."), problem


# -- groups of settings --------


@cache
def kinds_of(group: type) -> dict[str, Any]:
    """The types of a group's fields, by name."""
    return get_type_hints(group, include_extras=True)


def texts_of(group: type) -> dict[str, str]:
    """What is written below each field of a group, by the field's name, in one line; "" where nothing is."""
    texts: dict[str, str] = {}
    bases: list[Any] = [*reversed(group.__mro__[:-1])]
    for base in bases:  # a class knows those of its own fields alone
        for name, field in base.__pydantic_fields__.items():
            words = (field.description or "").split()
            text = " ".join(words)
            texts[name] = text or texts.get(name, "")
    return texts


Group = TypeVar("Group", bound=type)


@dataclass_transform(field_specifiers=(dataclasses.field,))
def checked_group(cls: Group) -> Group:
    """Makes a class a group of settings: a dataclass whose fields are checked by their types, ranges and words.

    Built in Python, a group refuses what is wrong with a ValueError whose text begins with the field's name
    (``lr must be >= 0, got -1``), or with the UserError that its ``__post_init__`` raises.
    """
    made: Any = pydantic.dataclasses.dataclass(cls, config=CONFIG)
    validate = made.__init__
    order = [field.name for field in dataclasses.fields(made)]

    def checked(self: object, *args: object, **named: object) -> None:
        if len(args) <= len(order) and not set(order[: len(args)]) & set(named):
            named |= dict(zip(order, args, strict=False))  # so that an error names the field
            args = ()
        try:
            validate(self, *args, **named)
        except ValidationError as error:
            unknown = error.errors()[0]["type"] in ("unexpected_keyword_argument", "missing")
            text = " ".join(problem_in(error)).strip()
            raise (TypeError if unknown else ValueError)(text) from error

    made.__init__ = checked
    return made


@checked_group
class Checked:
    """The base of all groups: each field is checked by its type (:func:`check`)."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _check(cls, value: object, handler: Handler, info: ValidationInfo) -> Value:
        return check(kinds_of(cast(Any, cls))[str(info.field_name)], value, handler, info.context)


def group_of(
    name: str,
    kinds: Mapping[str, Any],
    defaults: Mapping[str, Callable[[], Any]],
    base: type = Checked,
) -> type:
    """A group of settings that is known by its fields.

    Args:
        name: of the class.
        kinds: the fields' types, by name.
        defaults: what makes the default of each field that has one.
        base: a group, whose fields it has too.
    """
    body: dict[str, Any] = {"__annotations__": dict(kinds)}
    body["__module__"] = __name__
    for field in kinds:
        factory: Any = defaults.get(field, dataclasses.MISSING)
        declared = dataclasses.field(kw_only=True, default_factory=factory)
        body[field] = declared
    made = type(name, (base,), body)
    return checked_group(made)


def as_tree(value: object) -> Value:
    """Groups as dicts of their fields, also in dicts and lists; any other value as it is."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: as_tree(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {name: as_tree(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_tree(inner) for inner in value]
    return value

"""Types of settings: what each takes, as YAML and a command line write it, and what is said of a value that it refuses.

A *kind* is a type as :mod:`typing` has it: ``float | None``, ``Annotated[int, Range("> 0")]``, ``dict[str, Any]``;
:func:`read` says what it is made of. :mod:`kd.settings` and the arguments of classes (:mod:`kd.config.parts`) are groups of
these; pydantic checks values by them.
"""

import dataclasses
import operator
import re
import sys
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeAlias,
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
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

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
    Any: "any value",
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


# -- marks of types --------


@dataclasses.dataclass(frozen=True)
class AnyClass:
    """Marks the type of a setting or an argument that takes a class by its path; the context of a validation checks the
    class's node (``part(node, kind)``), without one it is an object already.
    """

    kind: str
    """What it takes: ``loss``, ``source``, ..."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """The check of a node."""

        def node(value: object, info: ValidationInfo) -> object:
            return info.context.part(value, self.kind) if info.context else value

        return handler(Annotated[Any, PlainValidator(node)])


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
        bounds = [part.split() for part in self.text.split(" and ")]
        are_inside = all(
            COMPARED[sign](number, float(limit)) for sign, limit in bounds for number in numbers
        )
        return "" if are_inside else f"must be {self.text}"


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


# -- what a type is made of --------


@dataclasses.dataclass(frozen=True)
class TypeParts:
    """What a type is made of."""

    types: tuple[Any, ...]
    """The members of unions, also of unions in them, without marks; of what a container holds nothing."""
    limits: tuple[Limit, ...]
    """All limits, also of what a container holds."""
    part: str | None
    """The kind of class that it takes, alone, in a union or in a list; None: none, or several by name."""
    group: type | None
    """The group of settings that it takes."""
    entries: Any
    """The type of what a dict holds; ``Any`` where nothing is said of it."""
    items: Any
    """Likewise of a list."""

    @property
    def holds(self) -> bool:
        """Whether it takes settings by their names."""
        return bool(self.group or {dict, Any} & {get_origin(one) or one for one in self.types})

    def below(self, name: str) -> object:
        """The type of what it holds under a name; None where a group has no such field."""
        if self.group is None:
            return self.entries
        key = fields(self.group).get(name)
        return key.kind if key else None

    @property
    def words(self) -> list[object]:
        """The words (members of ``Literal``) that it takes; those of a container's entries are none of its own."""
        return [word for one in self.types if get_origin(one) is Literal for word in get_args(one)]

    @property
    def allowed(self) -> list[str]:
        """The words that it takes, for a suggestion: of each ``Literal``, and those of its limits."""
        words = [str(word) for word in self.words]
        for limit in self.limits:
            words += getattr(limit, "words", [])
        return words

    @property
    def text(self) -> str:
        """What it takes, in words: ``a whole number or one of auto``; null in a union is left out."""
        words = []
        for one in self.types:
            plain = get_origin(one) or one
            if plain is Literal:
                word = f"one of {', '.join(dict.fromkeys(map(str, get_args(one))))}"
            elif plain is tuple and ... not in get_args(one):
                word = f"a list of {len(get_args(one))}"
            elif plain is Any and self.part is not None:
                word = "a class"
            else:
                name = getattr(plain, "__name__", str(plain))
                word = TYPES.get(plain, name)
            words += [word] if one is not NoneType else []
        return " or ".join(dict.fromkeys(words))

    @property
    def shown(self) -> str:
        """The type in words, with its ranges: ``a number or null > 0``."""
        words = [self.text]
        if NoneType in self.types:
            words.append("or null")
        for limit in self.limits:
            if isinstance(limit, Range):
                words.append(limit.text)
        return " ".join(words)


READ: dict[int, tuple[object, TypeParts]] = {}
"""Types that were read, by their identity: ``int | str`` equals ``str | int``, but not in words."""


def read(kind: object) -> TypeParts:
    """What a type is made of; read once.

    >>> read(Annotated[int, Range("> 0")] | list[float] | None).types
    (<class 'int'>, list[float], <class 'NoneType'>)
    """
    if id(kind) in READ:
        return READ[id(kind)][1]
    types = tuple(_members(kind))
    held = {}
    for one in types:
        if get_args(one):
            held[get_origin(one)] = get_args(one)[-1]
    entries = held.get(dict, Any)
    items = held.get(list, Any)
    groups = [one for one in types if isinstance(one, type) and dataclasses.is_dataclass(one)]
    group = next(iter(groups), None)
    marks = [*_marks(kind)]
    limits = tuple(mark for mark in marks if isinstance(mark, Limit))
    by_name = [*map(id, _marks(entries))]
    part = None
    for mark in reversed(marks):
        if isinstance(mark, AnyClass) and id(mark) not in by_name:
            part = mark.kind
    READ[id(kind)] = kind, TypeParts(types, limits, part, group, entries, items)
    return READ[id(kind)][1]


def _members(kind: object) -> Iterator[Any]:
    """The types in a union, of one that is marked the type itself."""
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _members(one)
    else:
        yield kind


def _marks(kind: object) -> Iterator[Any]:
    """All marks in a type, also of what its containers hold."""
    yield from getattr(kind, "__metadata__", ())
    for one in get_args(kind):
        yield from _marks(one)


# -- a value and its type --------


def check_value(
    kind: object, value: object, handler: Handler, parts: PartChecker | None = None
) -> Value:
    """The value of a setting in its type and within its limits, of what YAML or a command line has.

    Args:
        kind: the setting's type.
        value: as it is given.
        handler: pydantic's check of the type.
        parts: checks classes (:class:`AnyClass`); None: a class is an object already.

    Raises:
        ValueError: the type refuses it; the text follows the setting's key.
        ValidationError: something below it is refused.
    """
    of = read(kind)
    if parts is not None and of.part is not None:
        takes_any = value is None or of.part in TAKE_WORDS
        if isinstance(value, Mapping | list) or not takes_any:
            return parts.part(value, of.part)
    try:
        checked = handler(spelled(of, value))
    except ValidationError as error:
        first, *_ = error.errors()
        kinds = [one for one in of.types if one is not NoneType]
        is_inside = first["loc"] and get_origin(kinds[0]) is not tuple
        if of.group or (len(kinds) == 1 and is_inside):
            raise
        problem = f"must be {of.text}, got '{value}'"
        if value is None:
            problem = "can't be null"
        raise ValueError(problem + near(value, of.allowed)) from error
    for limit in of.limits:
        problem = limit.refuses(checked)
        if problem:
            got = f"'{value[:80]}'" if isinstance(value, str) else value
            suggestion = near(value, of.allowed)
            raise ValueError(f"{problem}, got {got}{suggestion}")
    return checked


def spelled(of: TypeParts, value: object) -> object:
    """A value as Python writes it: YAML 1.1 reads the words ``on`` and ``off`` as truth values, which are no numbers.

    Raises:
        ValidationError: a truth value where the type takes none, or a number or a text in the place of one.
    """
    types = {get_origin(one) or one for one in of.types}
    words = of.words
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


@cache
def adapter(kind: object) -> TypeAdapter[Any]:
    """Pydantic's check of a type, made once; :func:`problem_in` says what it refuses."""

    def inside(value: object, handler: Handler) -> object:
        return check_value(kind, value, handler)

    whole: Any = Annotated[kind, WrapValidator(inside)]
    return TypeAdapter(whole, config=CONFIG)


def wrong(kind: object, value: object) -> str:
    """What is wrong with a value of a type: "must be a number, got 'x'"; "" where it fits, where only the class that is
    built can tell, and for ``${KEY}``.
    """
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
    first = error.errors()[0]
    *above, last = map(str, first["loc"] or [""])
    place = ".".join(above)
    if first["type"] == "missing":
        return place, f"needs {last} ({last}=VALUE)"
    mistake = first.get("ctx", {}).get("error")
    if isinstance(mistake, UserError):
        raise mistake from error
    problem = str(mistake or first["msg"])
    if problem.startswith(("Input should ", "String should ")):
        problem = re.sub(", unable to .*", "", f"must {problem.partition(' should ')[2]}")
        given = repr(str(first["input"]))  # one line, whatever it holds
        problem += f", got '{given[1:-1]}'"
    if last.isdecimal():  # of a list
        return place, f"each {problem}"
    return f"{place}.{last}".lstrip("."), problem


# -- groups of settings --------


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting, or one argument of a class."""

    name: str
    """The whole key (``optim.lr``); of a class's argument, or a field of a group, its own name until it has a place."""
    kind: Any
    """Its type; ``Any`` where only the class that is built can tell."""
    default: str
    """As Python writes it; empty where it must be given."""
    text: str
    """What it means; "" where nothing is said."""

    @property
    def value(self) -> object:
        """The default; a new object each time. None also where there is none (:attr:`default` is empty)."""
        return literal_eval(self.default or "None")

    @property
    def type(self) -> str:
        """The type as text, with its range: ``a number > 0``."""
        return read(self.kind).shown


@cache
def fields(group: type) -> dict[str, Key]:
    """The fields of a group that a user may give, by their names, in their order; what stands under one is its text."""
    kinds = get_type_hints(group, include_extras=True)
    texts: dict[str, str] = {}
    bases: list[Any] = [*reversed(group.__mro__[:-1])]
    for base in bases:  # a class knows the text of its own fields alone
        for name, described in base.__pydantic_fields__.items():
            of_table = base.__dataclass_fields__[name].metadata
            words = (described.description or of_table.get("text", "")).split()
            text = " ".join(words)
            texts[name] = text or texts.get(name, "")
    found: dict[str, Key] = {}
    for one in dataclasses.fields(cast(Any, group)):
        factory: Any = one.default_factory
        if factory is dataclasses.MISSING:
            has_default = one.default is not dataclasses.MISSING
            default = repr(one.default) if has_default else ""
        elif dataclasses.is_dataclass(factory):
            default = "{}"
        else:
            default = repr(factory())
        kind = kinds[one.name]
        found[one.name] = Key(one.name, kind, default, texts[one.name])
    return found


def _checked(cls: type) -> type:
    """Makes a class a dataclass whose fields are checked, and whose errors name the field."""
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
    return cast(type, made)


@_checked
@dataclass_transform(field_specifiers=(dataclasses.field,))
class Checked:
    """The base of all groups of settings: a class that inherits from it is a dataclass, whose fields are checked by their
    types, ranges and words (:func:`check_value`).

    Built in Python, a group refuses what is wrong with a ValueError whose text begins with the field's name
    (``lr must be >= 0, got -1``), or with the UserError that its ``__post_init__`` raises.
    """

    def __init_subclass__(cls) -> None:
        """Makes the class such a dataclass."""
        super().__init_subclass__()
        _checked(cls)

    @field_validator("*", mode="wrap")
    @classmethod
    def _check(cls, value: object, handler: Handler, info: ValidationInfo) -> Value:
        return check_value(
            fields(cast(Any, cls))[str(info.field_name)].kind, value, handler, info.context
        )


def group_of(name: str, keys: Iterable[Key], all_known: bool = True) -> type:
    """A group of settings that is known by its fields.

    Args:
        name: of the class.
        keys: the fields.
        all_known: a field without a default must be given; else it is None.
    """
    annotations: dict[str, object] = {}
    body: dict[str, Any] = {"__annotations__": annotations, "__module__": __name__}
    for key in keys:
        annotations[key.name] = key.kind
        needed = all_known and not key.default
        factory = partial(literal_eval, key.default or "None")
        body[key.name] = dataclasses.field(
            kw_only=True,
            metadata={"text": key.text},
            default_factory=cast(Any, dataclasses.MISSING) if needed else factory,
        )
    return type(name, (Checked,), body)


def as_tree(value: object) -> Value:
    """Groups as dicts of their fields, also in dicts and lists; any other value as it is."""
    if dataclasses.is_dataclass(value):
        return {one.name: as_tree(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: as_tree(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_tree(inner) for inner in value]
    return value

"""Types of settings: which values each takes from YAML and a command line, and the message for a value that it refuses.

A *kind* is a type as :mod:`typing` has it: ``float | None``, ``Annotated[int, Range("> 0")]``, ``dict[str, Any]``;
:func:`read` takes it apart. :mod:`kd.settings` and the arguments of classes (:mod:`kd.config.parts`) are groups of
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
    """Checks the classes that settings name; pydantic has it as the context of a validation."""

    def part(self, value: object, kind: str) -> object:
        """Checks a class's node (``class_path``, ``init_args``) as the settings give it, and returns it with all arguments.

        Args:
            value: the node.
            kind: of class that the setting takes: ``loss``, ``source``, ...
        """
        ...


# -- marks of types --------


@dataclasses.dataclass(frozen=True)
class AnyClass:
    """Marks the type of a setting or an argument that takes a class by its path.

    The context of a validation (:class:`PartChecker`) checks the class's node. Without a context the value is the built
    object already, and passes unchecked.
    """

    kind: str
    """What it takes: ``loss``, ``source``, ..."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """pydantic's check of a value of this type, in place of the marked type's own check; pydantic calls this once for a
        type.
        """

        def node(value: object, info: ValidationInfo) -> object:
            """The node as the context's ``part`` returns it; without a context the value itself."""
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
        """What is wrong with a value: "must be > 0"; "" for a number that is inside, and for a value of another type.

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
        """Words that it takes, for suggestions: those alternatives of the pattern (``a|b``) that the message names too."""
        patterns = self.pattern.split("|")
        return [word for word in re.findall(r"\w+", self.text) if word in patterns]


@dataclasses.dataclass(frozen=True)
class TimmName:
    """Names of timm's models or optimizers, read from its source."""

    part: Literal["models", "optim"]
    also: tuple[str, ...] = ()
    """Further names."""

    def refuses(self, value: object) -> str:
        """What is wrong with a name that timm lacks; "" for one that it has, for :attr:`also` and an empty value.

        Not refused are also a model's name with a hub's prefix (``hf_hub:...``), one that the user has registered, and any
        name where timm's names can't be read. The tag after a dot (``NAME.TAG``) is not compared.
        """
        name = str(value).removeprefix("timm/")
        known = timm_names(self.part)
        timm = sys.modules.get("timm")
        is_known = name.partition(".")[0] in known or value in (None, "", *self.also)
        if is_known or not known:
            return ""
        if self.part == "optim":
            return "must be one of timm's optimizers"
        # where timm is imported already, the user may have registered models
        if ":" in name or (timm and timm.is_model(name)):
            return ""
        if "/" in name:
            return "must be one of timm's models (model.teacher=OWNER/NAME loads one of transformers' from the hub)"
        return "must be one of timm's models (builder=CLASS takes one of your own)"

    @property
    def words(self) -> list[str]:
        """timm's names, sorted, for suggestions."""
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
    """The members of unions, nested ones too, without marks; not the types that a container holds."""
    limits: tuple[Limit, ...]
    """All limits, also of what a container holds."""
    part: str | None
    """The kind of class that it takes, alone, in a union or in a list; None: it takes none, or a dict of classes."""
    group: type | None
    """The group of settings that it takes."""
    entries: Any
    """The type of what a dict holds; ``Any`` where nothing is said of it."""
    items: Any
    """Likewise of a list."""

    @property
    def holds(self) -> bool:
        """Whether a value of it may have settings below it by name: a group, a dict, or any value."""
        return bool(self.group or {dict, Any} & {get_origin(one) or one for one in self.types})

    def below(self, name: str) -> object:
        """The type of the value below it under a name: a group's field, else a dict's entries. None where the group has no
        such field.
        """
        if self.group is None:
            return self.entries
        key = fields(self.group).get(name)
        return key.kind if key else None

    @property
    def words(self) -> list[object]:
        """The members of each ``Literal`` among :attr:`types`; not those inside a container."""
        return [word for one in self.types if get_origin(one) is Literal for word in get_args(one)]

    @property
    def allowed(self) -> list[str]:
        """The words that it takes, as texts for a suggestion: those of each ``Literal``, and those of its limits."""
        words = [str(word) for word in self.words]
        for limit in self.limits:
            words += getattr(limit, "words", [])
        return words

    @property
    def text(self) -> str:
        """The type in words, without limits and without null: ``a whole number or one of auto``."""
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
        """The type in words, with null and with its ranges: ``a number or null > 0``; other limits are not shown."""
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
    """Takes a type apart: its members, limits, class, group and what its containers hold. Each type is read once.

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
    by_name = [*map(id, _marks(entries))]  # classes in a dict, which count for its entries
    part = None
    for mark in reversed(marks):
        if isinstance(mark, AnyClass) and id(mark) not in by_name:
            part = mark.kind
    READ[id(kind)] = kind, TypeParts(types, limits, part, group, entries, items)
    return READ[id(kind)][1]


def _members(kind: object) -> Iterator[Any]:
    """Yields the types in a union, nested ones too, each without its marks (``Annotated``); else the type itself."""
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _members(one)
    else:
        yield kind


def _marks(kind: object) -> Iterator[Any]:
    """Yields all marks (``Annotated``'s) of a type and of what its unions and containers hold."""
    yield from getattr(kind, "__metadata__", ())
    for one in get_args(kind):
        yield from _marks(one)


# -- a value and its type --------


def check_value(
    kind: object, value: object, handler: Handler, parts: PartChecker | None = None
) -> Value:
    """Converts a value from YAML or a command line to a setting's type, checks it against the limits, and returns it.

    Args:
        kind: the setting's type.
        value: as it is given.
        handler: pydantic's check of the type.
        parts: checks classes (:class:`AnyClass`); None: a class is an object already.

    Raises:
        ValueError: the type or a limit refuses the value; the text is what a message has after the setting's key.
        ValidationError: something below the value (a group's field, an item) is refused.
    """
    type_parts = read(kind)
    if parts is not None and type_parts.part is not None:
        # null, and a word where the kind takes words, is checked below as any other value
        takes_any = value is None or type_parts.part in TAKE_WORDS
        if isinstance(value, Mapping | list) or not takes_any:
            return parts.part(value, type_parts.part)
    try:
        checked = handler(spelled(type_parts, value))
    except ValidationError as error:
        first, *_ = error.errors()
        kinds = [one for one in type_parts.types if one is not NoneType]
        is_inside = first["loc"] and get_origin(kinds[0]) is not tuple
        # the error itself names the place below; of a union it would name each member's
        if type_parts.group or (len(kinds) == 1 and is_inside):
            raise
        problem = f"must be {type_parts.text}, got '{value}'"
        if value is None:
            problem = "can't be null"
        raise ValueError(problem + near(value, type_parts.allowed)) from error
    for limit in type_parts.limits:
        problem = limit.refuses(checked)
        if problem:
            got = f"'{value[:80]}'" if isinstance(value, str) else value
            suggestion = near(value, type_parts.allowed)
            raise ValueError(f"{problem}, got {got}{suggestion}")
    return checked


def spelled(type_parts: TypeParts, value: object) -> object:
    """Turns a truth value back into the word ``on`` or ``off`` where the type takes that word; YAML 1.1 reads both words as
    truth values. Any other value is returned as it is, for pydantic to check.

    Raises:
        ValidationError: a truth value where the type takes none (pydantic would take it for a number), or a number or a
            text where it takes a truth value; without a text, as the caller words the message.
    """
    types = {get_origin(one) or one for one in type_parts.types}
    words = type_parts.words
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
    """Makes the error for a value that contradicts other fields, or that a type refuses; the caller raises it.

    Args:
        name: of the field (``milestones``); "": the value itself.
        problem: the message after the key (``must ascend``).
    """
    error = PydanticCustomError("refused", "{problem}", {"problem": problem})
    place = (name,) if name else ()
    return ValidationError.from_exception_data("", [{"type": error, "loc": place, "input": None}])


@cache
def adapter(kind: object) -> TypeAdapter[Any]:
    """pydantic's check of a single value by a type and its limits (:func:`check_value`), made once for a type.

    It raises a ValidationError, which :func:`problem_in` puts into words.
    """

    def inside(value: object, handler: Handler) -> object:
        return check_value(kind, value, handler)

    whole: Any = Annotated[kind, WrapValidator(inside)]
    return TypeAdapter(whole, config=CONFIG)


def wrong(kind: object, value: object) -> str:
    """What is wrong with a value for a type: "must be a number, got 'x'"; "" where it fits.

    Also "" for a value with ``${KEY}``, which is replaced later, and for a type that is not known (``Any``).
    """
    if "${" in str(value):
        return ""
    try:
        adapter(kind).validate_python(value)
    except ValidationError as error:
        return problem_in(error)[1]
    return ""


def fitted(kind: object, value: object) -> object:
    """A value converted to a type, where it fits; else the value itself: the class that takes it raises its own error."""
    return value if wrong(kind, value) else adapter(kind).validate_python(value)


def problem_in(error: ValidationError) -> tuple[str, str]:
    """The first problem of an error: the key below the value that was checked ("": the value itself), and the message
    after the key. For a missing field, and for an item of a list, the key is the group's or the list's.

    Raises:
        UserError: a check has raised it already; its own message counts.
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
    if last.isdecimal():  # an item's number in a list
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
    """The fields of a group that a user may give, by name in their order, each with its type, default and help (the text
    under the field).
    """
    kinds = get_type_hints(group, include_extras=True)
    texts: dict[str, str] = {}
    bases: list[Any] = [*reversed(group.__mro__[:-1])]
    for base in bases:  # each class has the texts of its own fields alone
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
    """Makes a class a pydantic dataclass, whose constructor checks the fields, and replaces pydantic's ValidationError by an
    error of Python's that names the field. Returns the class.
    """
    made: Any = pydantic.dataclasses.dataclass(cls, config=CONFIG)
    validate = made.__init__
    order = [field.name for field in dataclasses.fields(made)]

    def checked(self: object, *args: object, **named: object) -> None:
        """The constructor.

        Raises:
            TypeError: an unknown field, or one that must be given is missing.
            ValueError: a field's value is refused; a UserError passes as it is.
        """
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
        """Makes each subclass a dataclass with checked fields, without a decorator; Python calls this for each."""
        super().__init_subclass__()
        _checked(cls)

    @field_validator("*", mode="wrap")
    @classmethod
    def _check(cls, value: object, handler: Handler, info: ValidationInfo) -> Value:
        """The field's value in its type (:func:`check_value`); pydantic calls this for each field."""
        return check_value(
            fields(cast(Any, cls))[str(info.field_name)].kind, value, handler, info.context
        )


def group_of(name: str, keys: Iterable[Key], all_known: bool = True) -> type:
    """Makes a group of settings, a subclass of :class:`Checked`, from a list of its fields.

    Args:
        name: of the class.
        keys: the fields; a key's :attr:`Key.name` is the field's name, its text the help.
        all_known: whether a field without a default must be given; if false, such a field is None by default.
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
    """Turns groups (dataclasses) into dicts of their fields, also inside dicts and lists; any other value as it is."""
    if dataclasses.is_dataclass(value):
        return {one.name: as_tree(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: as_tree(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_tree(inner) for inner in value]
    return value

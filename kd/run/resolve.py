"""All settings of a run, merged once from files and a command line, in the types of :mod:`kd.settings`.

The tree that comes out is what builds (:mod:`kd.run.build`), what a run writes as its ``config.yaml``, and what
``--print_config`` prints. A group of settings is a dict; a class is ``{"class_path": ..., "init_args": {...}}``.
Neither torch nor Lightning is imported, unless a class of the user's own replaces one that has arguments.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from kd.config import parts as listed
from kd.config.kinds import TAKE_WORDS, Key, as_tree, fields, problem_in, read, refused, wrong
from kd.config.parts import plain_key
from kd.config.suggest import hint, nearest, words
from kd.errors import UserError, no_such_loss
from kd.run.keys import declared, schema
from kd.run.trust import NAME, NOTHING, Trust, class_named, is_trusted, parameters_of, unlisted
from kd.settings import Settings
from kd.storage.elsewhere import yaml_of

Value: TypeAlias = Any
"""What YAML can hold, or a :class:`Word`."""
Tree: TypeAlias = dict[str, Any]
"""Settings by name, nested."""
DEFAULTS: Tree = {"model.task": "Classification", "model.student": {}}
"""What is set before all files."""
NAMELESS = "takes no settings without a class_path"
"""How the message for arguments of no class begins."""


@dataclass(frozen=True)
class Word:
    """A value on the command line."""

    text: str
    """As it is typed."""
    value: object
    """As YAML reads it."""

    def of(self, kind: object) -> object:
        """The value as YAML reads it; but the text as typed where the type takes text, and none of its other types takes the
        value: a folder called 007. A null stays null; an empty word is an empty text where the type takes text.

        ``kind``: the type of the setting that the word is for.
        """
        types = read(kind).types
        if str not in types or (self.value is None and self.text):
            return self.value
        for other in types:
            if other not in (str, NoneType) and not wrong(other, self.value):
                return self.value
        return self.text


def read_word(text: str) -> object:
    """A word's value as YAML reads it; what is no YAML stays text, which the types refuse later."""
    try:
        return yaml_of(text)
    except ValueError:  # the parser says what is wrong
        return text


def words_of(overrides: Sequence[str]) -> list[dict[str, Word]]:
    """``key=value`` words as layers of settings, a layer each.

    Words that name classes come first, so that the arguments of a class follow it, in whichever order they were typed.
    """
    layers = []
    for override in overrides:
        key, _, text = override.partition("=")
        layers.append({key: Word(text, read_word(text))})

    def is_argument(layer: Mapping[str, Word]) -> bool:
        ((key, word),) = layer.items()
        place = key.removesuffix(".class_path")
        of = read(declared(place))
        if of.part is not None:
            return False
        is_dict = isinstance(word.value, dict)
        return not (of.holds and is_dict)

    return sorted(layers, key=is_argument)


def resolve(layers: Iterable[Mapping[str, Any]], trusted: Trust = NOTHING) -> Tree:
    """All settings, with the defaults of those that no layer gives.

    Args:
        layers: settings in rising priority, nested (a file) or by dotted keys (a word of the command line). A group
            is merged key by key, and so is a class with its arguments; a key with ``+`` adds to a list; any other
            value takes the place of the one before it. Where a dict (of losses) does, old entries that it does not name are
            gone, and each of its own is merged with the old one of its name.
        trusted: what the user trusts beside the list of classes.

    Raises:
        UserError: the first mistake, by its key.
    """
    return change({}, [DEFAULTS, *layers], trusted)


def change(tree: Tree, layers: Iterable[Mapping[str, Any]], trusted: Trust = NOTHING) -> Tree:
    """Resolved settings with more layers put on top; ``tree`` stays as it is. Arguments as of :func:`resolve`.

    Raises:
        UserError: the first mistake, by its key.
    """
    merge = _Merge(trusted)
    given = merge.all_of(tree, layers)
    if "${" in str(given) and not merge.unknown:
        defaults = merge.whole(merged([DEFAULTS]))
        given = merge.all_of({}, [_interpolated(merge.all_of(defaults, [given]))])
    if merge.unknown:
        key = merge.unknown[0]
        known = [*schema(), *_keys_in(given)]
        suggestion = hint(key, known)
        raise UserError(f"no key '{key}'{suggestion}")
    return merge.whole(given)


def merged(layers: Iterable[Mapping[str, Any]]) -> Tree:
    """What layers give, with classes as ``{"class_path", "init_args"}``; unknown keys are left out, values are not checked
    by their types, nothing is imported.
    """
    return _Merge(None).all_of({}, layers)


def class_nodes(
    value: Value, kind: object = Settings, key: str = ""
) -> Iterator[tuple[str, str, Tree]]:
    """Each class in merged settings, in their order, those in its arguments after it: all that is built of them.

    Args:
        value: of ``key``.
        kind: its type.
        key: whole, as ``--keys`` has it.

    Yields:
        Its key, the kind of class that its place takes ("": an argument of a class that is not listed), and its node.
    """
    of = read(kind)
    if of.part is not None:
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, Mapping) or "class_path" not in node:
                continue
            yield key, of.part, dict(node)
            one = listed.listed_class(str(node["class_path"]), of.part)
            kinds = one.fields if one else {}
            arguments = _arguments(node.get("init_args"), key)
            for name, inner in arguments.items():
                below = kinds.get(name, listed.UNLISTED)
                yield from class_nodes(inner, below, f"{key}.{name}")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, Mapping | list):
                yield from class_nodes(inner, of.below(name), _join(key, str(name)))


def keys_of_classes(layers: Iterable[Mapping[str, Any]]) -> dict[str, Key]:
    """The keys that the classes in layers of settings bring with them, by their names as ``--keys`` has them."""
    return _keys_in(merged([DEFAULTS, *layers]))


def _keys_in(tree: Tree) -> dict[str, Key]:
    """The keys of the arguments of the listed classes in merged settings, by their whole names."""
    known: dict[str, Key] = {}
    for key, kind, node in class_nodes(tree):
        one = listed.listed_class(node["class_path"], kind)
        if one is None:
            continue
        for name, argument in one.arguments.items():
            whole_name = f"{key}.{name}"
            known[whole_name] = replace(argument, name=whole_name)
    return known


def check_meant(key: str, value: object) -> None:
    """Refuses what a run can't use, and what other programs' users mean by a value (:data:`kd.config.suggest.FILE`).

    Args:
        key: where the value is given, as ``--keys`` has it.
        value: as it is given.

    Raises:
        UserError: with the setting that is meant, or why the value can't be used.
    """
    table = words()
    meant = ""
    if value is None and re.fullmatch(r"model\.distill_losses\.\w+", key):
        meant = f"{key}.weight=0"
    elif isinstance(value, str) and key in table["groups"]:
        target = table["groups"][key]
        names = read(declared(target)).allowed
        found = nearest(value, names) or [value]
        meant = f"{target}={found[0]}"
    elif isinstance(value, str):
        meant = table["values"].get(key, {}).get(value.lower(), "")
        meant = f"{key}={meant}" if meant and "=" not in meant else meant
    if meant:
        shown = "null" if value is None else value
        raise UserError(f"{key}: got '{shown}'; did you mean '{meant}'?")
    reasons = table["reasons"].get(key, {})
    why = reasons.get(str(value), reasons.get("*"))
    if why:
        raise UserError(f"{key}: {why}")


class _Merge:
    """Puts values into a tree of settings, by the types of the places that they are for.

    Args:
        trusted: what the user trusts beside the list of classes; None: no class is imported.
    """

    def __init__(self, trusted: Trust | None) -> None:
        self.trusted = trusted
        self.unknown: list[str] = []
        """Whole keys that no group or listed class has, in the order in which they were met."""

    # -- what the layers give, without defaults --------

    def all_of(self, tree: Tree, layers: Iterable[Mapping[str, Any]]) -> Tree:
        """A tree with layers put on top, the last one strongest."""
        for layer in layers:
            tree = self._put(tree, [], layer, Settings, "")
        return tree

    def _put(self, before: Value, path: list[str], value: Value, kind: object, key: str) -> Value:
        """What a place holds once ``value`` is put at ``path`` below it.

        Args:
            before: what the layers below give; it is not changed.
            path: names from this place to that of the value, ``name+`` at its end adds to a list; empty: it is for this
                place.
            value: as a file or a word of the command line has it.
            kind: the type of this place.
            key: of this place, for messages and for the kind of class that it takes.

        Raises:
            UserError: a name or a value that the place can't have.
        """
        of = read(kind)
        if not path:
            value = value.of(kind) if isinstance(value, Word) else value
            check_meant(plain_key(key), value)
        if of.part is not None:
            return self._put_class(before, path, value, of.part, key)
        if path and not of.holds:
            name = path[0].removesuffix("+")
            inner_key = _join(key, name)
            problem = f"{key} has no keys of its own, it is {of.text}"
            raise UserError(f"no key '{inner_key}': {problem}")
        if not path and not isinstance(value, Mapping):
            is_off = value is None and NoneType in of.types
            if of.group and not is_off:
                got = "null" if value is None else value
                own = f"{key}.NAME=VALUE"
                if "checkpoint" in fields(of.group):
                    own = f"{key}.arch=NAME, {key}.checkpoint=FILE"
                raise UserError(f"{key}: has settings of its own ({own}), got '{got}'")
            return value
        if not path and not of.holds:
            return value
        given = value
        if path:
            given = {".".join(path): value}
        old = before if isinstance(before, Mapping) else {}
        adds = bool(path or of.group)
        return self._onto(old, given, of.below, key, adds)

    def _onto(
        self,
        old: Mapping[str, Any],
        given: Mapping[str, Any],
        kinds: Callable[[str], object],
        key: str,
        adds: bool = True,
    ) -> Tree:
        """The entries of a place with others put on top.

        Args:
            old: the entries.
            given: the others, by their names or the paths from the place to them.
            kinds: the type of the entry of a name; None: there is none, which is noted in :attr:`unknown`.
            key: the place.
            adds: entries that are not given stay, and names are paths.

        Raises:
            UserError: a name that is no text, or as of :meth:`_put`.
        """
        new = dict(old) if adds else {}
        for path, value in given.items():
            if not isinstance(path, str):  # YAML reads 007 as 7
                raise UserError(f"{plain_key(key)}: a name is text, got {path}")
            first, *rest = path.split(".") if adds else [path]
            name = first.removesuffix("+")
            inner_key = _join(key, name)
            kind = kinds(name)
            before = (new if adds else old).get(name)
            if kind is None:
                check_meant(inner_key, _plain(value))
                self.unknown.append(".".join([inner_key, *rest]))
            elif first == name or rest:
                new[name] = self._put(before, rest, value, kind, inner_key)
            else:
                new[name] = self._added(before, _plain(value), kind, inner_key)
        return new

    def _added(self, before: Value, value: Value, kind: object, key: str) -> list[Any]:
        """The list of a place with ``value`` at its end, or with each of its items where it is a list.

        A single value that is there becomes a list first.

        Raises:
            UserError: the place holds entries by name.
        """
        if read(kind).entries is not Any:
            raise UserError(f"{key}: has names: {key}.NAME={value}")
        items = before or []
        if not isinstance(items, list):
            items = [items]
        more = value if isinstance(value, list) else [value]
        return [*items, *self._put(None, [], more, kind, key)]

    def _put_class(
        self, before: Value, path: list[str], value: Value, kind: str, key: str
    ) -> object:
        """A class in the layer's form (a name, a mapping, a list of them) put onto the one that is there; arguments as of
        :meth:`_put`, ``kind`` is the kind of class. Of a list, a path is one of the class that was added last.

        Returns:
            ``{"class_path", "init_args"}``, of a list one for each item; a word such as ``auto``, and null, as it is.

        Raises:
            UserError: a class that is no name, or ``init_args`` that are no settings.
        """
        if path and isinstance(before, list) and before:
            *earlier, last = before
            return [*earlier, self._put_class(last, path, value, kind, key)]
        if path:
            value = {".".join(path): value}
        elif isinstance(value, list):
            return [self._put_class(None, [], item, kind, key) for item in value]
        elif isinstance(value, str) and not _is_word(value, kind):
            value = {"class_path": value}
        if not isinstance(value, Mapping):
            return value
        node: Tree = {"class_path": "", "init_args": {}}
        if isinstance(before, Mapping) and "class_path" in before:
            node = dict(before)
        arguments = {str(name).removeprefix("init_args."): inner for name, inner in value.items()}
        name = _plain(arguments.pop("class_path", ""))
        if name != "":
            node = self._renamed(node, name, kind, key)
        more = _arguments(_plain(arguments.pop("init_args", None)), key)
        one = listed.listed_class(node["class_path"], kind)
        known = one.fields if one else {}
        others = None if one and one.all_known else Any
        given = {**arguments, **more}
        inner = self._onto(node["init_args"], given, lambda name: known.get(name, others), key)
        return {**node, "init_args": inner}

    def _renamed(self, node: Tree, path: object, kind: str, key: str) -> Tree:
        """A place with another class; arguments that the new class takes too are kept.

        Which arguments a class outside the list takes is read off the class, where :attr:`trusted` allows its import.

        Args:
            node: ``{"class_path", "init_args"}`` so far.
            path: name or path of the new class.
            kind: of class that the place takes.
            key: the place.

        Raises:
            UserError: a class that neither the list nor Lightning nor kd's source has, or one of the user's that has to be
                imported and can't.
        """
        if not isinstance(path, str):
            problem = f"must be the name of a class, got {str(path)[:80]}"
            raise UserError(f"{key}.class_path: {problem}")
        one = listed.listed_class(path, kind)
        is_name = NAME.fullmatch(path)
        if one is None and not (is_name and listed.may_be_imported(kind, path)):
            raise UserError(f"{plain_key(key)}: {listed.no_class(kind, path)}")
        path = one.name if one else listed.lightnings(kind).get(path, path)
        arguments = node["init_args"]
        if arguments and path != node["class_path"]:
            names: Iterable[str] = ()
            if one is not None:
                names = one.fields
            elif self.trusted is not None:
                cls = class_named(path, kind, key, self.trusted)
                names = parameters_of(cls)
            arguments = dict(arguments)
            for name in arguments.keys() - {*names}:
                del arguments[name]
        return {"class_path": path, "init_args": arguments}

    # -- with defaults, in the settings' types --------

    def whole(self, given: Tree) -> Tree:
        """All settings, with their defaults and in their types, of those that the layers give.

        Raises:
            UserError: the first value that is wrong, by its key.
        """
        try:
            return as_tree(_settings().validate_python(given, context=self))
        except ValidationError as error:
            key, problem = problem_in(error)
            if key.startswith("model.distill_losses.") and problem.startswith(NAMELESS):
                losses = given["model"]["distill_losses"].items()
                known = [name for name, node in losses if node and node["class_path"]]
                raise no_such_loss(key.rpartition(".")[2], known) from error
            raise UserError(f"{key}: {problem}") from error

    def part(self, value: Value, kind: str) -> object:
        """A class with the defaults and types of all its arguments, in the order of the list; one outside the list, as it
        is given. Of a list that is each item.

        Args:
            value: the class's node, merged from all layers.
            kind: of class that the place takes.

        Raises:
            ValueError: no class, or one without a name.
            ValidationError: an argument's value is wrong, or it must be given; or the list does not have it, its class is
                not trusted, and it is other than null.
        """
        if isinstance(value, list) and kind in listed.SEVERAL:
            return self._parts(value, kind)
        if not isinstance(value, Mapping):
            if kind in TAKE_WORDS or value is None:
                return value
            raise ValueError(listed.no_class(kind, str(value)))
        path, given = value["class_path"], value["init_args"]
        if not path:
            names = ", ".join(map(str, given))[:80]
            raise ValueError(f"{NAMELESS}, got {names}")
        one = listed.listed_class(path, kind)
        if one is None:
            return {"class_path": path, "init_args": dict(given)}
        known = {}
        others = {}
        takes_any = self.trusted is not None and is_trusted(one.name, self.trusted.names)
        for name, inner in given.items():
            if name in one.arguments:
                known[name] = inner
            elif takes_any:
                others[name] = inner
            elif inner is not None:  # null is as good as not given
                raise refused(name, unlisted(one))
        made = one.model.validate_python(known, context=self)
        arguments = as_tree(made)
        for name, argument in one.arguments.items():
            if name not in known and not argument.default:
                del arguments[name]
        return {"class_path": path, "init_args": arguments | others}

    def _parts(self, items: list[Value], kind: str) -> list[object]:
        """Each class of a list, as of :meth:`part`; any other item is a ValueError."""
        for item in items:
            if not isinstance(item, Mapping):
                raise ValueError(f"each must be a class, got {item}")
        return [self.part(item, kind) for item in items]


@cache
def _settings() -> TypeAdapter[Any]:
    return TypeAdapter(Settings)


def _plain(value: Value) -> Value:
    """A word of the command line as YAML reads it; any other value as it is."""
    return value.value if isinstance(value, Word) else value


def _arguments(value: object, key: str) -> Mapping[str, Any]:
    """The ``init_args`` of a class at a place; a UserError for what is no settings."""
    if not isinstance(value, Mapping | None):
        problem = f"must be settings (NAME: VALUE), got '{str(value)[:80]}'"
        raise UserError(f"{key}.init_args: {problem}")
    return value or {}


def _is_word(value: str, kind: str) -> bool:
    """Whether a text is one of Lightning's words (``ddp``) in the place of a class."""
    is_class = "." in value or listed.listed_class(value, kind) or value in listed.lightnings(kind)
    return kind in TAKE_WORDS and kind != "logger" and not is_class


def _join(key: str, name: str) -> str:
    """A name below a key, dotted; at the top ("") the name alone."""
    return f"{key}.{name}" if key else name


def _interpolated(tree: Tree) -> Tree:
    """The tree with ``${KEY}`` replaced by that key's value; a user's error for a key that does not exist."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        text = " ".join(str(error).split("full_key")[0].split())
        raise UserError(f"{error.full_key}: {text}") from error

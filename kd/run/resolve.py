"""All settings of a run, merged once from files and a command line, in the types of :mod:`kd.settings`.

The tree that comes out is what builds (:mod:`kd.run.build`), what a run writes as its ``config.yaml``, and what
``--print_config`` prints. A group of settings is a dict; a class is ``{"class_path": ..., "init_args": {...}}``.
Neither torch nor Lightning is imported, unless a class of the user's own replaces one that has arguments.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import NoneType
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from kd.config import parts as listed
from kd.config.kinds import (
    TAKE_WORDS,
    as_tree,
    group_in,
    group_of,
    in_words,
    inner_kind,
    plain_members,
    problem_in,
    refusal,
    refused,
    takes,
)
from kd.config.parts import Listed
from kd.config.suggest import hint
from kd.config.trees import flatten
from kd.errors import UserError, no_such_loss
from kd.run import files, typed
from kd.run.keys import FILLED, Key, fields, plain, schema
from kd.run.trust import (
    NAME,
    NOTHING,
    Trust,
    class_named,
    is_trusted,
    parameters_of,
    unlisted,
)
from kd.settings import Settings, TrainerSettings

Value: TypeAlias = Any
"""What YAML can hold, or a :class:`Word`."""
Tree: TypeAlias = dict[str, Any]
"""Settings by name, nested."""
WORDS = ("strategy", "profiler", "plugin")
"""Kinds whose settings also take Lightning's words: ddp, simple, gpu."""
DEFAULTS: Tree = {"model.task": "Classification", "model.student": {}}
"""What is set before all files."""


@dataclass(frozen=True)
class Word:
    """A value on the command line."""

    text: str
    """As it is typed."""
    value: object
    """As YAML reads it."""

    def of(self, kind: object) -> object:
        """The value, or the text where the type takes text and nothing else that YAML reads: a folder called 007. A null
        stays one; an empty word is an empty text where the type takes text.

        ``kind``: the type of the setting that the word is for.
        """
        kinds = plain_members(kind)
        if str not in kinds or (self.value is None and self.text):
            return self.value
        others = [one for one in kinds if one not in (str, NoneType)]
        if any(takes(other, self.value) for other in others):
            return self.value
        return self.text


def resolve(layers: Iterable[Mapping[str, Any]], trusted: Trust = NOTHING) -> Tree:
    """All settings, with the defaults of those that no layer gives.

    Args:
        layers: settings in rising priority, nested (a file) or by dotted keys (a word of the command line). A group
            is merged key by key, and so is a class with its arguments; a key with ``+`` adds to a list; any other
            value takes the place of the one before it. Of a dict that does, entries are merged with those of their names.
        trusted: what the user trusts beside the list of classes.

    Raises:
        UserError: the first mistake, by its key.
    """
    return change({}, [DEFAULTS, *layers], trusted)


def change(tree: Tree, layers: Iterable[Mapping[str, Any]], trusted: Trust = NOTHING) -> Tree:
    """Resolved settings with more layers put on top; ``tree`` stays as it is.

    Args:
        tree: all settings.
        layers: nested or dotted, the last one strongest.
        trusted: classes that the user trusts.

    Raises:
        UserError: the first mistake, by its key.
    """
    merge = _Merge(trusted)
    given = merge.all_of(tree, layers)
    if merge.unknown:
        known = [*schema(), *merge.keys]
        key = merge.unknown[0]
        suggestion = hint(key, known, merge.losses)
        raise UserError(f"no key '{key}'{suggestion}")
    if any("${" in str(value) for _, value in files.leaves(given)):
        defaults = merge.whole(_Merge(None).all_of({}, [DEFAULTS]))
        given = _interpolated(merge.put(defaults, [], given, Settings, ""))
    whole = merge.whole(given)
    flat = flatten(whole)
    for key in typed.TIMMS:
        is_relative = (key, flat.get(key)) == ("model.student.arch", "auto")  # of the teacher
        problem = "" if is_relative else typed.unknown_to_timm(key, flat.get(key))
        if problem:
            raise UserError(f"{key}: {problem}")
    return whole


def without_nulls(tree: Tree, key: str = "") -> Tree:
    """Resolved settings without those that are null, but for those whose default is not null, and arguments of classes:
    resolved again they are the same.

    Args:
        tree: a group of settings.
        key: of the group.
    """
    kept: Tree = {}
    for name, value in tree.items():
        inner_key = _join(key, name)
        declared = schema().get(inner_key)
        if isinstance(value, dict) and "class_path" not in value and value:
            kept[name] = without_nulls(value, inner_key)
        elif value is not None or (declared is not None and declared.default != "None"):
            kept[name] = value
    return kept


def merged(layers: Iterable[Mapping[str, Any]]) -> Tree:
    """What layers give, with classes as ``{"class_path", "init_args"}``; unknown keys are left out, values are not checked
    by their types, nothing is imported.
    """
    return _Merge(None).all_of({}, layers)


def class_settings(value: Value, kind: str, key: str, trusted: Trust) -> Value:
    """A class of no run's settings (of a student's file), in the form of these and checked as they are.

    Args:
        value: a class's name, or ``class_path`` and ``init_args``.
        kind: of class that is taken.
        key: for messages.
        trusted: what the user trusts beside the list.

    Raises:
        UserError: no such class, or an argument that it does not take; by its key.
    """
    merge = _Merge(trusted)
    node = merge.put(None, [], value, listed.part(kind), key)
    for unknown in merge.unknown:
        raise UserError(f"no key '{unknown}'")
    try:
        return merge.part(node, kind)
    except ValidationError as error:
        name, problem = problem_in(error)
        raise UserError(f"{key}.{name}: {problem}") from error
    except ValueError as error:
        raise UserError(f"{key}: {error}".replace("{key}", key)) from error


def keys_of_classes(layers: Iterable[Mapping[str, Any]]) -> dict[str, Key]:
    """The keys that the classes in layers of settings bring with them, by their names as ``--keys`` has them."""
    merge = _Merge(None)
    merge.all_of({}, [DEFAULTS, *layers])
    return merge.keys


class _Merge:
    """Puts values into a tree of settings, by the types of the places that they are for.

    Args:
        trusted: what the user trusts beside the list of classes; None: no class is imported.
    """

    def __init__(self, trusted: Trust | None) -> None:
        self.trusted = trusted
        self.unknown: list[str] = []
        """Whole keys that no group or listed class has, in the order in which they were met."""
        self.classes: dict[str, Listed] = {}
        """The listed classes that were named, by their places."""

    # -- what the layers give, without defaults --------

    def all_of(self, tree: Tree, layers: Iterable[Mapping[str, Any]]) -> Tree:
        """A tree with layers put on top, the last one strongest."""
        for layer in layers:
            tree = self.put(tree, [], layer, Settings, "")
        for key in [*self.classes]:
            node: Any = tree
            for name in key.replace(".", ".init_args.").split("."):
                if isinstance(node, dict) and name in node:
                    node = node[name]
                elif name != "init_args":
                    node = None
            if not node:  # a later layer has none in its place
                del self.classes[key]
        return tree

    @property
    def losses(self) -> list[str]:
        """Names of the distillation losses, for hints."""
        places = [place.rpartition(".") for place in self.classes]
        return [name for group, _, name in places if group == "model.distill_losses"]

    @property
    def keys(self) -> dict[str, Key]:
        """The keys that the classes bring with them, by their names as ``--keys`` has them."""
        known: dict[str, Key] = {}
        for key, one in self.classes.items():
            for name, argument in one.arguments.items():
                whole_name = f"{key}.{name}"
                known[whole_name] = replace(argument, name=whole_name)
        return known

    def put(self, before: Value, path: list[str], value: Value, kind: object, key: str) -> Value:
        """What stands at a place once ``value`` is put at ``path`` below it.

        Args:
            before: what the layers below give; it is not changed.
            path: names from this place to that of the value; empty: it is for this place.
            value: as a file or a word of the command line has it.
            kind: the type of this place.
            key: of this place, for messages and for the kind of class that it takes.
        """
        if not path:
            if isinstance(value, Word):
                value = value.of(kind)
            typed.check_meant(plain(key), value, [*before] if isinstance(before, Mapping) else [])
            if group_in(kind) and not isinstance(value, Mapping | None):
                raise UserError(f"{key}: {_refused(refusal(kind, value), key)}")
        class_kind = listed.kind_of(kind)
        if class_kind:
            return self._put_class(before, path, value, class_kind, key)
        if path:
            return self._put_below(before, path, value, kind, key)
        if isinstance(value, Mapping) and _has_keys(kind):
            return self._put_entries(before, value, kind, key)
        return value

    def _put_below(
        self, before: object, path: list[str], value: object, kind: object, key: str
    ) -> object:
        """Puts a value at a path below a place, by the type that is declared there; returns the place's new value.

        Args:
            before: the place's value so far; it is not changed, and comes back where the name is unknown, which is noted
                in :attr:`unknown`.
            path: names from the place on; ``name+`` at its end adds to a list.
            value: the layer's.
            kind: the place's declared type.
            key: the place, for messages.

        Raises:
            UserError: the place has no keys.
        """
        name, *rest = path
        adds = name.endswith("+") and not rest
        name = name.removesuffix("+")
        inner_key = _join(key, name)
        group = group_in(kind)
        if (group is not None and name not in fields(group)) or inner_key in FILLED:
            # another program's key may come with a suggestion
            self.put(None, [], value, Any, inner_key)
            self.unknown.append(_join(inner_key, ".".join(rest)) if rest else inner_key)
            return before
        if not _has_keys(kind):
            problem = f"{key} has no keys of its own, it is {in_words(kind)}"
            raise UserError(f"no key '{inner_key}': {problem}")
        node: Tree = {}
        if isinstance(before, Mapping):
            node = dict(before)
        kind_below = _kind_below(kind, name)
        if adds:
            if isinstance(value, Word):
                value = value.of(Any)
            if inner_kind(kind_below, dict) is not Any:
                raise UserError(f"{inner_key}: has names: {inner_key}.NAME={value}")
            more = value
            if not isinstance(value, list):
                more = [value]
            more = self.put(None, [], more, kind_below, inner_key)
            present = node.get(name) or []
            node[name] = [*(present if isinstance(present, list) else [present]), *more]
        else:
            node[name] = self.put(node.get(name), rest, value, kind_below, inner_key)
        return node

    def _put_entries(
        self, before: object, value: Mapping[str, Any], kind: object, key: str
    ) -> object:
        """A mapping in a layer: it is added to a group of settings, and takes the place of a dict; an entry of a dict is
        put onto the one of the same name before.

        Arguments as of :meth:`_put_below`.

        Raises:
            UserError: a name that is no text.
        """
        for name in value:
            if not isinstance(name, str):  # YAML reads 007 as 7
                raise UserError(f"{plain(key)}: a name is text, got {name}")
        present: Mapping[str, Any] = {}
        if isinstance(before, Mapping):
            present = before
        if group_in(kind) is not None:
            node: object = dict(present)
            for name, inner in value.items():
                node = self._put_below(node, name.split("."), inner, kind, key)
            return node
        entries: Tree = {}
        kind_below = inner_kind(kind, dict)
        for name, inner in value.items():
            inner_key = _join(key, name)
            entries[name] = self.put(present.get(name), [], inner, kind_below, inner_key)
        return entries

    def _put_class(
        self, before: Value, path: list[str], value: Value, kind: str, key: str
    ) -> object:
        """A class in the layer's form (a name, a mapping, a list of them) put onto the one that is there.

        Args:
            before: the place's value so far.
            path: names from the place on; of a list, what follows is of the class that was added last.
            value: the layer's.
            kind: of class that the place takes.
            key: the place.

        Returns:
            ``{"class_path", "init_args"}``, of a list one for each item; a word such as ``auto``, and null, as it is.

        Raises:
            UserError: a class that is no name, or ``init_args`` that are no settings.
        """
        if path and isinstance(before, list) and before:
            *earlier, last = before
            return [*earlier, self._put_class(last, path, value, kind, key)]
        if path:
            is_form = path in (["class_path"], ["init_args"])
            value = {".".join(path): value.value if is_form and isinstance(value, Word) else value}
        if isinstance(value, list):
            return [self._put_class(None, [], item, kind, key) for item in value]
        if isinstance(value, str) and not _is_word(value, kind):
            value = {"class_path": value}
        if not isinstance(value, Mapping):
            return value
        node = _node(before)
        arguments = dict(value)
        if "class_path" in arguments:
            node = self._renamed(node, arguments.pop("class_path"), kind, key)
        more = arguments.pop("init_args", None) or {}
        if not isinstance(more, Mapping):
            problem = f"must be settings (NAME: VALUE), got '{str(more)[:80]}'"
            raise UserError(f"{key}.init_args: {problem}")
        for name, given in {**arguments, **more}.items():
            names = str(name).removeprefix("init_args.").split(".")
            node = self._with_argument(node, names, given, kind, key)
        return node

    def _with_argument(
        self, node: Tree, path: list[str], value: object, kind: str, key: str
    ) -> Tree:
        """A class's node with one argument, or a key below it, put on top; an unknown one is noted in :attr:`unknown`.

        Args:
            node: ``{"class_path", "init_args"}``; it is not changed.
            path: the argument's name, and names below it.
            value: the layer's.
            kind: of the class.
            key: its place.
        """
        name, *rest = path
        inner_key = f"{key}.{name}"
        kind_below: object = Any
        one = listed.listed(node["class_path"], kind)
        if one is not None:
            if one.all_known and name not in one.fields:
                self.unknown.append(inner_key)
                return node
            kind_below = one.fields.get(name, Any)
        arguments = dict(node["init_args"])
        before = arguments.get(name)
        arguments[name] = self.put(before, rest, value, kind_below, inner_key)
        return {**node, "init_args": arguments}

    def _renamed(self, node: Tree, path: object, kind: str, key: str) -> Tree:
        """A place with another class: arguments that the new class takes too are kept.

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
        if not (NAME.fullmatch(path) or "${" in path):
            raise UserError(f"{key}: {typed.no_class(kind, path[:80])}")
        one = listed.listed(path, kind)
        if one is not None:
            self.classes[key] = one
            path = one.name
        elif problem := typed.unknown_class(kind, path):
            raise UserError(f"{plain(key)}: {problem}")
        elif "." not in path:
            path = f"{listed.module_of(kind)}.{path}"
        arguments = node["init_args"]
        if arguments and path != node["class_path"]:
            if one is not None:
                names = set(one.fields)
            else:
                names = self._parameters(path, kind, key)
            arguments = {name: value for name, value in arguments.items() if name in names}
        return {"class_path": path, "init_args": arguments}

    def _parameters(self, path: str, kind: str, key: str) -> set[str]:
        """The names of the arguments of a class that is not listed, which is imported for them; empty, without an import,
        where :attr:`trusted` is None.

        Arguments as of :meth:`_renamed`.

        Raises:
            UserError: a class that the user does not trust, or that can't be imported.
        """
        if self.trusted is None:
            return set()
        return {*parameters_of(class_named(path, kind, key, self.trusted))}

    # -- with defaults, in the settings' types --------

    def whole(self, given: Tree) -> Tree:
        """All settings, with their defaults and in their types, of those that the layers give.

        Raises:
            UserError: the first value that is wrong, by its key.
        """
        try:
            settings = whole_settings().validate_python(given, context=self)
        except ValidationError as error:
            key, problem = problem_in(error)
            place, _, name = key.rpartition(".")
            if place == "model.distill_losses" and problem.startswith(NAMELESS):
                raise no_such_loss(name, self.losses) from error
            raise UserError(f"{key}: {_refused(problem, key)}") from error
        tree: Tree = as_tree(settings)
        for place, name in (key.split(".") for key in FILLED):
            del tree[place][name]
        return tree

    def part(self, value: Value, kind: str) -> object:
        """A class with the defaults and types of all its arguments, in the order of the list; one outside the list, as it
        is given. Of a list that is each item.

        Args:
            value: the class's node, merged from all layers.
            kind: of class that the place takes.

        Raises:
            ValueError: no class, or one without a name; an argument that must be given is not, or one that the list does
                not have, of a class that is not trusted, is other than null.
            ValidationError: an argument's value is wrong.
        """
        if isinstance(value, list) and kind in listed.SEVERAL:
            return [self.part(item, kind) for item in value]
        if not isinstance(value, Mapping):
            if value is None or kind in TAKE_WORDS:
                return value
            raise ValueError(typed.no_class(kind, str(value)))
        path, given = value["class_path"], value["init_args"]
        if not path:
            got = ", ".join(map(str, given))[:80]
            raise ValueError(f"{NAMELESS}, got {got}")
        one = listed.listed(path, kind)
        if one is None:
            return {"class_path": path, "init_args": dict(given)}
        for name, argument in one.arguments.items():
            if one.all_known and not argument.default and name not in given:
                meaning = argument.text.rstrip(".")
                raise ValueError(f"needs {name}: {{key}}.{name}=VALUE ({meaning})")
        known = {name: inner for name, inner in given.items() if name in one.arguments}
        others = {name: inner for name, inner in given.items() if name not in known}
        if not is_trusted(one.name, self.trusted or NOTHING):
            others = {name: inner for name, inner in others.items() if inner is not None}
            for name in others:  # null is as good as not given
                raise refused(name, unlisted(one))
        arguments = as_tree(one.model.validate_python(known, context=self))
        for name, argument in one.arguments.items():
            if name not in known and not argument.default:
                del arguments[name]
        return {"class_path": path, "init_args": arguments | others}


def _refused(problem: str, key: str) -> str:
    """What is said of a refused value, with the key in it, and the settings that the key has."""
    is_model = key in ("model.teacher", "model.student")
    own = f"{key}.arch=NAME, {key}.checkpoint=FILE" if is_model else f"{key}.NAME=VALUE"
    return problem.replace("{key}", key).replace("{own}", own)


NAMELESS = "takes no settings without a class_path"
"""How the message for arguments of no class begins."""


@cache
def whole_settings() -> TypeAdapter[Any]:
    """All settings as one group: those of :mod:`kd.settings`, with Lightning's own ones of its Trainer."""
    kinds = {}
    defaults = {}
    for name, key in fields(TrainerSettings).items():
        kinds[name] = key.kind
        defaults[name] = partial(getattr, key, "value")
    trainer = group_of("Trainer", kinds, defaults)
    of_trainer = {"trainer": trainer}
    whole = group_of("Whole", of_trainer, of_trainer, Settings)
    return TypeAdapter(whole)


def _node(before: object) -> Tree:
    """A class at a place, with its arguments; without a name where there is none."""
    if isinstance(before, Mapping) and "class_path" in before:
        return {"class_path": before["class_path"], "init_args": before.get("init_args") or {}}
    return {"class_path": "", "init_args": {}}


def _is_word(value: str, kind: str) -> bool:
    """Whether a text is one of Lightning's words (``ddp``) in the place of a class."""
    is_class = "." in value or listed.listed(value, kind) or value in listed.lightnings(kind)
    return kind in WORDS and not is_class


def _kind_below(kind: object, name: str) -> object:
    """The type of the setting ``name`` below a place of the type ``kind``, or of an entry of a dict."""
    group = group_in(kind)
    if group is not None:
        return fields(group)[name].kind
    return inner_kind(kind, dict)


def _has_keys(kind: object) -> bool:
    """Whether a setting has others below it: a group, a dict, or what is known when it is built."""
    return group_in(kind) is not None or takes(kind, {})


def _join(key: str, name: str) -> str:
    """A name below a key, dotted; at the top ("") the name alone."""
    if key:
        return f"{key}.{name}"
    return name


def _interpolated(tree: Tree) -> Tree:
    """The tree with ``${KEY}`` replaced by that key's value; a user's error for a key that does not exist."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        text = " ".join(str(error).split("full_key")[0].split())
        raise UserError(f"{error.full_key}: {text}") from error

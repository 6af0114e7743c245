"""All settings of a run, merged once from files and a command line, in the types of :mod:`kd.settings`.

The tree that comes out is what builds (:mod:`kd.run.build`), what a run writes as its ``config.yaml``, and what
``--print_config`` prints. A group of settings is a dict; a class is ``{"class_path": ..., "init_args": {...}}``.
Neither torch nor Lightning is imported, unless a class of the user's own replaces one that has arguments.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    refused,
    takes,
)
from kd.config.parts import Key, plain
from kd.config.suggest import hint, nearest, timm_names
from kd.config.suggest import words as words_of_others
from kd.errors import UserError, no_such_loss
from kd.run.keys import FILLED, fields, kind_at, schema
from kd.run.trust import NAME, NOTHING, Trust, class_named, is_trusted, parameters_of, unlisted
from kd.settings import Settings, TrainerSettings
from kd.storage.elsewhere import yaml_of

Value: TypeAlias = Any
"""What YAML can hold, or a :class:`Word`."""
Tree: TypeAlias = dict[str, Any]
"""Settings by name, nested."""
DEFAULTS: Tree = {"model.task": "Classification", "model.student": {}}
"""What is set before all files."""
NAMELESS = "takes no settings without a class_path"
"""How the message for arguments of no class begins."""


ABOVE_CLASSES = (
    "data",
    "model",
    "model.student",
    "model.teacher",
    "model.distill_losses",
    "trainer",
)
"""Groups that hold a class: a word that gives one of these as a mapping may name the class."""


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


def read_word(text: str) -> object:
    """A word's value as YAML reads it; what is no YAML stays text, which the types refuse later."""
    try:
        return yaml_of(text)
    except ValueError:  # the parser says what is wrong
        return text


def words_of(overrides: Sequence[str]) -> list[dict[str, Word]]:
    """``key=value`` words, each as settings by its key: first those that name classes, which arguments follow in whichever
    order they were typed.
    """
    layers = []
    for override in overrides:
        key, _, text = override.partition("=")
        layers.append({key: Word(text, read_word(text))})

    def is_argument(layer: Mapping[str, Word]) -> bool:
        ((key, word),) = layer.items()
        if isinstance(word.value, dict) and key in ABOVE_CLASSES:
            return False
        place = key.removesuffix(".class_path")
        return not kind_at(place)

    return sorted(layers, key=is_argument)


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
        key = merge.unknown[0]
        known = [*schema(), *_keys_in(given)]
        losses = _losses_in(given)
        suggestion = hint(key, known, losses)
        raise UserError(f"no key '{key}'{suggestion}")
    if "${" in str(given):
        defaults = merge.whole(merged([DEFAULTS]))
        given = _interpolated(merge.put(defaults, [], given, Settings, ""))
    return merge.whole(given)


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
    class_kind = listed.kind_of(kind)
    if class_kind or kind is _UNLISTED:
        nodes = value if isinstance(value, list) else [value]
        for node in nodes:
            if not isinstance(node, Mapping) or "class_path" not in node:
                continue
            yield key, class_kind, dict(node)
            one = listed.listed(str(node["class_path"]), class_kind)
            kinds: Mapping[str, object] = {}
            if one is not None:
                kinds = one.fields
            arguments = node.get("init_args") or {}
            for name, inner in arguments.items():
                below = kinds.get(name, _UNLISTED)
                yield from class_nodes(inner, below, f"{key}.{name}")
    elif isinstance(value, Mapping):
        group = group_in(kind)
        for name, inner in value.items():
            below = fields(group)[name].kind if group else inner_kind(kind, dict)
            yield from class_nodes(inner, below, _join(key, str(name)))


_UNLISTED = object()
"""In the place of a type: of an argument of a class that is not on the list, which may take a class."""


def keys_of_classes(layers: Iterable[Mapping[str, Any]]) -> dict[str, Key]:
    """The keys that the classes in layers of settings bring with them, by their names as ``--keys`` has them."""
    return _keys_in(merged([DEFAULTS, *layers]))


def _keys_in(tree: Tree) -> dict[str, Key]:
    """The keys of the arguments of the listed classes in merged settings, by their whole names."""
    known: dict[str, Key] = {}
    for key, kind, node in class_nodes(tree):
        one = listed.listed(node["class_path"], kind)
        if one is None:
            continue
        for name, argument in one.arguments.items():
            whole_name = f"{key}.{name}"
            known[whole_name] = replace(argument, name=whole_name)
    return known


def _losses_in(tree: Mapping[str, Any]) -> list[str]:
    """The names of the losses in merged settings that have a class, for hints."""
    model = tree.get("model") or {}
    losses = model.get("distill_losses") or {}
    names = []
    for name, node in losses.items():
        if isinstance(node, dict) and node["class_path"]:
            names.append(name)
    return names


def check_meant(key: str, value: object, names: Sequence[str]) -> None:
    """Refuses what a run can't use, and what other programs' users mean by a value.

    Args:
        key: where the value is given, as ``--keys`` has it.
        value: as it is given.
        names: of the entries that the setting had before: of ``model.distill_losses`` its losses.

    Raises:
        UserError: with the setting that is meant, or why the value can't be used.
    """
    suggestion = meant_by(key, value, names)
    if suggestion:
        shown = "null" if value is None else value
        raise UserError(f"{key}: got '{shown}'; did you mean '{suggestion}'?")
    why = words_of_others()["reasons"].get(key, {}).get(str(value))
    if why:
        raise UserError(f"{key}: {why}")


def meant_by(key: str, value: object, losses: Sequence[str] = ()) -> str:
    """The setting that other programs' users mean by a value, for a hint; "" where it is none.

    Args:
        key: that was given the value.
        value: as YAML reads it.
        losses: names of the run's losses.
    """
    if value is None and re.fullmatch(r"model\.distill_losses\.\w+", key):
        return f"{key}.weight=0"
    if not isinstance(value, str) or value.endswith((".yaml", ".yml")):
        return ""
    if key == "optim":
        near_names = nearest(value, timm_names("optim"))
        name = next(iter(near_names), value.lower())
        return f"optim.name={name}"
    if key == "model.distill_losses":
        loss = next(iter(losses), "kd")
        return f"{key}.{loss}={value}"
    if key in words_of_others()["groups"]:
        return f"{words_of_others()['groups'][key]}={value}"
    meant = words_of_others()["values"].get(key, {}).get(value.lower(), "")
    return f"{key}={meant}" if meant and "=" not in meant else str(meant)


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
            tree = self.put(tree, [], layer, Settings, "")
        return tree

    def put(self, before: Value, path: list[str], value: Value, kind: object, key: str) -> Value:
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
        group = group_in(kind)
        if not path:
            if isinstance(value, Word):
                value = value.of(kind)
            check_meant(plain(key), value, [*before] if isinstance(before, Mapping) else [])
            is_off = value is None and NoneType in plain_members(kind)
            if group and not isinstance(value, Mapping) and not is_off:
                got = "null" if value is None else value
                of_model = f"{key}.arch=NAME, {key}.checkpoint=FILE"
                own = of_model if "checkpoint" in fields(group) else f"{key}.NAME=VALUE"
                raise UserError(f"{key}: has settings of its own ({own}), got '{got}'")
        class_kind = listed.kind_of(kind)
        if class_kind:
            return self._put_class(before, path, value, class_kind, key)
        present: Tree = dict(before) if isinstance(before, Mapping) else {}
        if path:
            return self._put_below(present, path, value, kind, key)
        if not isinstance(value, Mapping) or not (group or takes(kind, {})):
            return value
        for name in value:
            if not isinstance(name, str):  # YAML reads 007 as 7
                raise UserError(f"{plain(key)}: a name is text, got {name}")
        if group:  # it is added to
            for name, inner in value.items():
                present = self._put_below(present, name.split("."), inner, kind, key)
            return present
        below = inner_kind(kind, dict)
        return {
            name: self.put(present.get(name), [], inner, below, _join(key, name))
            for name, inner in value.items()
        }

    def _put_below(
        self, present: Tree, path: list[str], value: object, kind: object, key: str
    ) -> Tree:
        """The entries of a place, ``present``, with a value put at a path below it; an unknown name is noted in
        :attr:`unknown`. Arguments as of :meth:`put`.

        Raises:
            UserError: the place has no keys.
        """
        name, *rest = path
        adds = name.endswith("+") and not rest
        name = name.removesuffix("+")
        inner_key = _join(key, name)
        group = group_in(kind)
        if (group is not None and name not in fields(group)) or inner_key in FILLED:
            check_meant(inner_key, value.value if isinstance(value, Word) else value, [])
            self.unknown.append(".".join([inner_key, *rest]))
            return present
        if group is None and not takes(kind, {}):
            problem = f"{key} has no keys of its own, it is {in_words(kind)}"
            raise UserError(f"no key '{inner_key}': {problem}")
        below = fields(group)[name].kind if group else inner_kind(kind, dict)
        before = present.get(name)
        if not adds:
            return {**present, name: self.put(before, rest, value, below, inner_key)}
        if isinstance(value, Word):
            value = value.value
        if inner_kind(below, dict) is not Any:
            raise UserError(f"{inner_key}: has names: {inner_key}.NAME={value}")
        more = self.put(None, [], value if isinstance(value, list) else [value], below, inner_key)
        items = before or []
        if not isinstance(items, list):
            items = [items]
        return {**present, name: [*items, *more]}

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
        node: Tree = {"class_path": "", "init_args": {}}
        if isinstance(before, Mapping) and "class_path" in before:
            node = {**before}
        arguments = dict(value)
        path_of_class = arguments.pop("class_path", "")
        if path_of_class != "":
            node = self._renamed(node, path_of_class, kind, key)
        more = arguments.pop("init_args", None) or {}
        if not isinstance(more, Mapping):
            problem = f"must be settings (NAME: VALUE), got '{str(more)[:80]}'"
            raise UserError(f"{key}.init_args: {problem}")
        one = listed.listed(node["class_path"], kind)
        inner = dict(node["init_args"])
        for path_of_argument, given in {**arguments, **more}.items():
            name, *rest = str(path_of_argument).removeprefix("init_args.").split(".")
            if one is not None and one.all_known and name not in one.fields:
                self.unknown.append(f"{key}.{name}")
                continue
            below = one.fields.get(name, Any) if one else Any
            inner[name] = self.put(inner.get(name), rest, given, below, f"{key}.{name}")
        return {**node, "init_args": inner}

    def _renamed(self, node: Tree, path: object, kind: str, key: str) -> Tree:
        """A place with another class: arguments that the new class takes too are kept; those of a class that is not listed
        are read off it, where :attr:`trusted` allows its import.

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
        one = listed.listed(path, kind)
        if one is not None:
            path = one.name
        elif problem := listed.unknown_class(
            kind, path, bool(NAME.fullmatch(path)) or "${" in path
        ):
            raise UserError(f"{plain(key)}: {problem}")
        elif "." not in path:
            path = f"{listed.module_of(kind)}.{path}"
        arguments = node["init_args"]
        if arguments and path != node["class_path"]:
            names: Iterable[str] = ()
            if one is not None:
                names = one.fields
            elif self.trusted is not None:
                names = parameters_of(class_named(path, kind, key, self.trusted))
            arguments = {name: value for name, value in arguments.items() if name in names}
        return {"class_path": path, "init_args": arguments}

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
                raise no_such_loss(name, _losses_in(given)) from error
            raise UserError(f"{key}: {problem}") from error
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
            ValueError: no class, or one without a name.
            ValidationError: an argument's value is wrong, or it must be given; or the list does not have it, its class is
                not trusted, and it is other than null.
        """
        if isinstance(value, list) and kind in listed.SEVERAL:
            return [self.part(item, kind) for item in value]
        if not isinstance(value, Mapping):
            if kind in TAKE_WORDS or value is None:
                return value
            raise ValueError(listed.no_class(kind, str(value)))
        path, given = value["class_path"], value["init_args"]
        if not path:
            raise ValueError(f"{NAMELESS}, got {', '.join(map(str, given))[:80]}")
        one = listed.listed(path, kind)
        if one is None:
            return {"class_path": path, "init_args": dict(given)}
        known = {}
        others = {}
        takes_any = is_trusted(one.name, self.trusted or NOTHING)
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


def _is_word(value: str, kind: str) -> bool:
    """Whether a text is one of Lightning's words (``ddp``) in the place of a class."""
    is_class = "." in value or listed.listed(value, kind) or value in listed.lightnings(kind)
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

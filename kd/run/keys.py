"""All settings with type, default and a line of explanation, read from the source: nothing is imported for it."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from kd import settings
from kd.errors import UserError
from kd.run.annotations import members, shown, type_of, within
from kd.settings import Range

PACKAGE = Path(__file__).parent.parent
SETTINGS = PACKAGE / "settings.py"
FILLED = {"data.seed"}
"""Fields of settings that nobody may give: another setting fills them (``seed``)."""
CLASSES = {
    "losses": ("LogitLoss", "FeatureLoss", "LayersLoss"),
    "sources": ("Source",),
    "tasks": ("Task",),
}
"""The words of ``kd-train --list``, and the bases of the classes that each lists."""


def plain(key: str) -> str:
    """A key as ``--keys`` has it: ``trainer.callbacks+`` and ``model.task.init_args.x`` without what joins them."""
    return key.replace("+", "").replace(".init_args", "")


@dataclass(frozen=True)
class Key:
    """One setting, as the source declares it."""

    name: str
    """The whole key (``optim.lr``); of a class's argument, or a field of a group, its own name until it has a place."""
    kind: Any
    """Its type; what can't be imported without torch is known by its name alone."""
    default: str
    """As in the source, a Python literal; empty where it must be given."""
    text: str
    """What it means, a sentence; "" where the source does not say."""

    @property
    def value(self) -> object:
        """The default; a new object each time. None also where there is none (:attr:`default` is empty)."""
        if self.default:
            return ast.literal_eval(self.default)
        return None

    @property
    def type(self) -> str:
        """The type as text, with its range: ``float > 0``."""
        return shown(self.kind)


@cache
def _files() -> dict[str, tuple[Path, list[str]]]:
    """Where each class of ours, and Lightning's Trainer, is defined, and its bases' names.

    The files are searched as text. Of two classes of one name that in ``kd/settings.py`` counts, else the first file's;
    exports and reports hold none that settings name.
    """
    found: dict[str, tuple[Path, list[str]]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        if not {"export", "report"} & set(file.relative_to(PACKAGE).parts):
            for name, bases in re.findall(
                r"^class (\w+)(?:\(([^)]*)\))?:", file.read_text("utf-8"), re.M
            ):
                found.setdefault(name, (file, re.findall(r"\w+", bases)))
    found |= {
        name: (SETTINGS, found[name][1])
        for name in re.findall(r"^class (\w+)", SETTINGS.read_text(), re.M)
    }
    lightning = find_spec("pytorch_lightning")
    if lightning and lightning.submodule_search_locations:
        found["Trainer"] = (
            Path(lightning.submodule_search_locations[0], "trainer", "trainer.py"),
            [],
        )
    return found


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def definition(name: str) -> ast.ClassDef | None:
    """The syntax tree of one of our classes; None for any other name."""
    nodes = []
    if name in _files():
        nodes = _parsed(_files()[name][0]).body
    return next(
        (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name), None
    )


def arguments(name: str) -> dict[str, Key]:
    """The arguments of one of our classes, by name.

    A class with a constructor of its own has that one's arguments alone, in the ranges that it checks and that its bases'
    fields of these names have; a dataclass has its fields after its bases'; any other class has its bases'.

    Args:
        name: of the class; any other gives {}.
    """
    node = definition(name)
    if node is None:
        return {}
    inherited: dict[str, Key] = {}
    for base in _files()[name][1]:
        inherited |= arguments(base) if base in _files() else {}
    texts = {key.name: key.text for key in inherited.values()} | _texts(
        ast.get_docstring(node) or ""
    )
    init = next(
        (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
    )
    if init is not None:
        own_texts = texts | _texts(ast.get_docstring(init) or "")
        parameters = _parameters(init.args, own_texts)
        for argument, limit in (_limits_of_bases(inherited) | _limits_in(init)).items():
            if argument in parameters:
                key = parameters[argument]
                parameters[argument] = replace(key, kind=within(key.kind, limit))
        return parameters
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return inherited
    texts |= _field_texts(node)
    fields = [
        n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    hints = _types(name)
    own: dict[str, Key] = {}
    for declared in fields:
        field_name = ast.unparse(declared.target)
        if hints:
            kind = hints[field_name]
        else:
            kind = type_of(declared.annotation)
        own[field_name] = _key(field_name, kind, declared.value, texts)
    return inherited | own


def _limits_in(init: ast.FunctionDef) -> dict[str, Range]:
    """What a constructor allows of its arguments: its calls ``check_range("NAME", NAME, "> 0")``."""
    limits_found: dict[str, Range] = {}
    for node in ast.walk(init):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "check_range":
            name, _, allowed = node.args
            argument = ast.literal_eval(name)
            text = ast.literal_eval(allowed)
            limits_found[argument] = Range(text)
    return limits_found


def _limits_of_bases(inherited: Mapping[str, Key]) -> dict[str, Range]:
    """The ranges of inherited fields, by name."""
    limits_found: dict[str, Range] = {}
    for name, key in inherited.items():
        for limit in settings.limits(key.kind):
            if isinstance(limit, Range):
                limits_found[name] = limit
    return limits_found


def _types(name: str) -> dict[str, Any]:
    """The types of the fields of a class of ``kd/settings.py``; empty for any other class."""
    kind = vars(settings).get(name)
    if is_dataclass(kind):
        return get_type_hints(kind, include_extras=True)
    return {}


def _field_texts(node: ast.ClassDef) -> dict[str, str]:
    """What is written under each field of a dataclass: the first sentence of each."""
    texts: dict[str, str] = {}
    for field, following in pairwise(node.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(following, ast.Expr):
            continue
        text = None
        if isinstance(following.value, ast.Constant):
            text = following.value.value
        if isinstance(text, str):
            texts[ast.unparse(field.target)] = _first_sentence(text)
    return texts


def _parameters(signature: ast.arguments, texts: dict[str, str]) -> dict[str, Key]:
    """The arguments of a constructor, without ``self``; ``texts``: what its docstring says of each."""
    positional = signature.args[1:]
    without_default = len(positional) - len(signature.defaults)
    defaults: list[ast.expr | None] = [None] * without_default
    defaults += signature.defaults
    defaults += signature.kw_defaults
    arguments = positional + signature.kwonlyargs
    parameters: dict[str, Key] = {}
    for argument, default in zip(arguments, defaults, strict=True):
        name = argument.arg
        kind = type_of(argument.annotation)
        parameters[name] = _key(name, kind, default, texts)
    return parameters


def _key(name: str, kind: object, default: ast.expr | None, texts: dict[str, str]) -> Key:
    """A field as a key: its default as source text, and its line of explanation.

    Args:
        name: of the field.
        kind: its type.
        default: its expression in the source; None: it must be given.
        texts: explanations, by field.
    """
    default_text = ""
    if default is not None:
        default_text = ast.unparse(default)
    factory = re.fullmatch(r"field\(default_factory=(\w+)\)", default_text)
    if factory:
        default_text = {"dict": "{}", "list": "[]"}.get(factory[1], factory[1])
    return Key(name, kind, default_text, texts.get(name, ""))


def _texts(docstring: str) -> dict[str, str]:
    """Arguments explained in a docstring: the first sentence of each."""
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", docstring, re.M | re.S)
    if section is None:
        return {}
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w+: )", "\n" + section[1]):
        name, _, text = entry.strip().partition(": ")
        texts[name] = _first_sentence(text)
    return texts


def _first_sentence(text: str) -> str:
    sentence = re.split(r"(?<=[.;])\s", " ".join(text.split()))[0].rstrip(";")
    return sentence[:1].upper() + sentence[1:]


@cache
def fields(group: type) -> dict[str, Key]:
    """The settings of a group, a class of ``kd/settings.py``, by their names; the trainer's with Lightning's own."""
    declared = arguments(group.__name__)
    if group is not settings.TrainerSettings:
        return declared
    lightnings = arguments("Trainer")
    with_texts = {}
    for name, key in declared.items():
        text = lightnings[name].text
        with_texts[name] = replace(key, text=text)
    return lightnings | with_texts


@cache
def schema() -> dict[str, Key]:
    """Every setting with a fixed name, by its whole key."""
    return {name: key for name, key in _below("", settings.Settings).items() if name not in FILLED}


def _below(place: str, group: type) -> dict[str, Key]:
    """All keys below a group of settings, by their whole name (``model.student.arch``)."""
    keys_below: dict[str, Key] = {}
    for key in fields(group).values():
        whole_name = f"{place}.{key.name}".lstrip(".")
        inner = group_in(key.kind)
        if inner is not None:
            keys_below |= _below(whole_name, inner)
        else:
            keys_below[whole_name] = replace(key, name=whole_name)
    return keys_below


def group_in(kind: object) -> type | None:
    """The group of settings that a type takes; None where it takes none."""
    groups = [part for part in members(kind) if isinstance(part, type) and is_dataclass(part)]
    return groups[0] if groups else None


@cache
def subclasses(*bases: str) -> dict[str, str]:
    """Our classes below ``bases`` that can be named in a configuration, with the first line of their docstrings."""
    first_lines: dict[str, str] = {}
    for name in _files():
        if name.startswith("_") or name in bases or not _is_below(name, bases):
            continue
        node = definition(name)
        docstring = None
        if node is not None:
            docstring = ast.get_docstring(node)
        first_lines[name] = (docstring or "").split("\n")[0]
    return first_lines


def _is_below(name: str, bases: tuple[str, ...]) -> bool:
    """Whether a class of ours inherits from one of ``bases``, directly or through others of ours."""
    if name not in _files():
        return False
    for base in _files()[name][1]:
        if base == name:  # a class of another package with the same name
            continue
        if base in bases or _is_below(base, bases):
            return True
    return False


def table(keys: dict[str, Key], pattern: str) -> str:
    """The settings in whose key ``pattern`` occurs, a line each: key, type, default, meaning. "" gives all.

    Raises:
        UserError: no such key.
    """
    matching = [key for key in keys.values() if pattern.lower() in key.name.lower()]
    if not matching:
        raise UserError(f"no key with '{pattern}' in its name (kd-train --keys)")
    width = min(40, max(len(key.name) for key in matching))
    lines: list[str] = []
    for key in matching:
        default = ""
        if key.default:
            default = f" = {key.default}"
        lines.append(f"{key.name:<{width}}  {key.type}{default}\n")
        if key.text:
            lines.append(f"{'':<{width}}  {key.text}\n")
    return "".join(lines)

"""What a YAML file may name. Class paths are code: a file from elsewhere names classes of a short list alone.

The list is :mod:`kd.config.parts`. One's own files are recipes and overlays found by name, YAML files below the present
folder, and the ``config.yaml`` of runs started here (the cache folder keeps a digest of it). SECURITY.md, beside this
file, says what is promised.

``trusted`` is, in all functions, a :class:`Trust`: what the user trusts, in one file.
"""

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from kd.config import parts as listed
from kd.config.kinds import wrong
from kd.config.parts import Listed
from kd.errors import UserError
from kd.machine import cache_dir, shipped
from kd.run import files, typed
from kd.run.files import leaves
from kd.run.keys import kind_at, plain
from kd.run.paths import SETTINGS, holds_settings
from kd.storage.elsewhere import LARGEST_STUDENT, open_regular, text_of
from kd.storage.writing import make_folder, write_private

ALL = "*"
"""In place of names: every file is one's own, or ``--trust`` was given."""
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""A value that may name a class: a word (``SGD``), or words with dots between."""
DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
"""A value with a dot: the path of a class or module (``torch.optim.SGD``)."""
OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")
"""Keys that make a mapping a class with its arguments."""
WORDS = ("strategy", "profiler", "plugin")
"""Kinds whose settings also take Lightning's words: ddp, simple, gpu."""
PLAIN = re.compile(
    r"(^|\.)(kwargs|builder(\.init_args)?\.config)\+?\.(.*\.)?(class_path|init_args)(\.|$)"
)
"""Keys of a class below a setting that takes plain values alone (``model.student.kwargs``): they are refused."""
LOOKS_UP = re.compile(r"\$\{(?!\s*[\w.-]+\s*\})")
"""A value that holds more than another key's value: one of the environment, or a nested one."""
IMPORTING_KEY = re.compile(r"(trainer\.strategy)(\.init_args)?\.(module)")
"""Settings whose value is imported (:attr:`kd.config.parts.Listed.from_elsewhere`)."""
SENDING_KEY = re.compile(
    r"data\.tier\.address|monitor\.(otlp|webhook|cloudwatch|cloudwatch_topic|prometheus_host)"
)
"""Settings of a training that name another machine, or what is sent to one; Ray's answers are pickles."""
HERE = ("auto", "127.0.0.1", "localhost")
"""Values of these that stay on this machine."""
PLACE_KEY = re.compile(r"(?<!class_)(dir|path|folder|file|root|ur[il])$")
"""A key whose value is a file, a folder or an address, by its last letters (``data.root``, ``checkpoint_dir``)."""
PATH = re.compile(r"[/\\]|^~|^\.\.$")
"""A value that holds a path: a slash, the home folder, or the folder above."""
NO_PATH = re.compile(r"(val|train)/\w+|RUN(/[\w.+-]*[\w+-])*|")
"""Values that only look like paths: metrics (``val/acc1``), and what is in the run's folder (``RUN/NAME``)."""


class Trust(tuple[str, ...]):
    """What the user trusts in one file: names of classes and packages, ``KEY=VALUE``, or :data:`ALL`.

    It belongs to that file. Nothing that reads a model, a task or a class of a file can be called without it, and it is
    made of what the user has typed: :func:`vouched` for the settings, :meth:`of` for each other file.

    Attributes:
        file: the file that it belongs to; None: the settings, of all files and words together.
        words: ``trust=MODULE`` and ``--trust`` as they were typed; a child process gets these.
    """

    file: Path | None
    words: tuple[str, ...]

    def __new__(
        cls, names: Iterable[str] = (), file: Path | None = None, words: Iterable[str] = ()
    ) -> "Trust":
        """Takes the names, with the other two as of the class."""
        trust = super().__new__(cls, names)
        trust.file = file
        trust.words = tuple(words)
        return trust

    def __getnewargs__(self) -> tuple[Any, ...]:
        """For pickle: another process opens the same file."""
        return tuple(self), self.file, self.words

    def of(self, file: Path) -> "Trust":
        """The trust in another file: the names that the user has typed, and all names only where he typed ``--trust``."""
        names = [ALL] if "--trust" in self.words else [name for name in self if name != ALL]
        return Trust(names, file, self.words)


NOTHING = Trust()
"""The user trusts nothing beside the list."""


def check_plain(tree: object) -> None:
    """Rejects control characters, and class paths where plain values are taken (``kwargs``), whoever gave them.

    Args:
        tree: nested settings, of a file or resolved.

    Raises:
        UserError: names the key.
    """
    files.check_text(tree)
    for key, _ in files.leaves(tree):
        if PLAIN.search(key):
            raise UserError(f"{key}: a class path is not allowed here, only plain values and lists")


def check_file(file: Path, content: Mapping[Any, Any], trusted: Iterable[str]) -> None:
    """Rejects what a file from elsewhere must not say.

    Args:
        file: where ``content`` is from.
        content: settings by key, nested, dotted or both.
        trusted: modules and classes that the user trusts beside the list.

    Raises:
        UserError: names the file, the key and what it holds.
    """
    problem = None
    if not is_own(file):
        problem = _refusal(content, list(trusted))
    if problem:
        raise UserError(f"{file}: {problem}")


def vouched(
    contents: Mapping[Path, Any], overrides: Iterable[object], words: Sequence[str]
) -> Trust:
    """What the user trusts in settings: ``trust=``, and the names and paths in files of one's own and on the command line.

    Args:
        contents: settings by file.
        overrides: of the command line, ``{key: value}`` each.
        words: ``trust=MODULE``, and ``--trust``: every file counts as one's own.

    Returns:
        Names, paths, and ``KEY=VALUE`` where a value counts for its key alone; :data:`ALL` first where all of these
        settings are one's own: typed, or in files that are. A module that a setting imports is there as ``KEY=VALUE`` and,
        with dots, by its name too; another machine's address as ``KEY=VALUE`` alone. ``KEY`` stands without
        ``.init_args``, as the checks look it up. Lightning's short names of classes (``ModelSummary``) stand in full.
    """
    own_files = {}
    for file, content in contents.items():
        if "--trust" in words or is_own(file):
            own_files[file] = content
    names: list[str] = []
    if len(own_files) == len(contents):
        names = [ALL]
    names += [word.removeprefix("trust=") for word in words if word != "--trust"]
    for part in (*own_files.values(), *overrides):
        for key, value in files.leaves(part):
            if not isinstance(value, str):
                continue
            kind = kind_at(key.removesuffix(".class_path"))
            imports = IMPORTING_KEY.fullmatch(key)
            if imports:
                names.append(f"{imports[1]}.{imports[3]}={value}")
            if SENDING_KEY.fullmatch(plain(key)):
                names.append(f"{plain(key)}={value}")
            elif DOTTED_NAME.fullmatch(value) or PATH.search(value):
                names.append(value)
            elif PLACE_KEY.search(key):
                names.append(f"{plain(key)}={value}")
            elif listed.module_of(kind) and NAME.fullmatch(value):
                names.append(f"{listed.module_of(kind)}.{value}")
    return Trust(dict.fromkeys(names), None, words)


def check_resolved(config: Mapping[Any, Any], trusted: Trust) -> None:
    """Refuses in settings as they will be built, whatever they were written as, what :func:`check_file` refuses.

    Args:
        config: all settings.
        trusted: names and ``KEY=VALUE`` that the user trusts.

    Raises:
        UserError: names the key and what it holds.
    """
    problem = None
    if ALL not in trusted:
        problem = _refusal(config, list(trusted))
    if problem:
        raise UserError(problem)


def check_machines(config: Mapping[Any, Any], trusted: Trust) -> None:
    """Refuses settings of a training in which a file from elsewhere names another machine (:data:`SENDING_KEY`).

    Args:
        config: all settings.
        trusted: names and ``KEY=VALUE`` that the user trusts.

    Raises:
        UserError: names the key; the commands after a training ask no machine, so they do not call this.
    """
    if ALL in trusted:
        return
    for key, value in _sent(config):
        if f"{key}={value}" not in trusted:
            raise UserError(
                f"{key}: a file from elsewhere names no other machine, nor what is sent to one, got {value}; "
                f"if you trust it: --trust, or give {key} yourself"
            )


def _sent(config: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """The settings of :data:`SENDING_KEY` that are not of this machine, by plain key, with their values."""
    for key, value in files.leaves(config):
        name = plain(key)
        if SENDING_KEY.fullmatch(name) and isinstance(value, str) and value not in HERE:
            yield name, value


def class_named(name: str, kind: str, key: str, trusted: Trust) -> type:
    """The class that settings name: the one way from a name to a class.

    Args:
        name: its short name or class path.
        kind: what the place takes (``loss``); empty: no listed class.
        key: the setting, for messages.
        trusted: what the user trusts beside the list (:data:`ALL`: everything).

    Raises:
        UserError: neither listed for this place nor trusted, not found, not a class, or its module fails to import another.
            Whatever else a user's module raises as it is imported is raised as it is.
    """
    one = listed.listed(name, kind)
    if one is None and not is_trusted(name, trusted):
        raise UserError(f"{key} {_refused_at(name, kind)}")
    module, _, last = (one.name if one else name).rpartition(".")
    try:  # a short name that is not listed (of a student's file) may be of kd's own sources alone
        imported = _imported(module or "kd.data.sources")
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{name}.".startswith(f"{missing}."):
            raise _no_module(missing, name, kind, key) from error
        raise UserError(f"{key}: {module} can't be imported: {error}") from error
    except ImportError as error:
        raise UserError(f"{key}: {module} can't be imported: {error}") from error
    named = getattr(imported, last, None)
    if not isinstance(named, type):
        raise UserError(f"{key}: {typed.no_class(kind, name, _classes_of(imported))}")
    if one is None:
        _check_home(named, name, key, trusted)
    return named


def _check_home(cls: type, name: str, key: str, trusted: Sequence[str]) -> None:
    """Refuses a class of another package that a trusted module has only imported: ``Popen`` from ``mine``.

    Trust in a module is trust in what its package defines. A class that the user names himself is his to trust.

    Args:
        cls: the class.
        name: its path in the settings.
        key: the setting, for messages.
        trusted: what the user trusts.

    Raises:
        UserError: names the class and where it is from.
    """
    home = f"{cls.__module__}.{cls.__qualname__}"
    if ALL in trusted or {name, home} & {*trusted}:
        return
    package = cls.__module__.partition(".")[0]
    if any(other.partition(".")[0] == package for other in trusted if "=" not in other):
        return
    raise UserError(
        f"{key}: {name} is {home}, of another package than the one that you trust; if you trust it: trust={home}"
    )


def _classes_of(module: ModuleType) -> list[str]:
    """The names of the public classes that a module itself defines, sorted."""
    names = []
    for name, value in sorted(vars(module).items()):
        is_class = isinstance(value, type) and value.__module__ == module.__name__
        if is_class and not name.startswith("_"):
            names.append(name)
    return names


def check_modules(config: Mapping[str, Any]) -> None:
    """Refuses classes of the user's own that their file does not define, or whose file is not found.

    A file is looked for in the present folder and on Python's path. Nothing is imported: one in the present folder is
    parsed.

    Args:
        config: resolved settings.

    Raises:
        UserError: as :func:`class_named` would, which imports the class.
    """
    for key, value in leaves(config):
        place = key.removesuffix(".class_path")
        name = str(value)
        top = name.partition(".")[0]
        if place == key or "." not in name or top == "kd":
            continue
        place = place.replace(".init_args", "")
        spec = find_spec(top)
        origin = None if spec is None else spec.origin
        is_own = spec is None or Path(str(origin)).is_relative_to(Path.cwd())
        if is_own and _is_here(top):
            _check_defined(name, place)
        elif spec is None:
            raise _no_module(top, name, kind_at(place), place)


def _check_defined(name: str, key: str) -> None:
    """Refuses a class that its file in the present folder does not hold, as far as the file's text shows it.

    Args:
        name: class path.
        key: the setting, for messages.
    """
    module, _, last = name.rpartition(".")
    try:
        tree = ast.parse(text_of(Path(f"{module.replace('.', '/')}.py")))
    except (
        OSError,
        ValueError,
        SyntaxError,
    ):  # a package, or a file that its import has more to say of
        return
    if not _imports_are_there(tree):  # its import says which is missing
        return
    names = set()
    classes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            classes.append(node.name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Name):
            names.add(node.id)
    may_define_more = names & {"*", "__getattr__", "globals", "setattr", "exec"}
    if last not in names and not may_define_more:
        raise UserError(f"{key}: {typed.no_class(kind_at(key), name, sorted(classes))}")


def _imports_are_there(tree: ast.Module) -> bool:
    """Whether each package that a file imports is in the present folder or on Python's path."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.append(str(node.module))
    for module in modules:
        top = module.partition(".")[0]
        if not _is_here(top) and find_spec(top) is None:
            return False
    return True


def _no_module(missing: str, name: str, kind: str, key: str) -> UserError:
    """The message for a class whose module, or one above it, is not found."""
    file = f"{missing.replace('.', '/')}.py"
    problem = typed.no_class(kind, name)
    return UserError(f"{key}: {problem}; {file} was not found in this folder, nor on PYTHONPATH")


def _is_here(top: str) -> bool:
    """Whether a module is a file or package in the present folder."""
    here = Path.cwd()
    return (here / f"{top}.py").is_file() or (here / top / "__init__.py").is_file()


def _imported(module: str) -> ModuleType:
    """A module by its path; one that Python does not find may be a file or package in the present folder.

    That folder comes after all others, and only then: a folder there (``wandb/``) hides no package.

    Raises:
        ImportError: no such module, or it fails to import another.
    """
    top = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != top or not _is_here(top):
            raise
    sys.path.append(str(Path.cwd()))
    return import_module(module)


def arguments_allowed(
    name: str, kind: str, given: Mapping[str, Any], key: str, trusted: Trust
) -> dict[str, Any]:
    """The arguments of a class with those left out that are null and not listed; refuses others that are not listed.

    A class that is trusted takes any.

    Args:
        name: of the class.
        kind: of the list.
        given: arguments by name.
        key: the class's place.
        trusted: see the module.

    Raises:
        UserError: an argument that is not listed.
    """
    one = listed.listed(name, kind)
    if one is None or is_trusted(name, trusted):
        return dict(given)
    allowed = {}
    for field, value in given.items():
        if field in one.fields:
            allowed[field] = value
        elif value is not None:
            raise UserError(f"{key}.{field}: {unlisted(one)}")
    return allowed


def parameters_of(cls: type) -> Mapping[str, Parameter]:
    """The arguments of a class; {} for one of Python's own that does not say."""
    try:
        return signature(cls).parameters
    except ValueError:
        return {}


def trusted_class(name: str, trusted: Trust) -> type | None:
    """The class that a student's file names, where the user stands for it.

    Args:
        name: a class path, or a name of timm's or kd's.
        trusted: in the student's file.

    Returns:
        The class, which builds a model; None where the name is none of these modules'.

    Raises:
        UserError: it can't be imported, or builds no model.
    """
    module, _, last = name.rpartition(".")
    if (
        not name
        or name.startswith("kd.")
        or not any(other == ALL or _below(name, other) for other in trusted)
    ):
        return None
    try:
        named = getattr(_imported(module), last, None)
    except ImportError as error:
        where = "type the command in the folder of its file, or set PYTHONPATH"
        raise UserError(f"trust: {name} can't be imported: {error} ({where})") from error
    if isinstance(named, type):
        _check_home(named, name, "trust", trusted)
    if not (isinstance(named, type) and hasattr(named, "build")):
        raise UserError(f"trust: {name} is no class that builds a model")
    return named


def refused(name: str) -> str:
    """What is said of a class that is not listed: its name, the list, and how to trust it. The key comes before it."""
    module = name.rpartition(".")[0] or name
    return (
        f"names {name}, which is not among the classes that a file from elsewhere may name "
        f"(kd-train --list classes); if you trust it: trust={module}, or --trust"
    )


def _refused_at(name: str, kind: str) -> str:
    """Why a class may not be at a place that takes ``kind`` ("" for none): the end of a message, after the key."""
    if not kind:
        return f"takes no class, got {name}; if you trust this file: --trust"
    other = next((one for one in listed.classes() if name in one.names), None)
    if other:
        return f"takes a {kind}, got the {other.kind} {name} (kd-train --list classes)"
    return refused(name)


def unlisted(one: Listed) -> str:
    """What is said, after its key, of an argument that a file from elsewhere may not give to a class."""
    takes = ", ".join(one.fields) or "no arguments"
    return f"{one.short} of a file from elsewhere takes {takes}; if you trust this file: --trust"


def _refusal(content: Mapping[Any, Any], trusted: list[str]) -> str | None:
    """The first thing that a file from elsewhere must not say in its settings, a text; None where all is allowed.

    Raises:
        UserError: what :func:`check_plain` refuses in any file.
    """
    check_plain(content)
    return next(_problems(content, "", "", trusted), None)


def _problems(value: object, key: str, kind: str, trusted: list[str]) -> Iterator[str]:
    """What a file from elsewhere may not say in a value, a text for each.

    Args:
        value: of ``key``.
        key: whole, dotted, without ``init_args``.
        kind: the kind of class that is taken there, or an empty text.
        trusted: names that the user trusts.
    """
    if isinstance(value, list):
        for item in value:
            yield from _problems(item, key, kind, trusted)
    elif isinstance(value, dict) and (kind or not value.keys().isdisjoint(OF_A_CLASS)):
        yield from _problems_of_class(value, key, kind, trusted)
    elif isinstance(value, dict):
        for name, inner in _nested(value, key):
            yield from _problems(inner, name, kind_at(name), trusted)
    elif isinstance(value, str):
        problem = _problem_of_text(value, key, kind, trusted)
        if problem:
            yield problem


def _problems_of_class(
    value: dict[Any, Any], key: str, kind: str, trusted: list[str]
) -> Iterator[str]:
    """What a file from elsewhere may not say in the mapping of a class, a text for each.

    Args:
        value: the mapping, which may lack ``class_path``.
        key: its place.
        kind: of class that the place takes; "": none.
        trusted: names and ``KEY=VALUE`` that the user trusts.
    """
    name = value.get("class_path")
    if name is not None and (not isinstance(name, str) or not NAME.fullmatch(name)):
        yield f"{key}.class_path must be the name of a class, got '{str(name)[:80]}'"
        return
    one = listed.listed(name, kind) if name else None
    own = name is not None and is_trusted(name, trusted)
    if name and one is None and not own:
        yield f"{key} {_refused_at(name, kind)}"
        return
    if value.get("dict_kwargs") and not own:
        yield f"{key}.dict_kwargs: is not allowed in a file from elsewhere, only init_args; if you trust it: --trust"
        return
    if not name and not kind:
        yield f"{key} takes no class, got {', '.join(map(str, value))}; if you trust this file: --trust"
        return
    for field, inner in _arguments(value, key):
        short = field.rpartition(".")[2]
        if one is None or own:  # the user's class, or arguments of one that another file names
            kinds = {
                "" if own else listed.kind_of(other.fields[short])
                for other in listed.classes()
                if other.kind == kind and short in other.fields
            }
            yield from _problems(inner, field, max(kinds, default=""), trusted)
        elif short in one.fields:
            problem = wrong(one.fields_from_elsewhere[short], inner)
            if problem and f"{field}={inner}" not in trusted:
                yield f"{field}: {problem}"
            yield from _problems(inner, field, listed.kind_of(one.fields[short]), trusted)
        elif inner is not None:
            yield f"{field}: {unlisted(one)}"


def _problem_of_text(value: str, key: str, kind: str, trusted: list[str]) -> str:
    """What a file from elsewhere may not say in a text, or "": look-ups, other files, paths outside the run,
    classes.
    """
    if value in trusted or f"{key}={value}" in trusted:
        return ""
    if key == "resume":
        return f"resume: a file from elsewhere resumes no run, got {value}; give resume= yourself"
    if LOOKS_UP.search(value):
        return f"{key} looks up '{value}'; if you trust this file: --trust"
    whole = kind or holds_settings(key)
    if whole and "${" in value:
        return f"{key} must be written out in a file from elsewhere, got '{value}'"
    if whole and value.endswith(SETTINGS):
        return f"{key}: settings from elsewhere must be in one file, got {value}; if you trust them: --trust"
    if key.endswith(".cache_dir"):
        return f"{key}: a file from elsewhere names no folder to write to, got '{value}'; if you trust it: --trust"
    if (
        key.startswith("trainer.")
        and not NO_PATH.fullmatch(value)
        and (PLACE_KEY.search(key) or PATH.search(value))
    ):
        return f"{key} must lie in the run's folder (RUN, RUN/NAME), got '{value}'; if you trust this file: --trust"
    is_word = "." not in value and kind in WORDS
    if (
        not kind
        or is_word
        or not NAME.fullmatch(value)
        or listed.listed(value, kind)
        or is_trusted(value, trusted)
    ):
        return ""
    return f"{key} {_refused_at(value, kind)}"


def _nested(value: Mapping[Any, Any], key: str) -> Iterator[tuple[str, Any]]:
    """The entries of a mapping with their whole keys; of a dotted key the part before its first dot."""
    for name, inner in value.items():
        first, _, rest = str(name).partition(".")
        whole_key = first.removesuffix("+")
        if key:
            whole_key = f"{key}.{whole_key}"
        if rest:
            yield whole_key, {rest: inner}
        else:
            yield whole_key, inner


def _arguments(value: Mapping[Any, Any], key: str) -> Iterator[tuple[str, Any]]:
    """The arguments of a class, beside its ``class_path`` or in ``init_args`` or ``dict_kwargs``, with their whole keys.

    Args:
        value: the class's mapping.
        key: its place.
    """
    for name, inner in _nested(value, ""):
        holds_arguments = name in ("init_args", "dict_kwargs")
        if holds_arguments and isinstance(inner, dict):
            for argument, given in _nested(inner, ""):
                yield f"{key}.{argument}", given
        elif name != "class_path":
            yield f"{key}.{name}", inner


def is_trusted(value: str, trusted: Sequence[str]) -> bool:
    """Whether the user stands for a class, by its path or by the name of a module above it.

    Both names of a class count, ``value`` and, once its module is imported, that of its definition. A module stands for
    what its package defines, not for what it imports from another: :func:`_check_home` looks, once the class is there.
    """
    if ALL in trusted:
        return True
    names = [value]
    kind = _loaded(value)
    if kind is not None:
        if kind in map(_loaded, trusted):
            return True
        names.append(f"{kind.__module__}.{kind.__qualname__}")
    return any(_below(name, other) for other in trusted for name in names)


def _loaded(name: str) -> type | None:
    """The class of a name whose module has been imported before, else None; nothing is imported here, which would run its
    code.
    """
    module, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(module), last, None)
    return found if isinstance(found, type) else None


def _below(name: str, module: str) -> bool:
    """Whether a dotted name is a module, class or package, or in it; ``mine`` is not above ``mine2.A``."""
    return name == module or name.startswith(f"{module}.")


def is_own(file: Path) -> bool:
    """Whether a YAML file is one's own: shipped with kd, written by a run on this machine, or below the working
    directory.

    A ``config.yaml`` is a run's, wherever it lies: it counts if a run here has written just this content.
    """
    file = file.resolve()
    if any(file.is_relative_to(shipped(kind).resolve()) for kind in ("recipes", "configs")):
        return True
    if file.name == "config.yaml":  # a run's
        return made_here(file)
    return file.is_relative_to(Path.cwd().resolve())


def remember(text: str, config: dict[str, Any]) -> None:
    """Notes that a run of these settings was started here, where a file from elsewhere could not have named them.

    Settings that any file may name need no note.

    Args:
        text: the content of the run's ``config.yaml``.
        config: the same settings.
    """
    if _refusal(config, []) or any(_sent(config)):
        remember_made(text.encode())


def remember_made(content: bytes) -> None:
    """Notes, in the user's cache folder, that this machine has written a file with this content."""
    note = _note(hashlib.sha256(content).hexdigest())
    make_folder(note.parent)
    note.parent.chmod(0o700)
    write_private(note, b"")


def made_here(file: Path) -> bool:
    """Whether :func:`remember_made` was called for the file's content on this machine."""
    with open_regular(file, LARGEST_STUDENT) as opened:
        note = _note(hashlib.file_digest(opened, "sha256").hexdigest())
    return _is_mine(note.parent) and _is_mine(note)


def _is_mine(path: Path) -> bool:
    """Whether a file or folder is there that this user alone can have made: in a shared cache others write too."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022  # a link's mode is 777


def _note(digest: str) -> Path:
    """The empty file that notes a content, by its SHA-256 in hexadecimal."""
    return cache_dir() / f"own_runs-{os.geteuid()}" / digest

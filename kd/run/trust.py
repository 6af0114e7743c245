"""Which files are one's own, and which classes a name may mean. Class paths are code.

A file from elsewhere names classes of a short list alone (:mod:`kd.config.parts`; :mod:`kd.run.gate` checks it). One's own
files are recipes and overlays found by name, YAML files below the present folder, and the ``config.yaml`` of runs started
here (the cache folder keeps a digest of it). SECURITY.md, beside this file, says what is promised.

``trusted`` is, in all functions, a :class:`Trust`: what the user trusts, in one file.
"""

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType

from kd.config import parts as listed
from kd.config.parts import Listed
from kd.errors import UserError
from kd.machine import cache_dir, shipped
from kd.storage.elsewhere import LARGEST_STUDENT, open_regular
from kd.storage.writing import make_folder, write_bytes

ALL = "*"
"""In place of names: every file is one's own, or ``--trust`` was given."""
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""A value that may name a class: a word (``SGD``), or words with dots between."""


@dataclass(frozen=True)
class Trust:
    """What the user trusts in one file.

    It belongs to that file. Nothing that reads a model, a task or a class of a file can be called without it, and it is
    made of what the user has typed: :func:`kd.run.gate.vouched` for the settings, :meth:`of` for each other file.
    """

    names: Sequence[str] = ()
    """Names of classes and packages, or :data:`ALL`."""
    file: Path | None = None
    """The file that it belongs to; None: the settings, of all files and words together."""
    words: Sequence[str] = ()
    """``trust=MODULE`` and ``--trust`` as they were typed; a child process gets these."""

    def of(self, file: Path) -> "Trust":
        """The trust in another file: the names that the user has typed, and all names only where he typed ``--trust``."""
        names = [ALL] if "--trust" in self.words else [name for name in self.names if name != ALL]
        return Trust(names, file, self.words)


NOTHING = Trust()
"""The user trusts nothing beside the list."""


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
    one = listed.listed_class(name, kind)
    if one is None and not is_trusted(name, trusted.names):
        raise UserError(f"{key} {refused_at(name, kind)}")
    module, _, last = (one.name if one else name).rpartition(".")
    try:  # a short name that is not listed (of a student's file) may be of kd's own sources alone
        imported = _imported(module or "kd.data.sources")
    except ImportError as error:
        missing = error.name or ""
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{missing}."):
            raise no_module(missing, name, kind, key) from error
        raise UserError(f"{key}: {module} can't be imported: {error}") from error
    named = getattr(imported, last, None)
    if not isinstance(named, type):
        classes = [other for other, value in vars(imported).items() if isinstance(value, type)]
        raise UserError(f"{key}: {listed.no_class(kind, name, classes)}")
    if one is None:
        _check_home(named, name, key, trusted.names)
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


def no_module(missing: str, name: str, kind: str, key: str) -> UserError:
    """The message for a class whose module, or one above it, is not found."""
    file = f"{missing.replace('.', '/')}.py"
    problem = listed.no_class(kind, name)
    return UserError(f"{key}: {problem}; {file} was not found in this folder, nor on PYTHONPATH")


def is_here(top: str) -> bool:
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
        if error.name != top or not is_here(top):
            raise
    sys.path.append(str(Path.cwd()))
    return import_module(module)


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
    is_users = any(other == ALL or _below(name, other) for other in trusted.names)
    if not name or name.startswith("kd.") or not is_users:
        return None
    named = class_named(name, "", "trust", trusted)
    if not hasattr(named, "build"):
        raise UserError(f"trust: {name} is no class that builds a model")
    return named


def why_refused(name: str) -> str:
    """What is said of a class that is not listed: its name, the list, and how to trust it. The key comes before it."""
    module = name.rpartition(".")[0] or name
    return (
        f"names {name}, which is not among the classes that a file from elsewhere may name "
        f"(kd-train --list classes); if you trust it: trust={module}, or --trust"
    )


def refused_at(name: str, kind: str) -> str:
    """Why a class may not be at a place that takes ``kind`` ("" for none): the end of a message, after the key."""
    if not kind:
        return f"takes no class, got {name}; if you trust this file: --trust"
    other = next((one for one in listed.classes() if name in one.names), None)
    if other:
        return f"takes a {kind}, got the {other.kind} {name} (kd-train --list classes)"
    return why_refused(name)


def unlisted(one: Listed) -> str:
    """What is said, after its key, of an argument that a file from elsewhere may not give to a class."""
    takes = ", ".join(one.fields) or "no arguments"
    return f"{one.short} of a file from elsewhere takes {takes}; if you trust this file: --trust"


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


def remember_made(content: bytes) -> None:
    """Notes, in the user's cache folder, that this machine has written a file with this content."""
    note = _note(hashlib.sha256(content).hexdigest())
    make_folder(note.parent)
    note.parent.chmod(0o700)
    write_bytes(note, b"", private=True)


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

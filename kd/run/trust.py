"""What a YAML file may run. Class paths are code: a file from elsewhere may name classes of known packages alone.

One's own are recipes and overlays found by name, YAML files below the present folder, and the ``config.yaml`` of runs
started here (the cache folder keeps a digest of it). SECURITY.md, beside this file, says what is promised.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.machine import cache_dir
from kd.run import files
from kd.run.paths import folder
from kd.storage.elsewhere import LARGEST_STUDENT, open_regular
from kd.storage.writing import write_bytes

PACKAGES = ("kd", "torch", "torchvision", "torchmetrics", "timm", "pytorch_lightning", "lightning_fabric")
ALL = "*"  # in place of names: every file is one's own, or --trust was given
NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
BUILT = re.compile(r"^(data\.source|model\.(task|distill_losses)|students|trainer)\b|\bclass_path$")
PLAIN = re.compile(r"(^|\.)(kwargs|builder(\.init_args)?\.config)\+?\.(.*\.)?(class_path|init_args)(\.|$)")
LOOKS_UP = re.compile(r"\$\{(?!\s*[\w.-]+\s*\})")  # more than another key's value: the environment, a nested one
PLACE = re.compile(r"(?<!class_)(dir|path|folder|file|root|ur[il])$")
PATH = re.compile(r"[/\\]|^~|^\.\.$")
NO_PATH = re.compile(r"(val|train)/\w+|RUN(/[\w.+-]*[\w+-])*|")  # metrics, and what lies in the run's folder


def check_plain(tree: object) -> None:
    """Rejects control characters, and class paths where plain values are taken (``kwargs``)."""
    files.check_text(tree)
    for key, _ in files.leaves(tree):
        if PLAIN.search(key):
            raise UserError(f"{key}: a class path is not allowed here, only plain values and lists")


def check_file(file: Path, content: Mapping[Any, Any], trusted: Iterable[str]) -> None:
    """Rejects what a file from elsewhere must not name, beside :data:`PACKAGES` and ``trusted`` modules.

    Args:
        file: a YAML file.
        content: what it holds.
        trusted: modules that the user trusts beyond :data:`PACKAGES`.

    Raises:
        UserError: a class of another package, something that is no class, or an interpolation that looks outside.
    """
    reason = None if is_own(file) else _refusal(content, list(trusted))
    if reason:
        raise UserError(f"{file}: {reason}")


def vouched(contents: Mapping[Path, Any], overrides: Iterable[object], trusted: Iterable[str], all_: bool) -> list[str]:
    """What the user stands for: ``trust=``, and the names and paths in files of one's own and on the command line."""
    own = {file: content for file, content in contents.items() if all_ or is_own(file)}
    said = [value for part in (*own.values(), *overrides) for _, value in files.leaves(part) if isinstance(value, str)]
    said = [value for value in said if NAMED.fullmatch(value) or PATH.search(value)]
    return list(dict.fromkeys([*([ALL] if len(own) == len(contents) else []), *trusted, *said]))


def check_resolved(config: Mapping[Any, Any], trusted: list[str]) -> None:
    """Refuses in settings as they will be built, whatever they were written as, what :func:`check_file` refuses."""
    reason = None if ALL in trusted else _refusal({**config, "trainer": _chosen(config["trainer"])}, trusted)
    if reason:
        raise UserError(reason)


def _chosen(tree: object) -> object:
    if isinstance(tree, list):
        return [_chosen(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    kind = _loaded(str(tree.get("class_path", "")))
    usual = signature(kind).parameters if kind else {}
    own = {k: v for k, v in (tree.get("init_args") or {}).items() if k not in usual or v != usual[k].default}
    return {key: _chosen(own if key == "init_args" else value) for key, value in tree.items()}


def trusted_class(name: str, trusted: list[str]) -> type | None:
    """The class that a file names, where the user stands for it: ``trust=``, or the settings, which were checked."""
    module, _, last = name.rpartition(".")
    if not name or name.startswith("kd.") or not (ALL in trusted or any(_below(name, other) for other in trusted)):
        return None
    try:
        found = getattr(import_module(module), last, None)
    except ImportError as error:
        raise UserError(f"trust: {error}") from error
    if not (isinstance(found, type) and hasattr(found, "build")):
        raise UserError(f"trust: {name} is no class that builds a model")
    return found


def importable(trusted: Iterable[str]) -> list[str]:
    """The packages that class paths may name: kd's own list and those of the trusted modules."""
    return [*PACKAGES, *{name.split(".")[0] for name in trusted if NAMED.fullmatch(f"{name}.x")}]


def refused(name: str) -> str:
    """Why a class path is refused, with what the user may do."""
    return f"names {name}, code outside {', '.join(PACKAGES[:-1])}{_remedy(name)}"


def _remedy(name: str) -> str:
    return f"; if you trust it: trust={name.rpartition('.')[0]}, or --trust"


def _refusal(content: Mapping[Any, Any], trusted: list[str]) -> str | None:
    check_plain(content)
    for key, value in _leaves(content):
        if not isinstance(value, str) or value in trusted:
            continue
        if LOOKS_UP.search(value):
            return f"{key} looks up '{value}'; if you trust this file: --trust"
        if key.startswith("trainer.") and not NO_PATH.fullmatch(value) and (PLACE.search(key) or PATH.search(value)):
            return (f"{key} must lie in the run's folder (RUN, RUN/NAME), got '{value}'; if you trust this file: "
                    "--trust")  # fmt: skip
        if NAMED.fullmatch(value) and BUILT.search(key) and not _trusted(value, trusted):
            reason = _refused_class(value, key.endswith("class_path"))
            if reason:
                return f"{key} {reason}"
    return None


def _leaves(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values; of text that the parser takes for a list or a mapping those in it."""
    for key, value in files.leaves(tree, path):
        inner = files.structure(value) if isinstance(value, str) else None
        yield from [(key, value)] if inner is None else _leaves(inner, key)


def _refused_class(value: str, certain: bool) -> str | None:
    package, (module, _, name) = value.split(".")[0], value.rpartition(".")
    if package not in PACKAGES:
        return refused(value) if certain or find_spec(package) is not None else None
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        return None  # the parser says it better
    known = isinstance(found, type) and found.__module__.split(".")[0] in PACKAGES
    return None if found is None or known else f"names {value}, which is no class{_remedy(value)}"


def _trusted(value: str, trusted: Iterable[str]) -> bool:
    kind = _loaded(value)
    names = [value, *([f"{kind.__module__}.{kind.__qualname__}"] if kind else [])]
    same = kind is not None and kind in map(_loaded, trusted)
    return same or any(_below(name, other) for other in trusted for name in names)


def _loaded(name: str) -> type | None:
    module, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(module), last, None)
    return found if isinstance(found, type) else None


def _below(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def is_own(file: Path) -> bool:
    """Whether a YAML file is one's own: shipped with kd, written by a run on this machine, or below the working
    directory.
    """
    file = file.resolve()
    if any(file.is_relative_to(folder(kind).resolve()) for kind in ("recipes", "configs")):
        return True
    if file.name == "config.yaml":  # a run's
        return made_here(file)
    return file.is_relative_to(Path.cwd().resolve())


def remember(text: str, config: dict[str, Any]) -> None:
    """Notes that a run of these settings was started here, where a file from elsewhere could not have named them."""
    if _refusal(config, []):
        remember_made(text.encode())


def remember_made(content: bytes) -> None:
    """Notes, in the user's cache folder, that this machine has written a file with this content."""
    write_bytes(_note(hashlib.sha256(content).hexdigest()), b"")


def made_here(file: Path) -> bool:
    """Whether :func:`remember_made` was called for the file's content on this machine."""
    with open_regular(file, LARGEST_STUDENT) as opened:
        return _note(hashlib.file_digest(opened, "sha256").hexdigest()).is_file()


def _note(digest: str) -> Path:
    return cache_dir() / "own_runs" / digest

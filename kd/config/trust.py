"""What a YAML file may run. Class paths are code: a file from elsewhere may name classes of known packages alone.

Files of one's own are the recipes and overlays that are found by name, and YAML files below the present folder. A run
folder's ``config.yaml`` is one's own where its run was started here (the cache folder remembers a digest of it).
"""

import hashlib
import re
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from kd.config import files
from kd.config.find import folder
from kd.errors import UserError

PACKAGES = ("kd", "torch", "torchvision", "torchmetrics", "timm", "pytorch_lightning", "lightning_fabric")
NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
BUILT = re.compile(r"^(data\.source|model\.(task|distill_losses)|students|trainer)\b|\bclass_path$")
PLAIN = re.compile(r"(^|\.)(kwargs|builder(\.init_args)?\.config)\+?\.(.*\.)?(class_path|init_args)(\.|$)")


def check_plain(tree: object, where: str) -> None:
    """Arguments of architectures and optimizers are plain values and lists: a class path there would be called.

    Texts hold no control characters.

    Args:
        tree: settings.
        where: what they come from, for the message.

    Raises:
        UserError: ``class_path`` below ``kwargs``.
    """
    files.check_text(tree, where)
    for key, _ in files.leaves(tree):
        if PLAIN.search(key):
            raise UserError(f"{where}{key}: a class path can't stand here, where plain values and lists are taken")


def check_file(file: Path, content: dict[Any, Any], trusted: Iterable[str]) -> None:
    """Refuses what a file from elsewhere must not name.

    Args:
        file: a YAML file.
        content: what it holds.
        trusted: modules that the user trusts beyond :data:`PACKAGES`.

    Raises:
        UserError: a class of another package, something that is no class, or an interpolation that looks outside.
    """
    reason = None if is_own(file) else _refusal(content, trusted)
    if reason:
        raise UserError(f"{file}: {reason}")


def _refusal(content: dict[Any, Any], trusted: Iterable[str] = ()) -> str | None:
    for key, value in files.leaves(content):
        if not isinstance(value, str):
            continue
        if re.search(r"\$\{[^}]*:", value):
            return f"{key} looks up '{value}'; if you trust this file: --trust"
        if NAMED.fullmatch(value) and BUILT.search(key) and not any(_below(value, name) for name in trusted):
            reason = _refused_class(value)
            if reason:
                return f"{key} names {value}, {reason}; if you trust it: trust={value.rpartition('.')[0]}, or --trust"
    return None


def _refused_class(value: str) -> str | None:
    package, (module, _, name) = value.split(".")[0], value.rpartition(".")
    if package not in PACKAGES:
        return None if find_spec(package) is None else f"code outside {', '.join(PACKAGES[:-1])}"
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        return None  # the parser says it better
    return "which is no class" if found is not None and not isinstance(found, type) else None


def _below(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def is_own(file: Path) -> bool:
    """Whether a YAML file is one's own (see above)."""
    file = file.resolve()
    if any(file.is_relative_to(folder(kind).resolve()) for kind in ("recipes", "configs")):
        return True
    if file.name == "config.yaml":  # a run's
        return _note(file.read_bytes()).is_file()
    return file.is_relative_to(Path.cwd().resolve())


def remember(config: str) -> None:
    """Notes that a run of these settings was started here, where a file from elsewhere could not have named them."""
    if _refusal(yaml.safe_load(config)):
        note = _note(config.encode())
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _note(content: bytes) -> Path:
    from kd.data.sources import cache_dir  # heavy, and needed for runs alone

    return cache_dir() / "own_runs" / hashlib.sha256(content).hexdigest()

"""A command line, sorted by kind. Imports nothing heavy: a wrong word is reported at once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kd.config.find import find
from kd.errors import UserError

KEY = re.compile(r"^(?:--)?([A-Za-z_][\w.]*\+?)=(.*)$", re.S)


@dataclass
class Request:
    """A command line, sorted by kind.

    Attributes:
        recipe: name or path.
        overlays: names or paths, in order.
        overrides: ``key=value`` items, in order.
        resume: a run folder.
        cluster: what the launcher's environment says of the trainer; beaten by overrides.
        flags: ``help``, ``list``, ``print_config``, ``version``.
        rest: what is none of these.
    """

    recipe: str | None = None
    overlays: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    resume: str | None = None
    cluster: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    rest: list[str] = field(default_factory=list)

    def parser_args(self) -> list[str]:
        """For the parser, in order of rising priority: recipe, overlays, overrides."""
        files = [find("recipes", self.recipe)] if self.recipe else []
        files += [find("configs", overlay) for overlay in self.overlays]
        for file in files:
            _check_yaml(file)
        args = [f"--config={file}" for file in files]
        if self.recipe and not re.search(r"^recipe:", files[0].read_text(encoding="utf-8"), re.M):
            args.append(f"--recipe={files[0].stem}")
        return args + self.cluster + [f"--{item}" for item in self.overrides]


def _check_yaml(file: Path) -> None:
    """Raises a UserError that names the file and the place where it is no YAML mapping."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold settings (key: value), not {type(content).__name__}")


def translate(argv: Sequence[str]) -> Request:
    """Sorts a command line: ``key=value``, ``--key=value`` and ``--key value`` mean the same, in any order.

    Raises:
        UserError: an item that is none of these.

    >>> translate(["trainer.max_epochs=3", "--seed", "1", "recipe=foodtag_vit"]).overrides
    ['trainer.max_epochs=3', 'seed=1']
    """
    request, items = Request(), list(argv)
    while items:
        item = items.pop(0)
        if item in ("-h", "--help", "--list", "--print_config", "--version", "--open", "--traces"):
            request.flags.add("help" if item == "-h" else item.lstrip("-"))
            continue
        match = KEY.match(item)
        if match:
            key, value = match.groups()
        elif item.startswith("--") and items:
            key, value = item[2:], items.pop(0)
        elif item.endswith((".yaml", ".yml")):
            key, value = "recipe", item
        elif item.startswith("-"):
            raise UserError(f"{item} needs a value: {item.lstrip('-')}=...")
        else:
            request.rest.append(item)
            continue
        _sort_in(request, key, value)
    return request


def _sort_in(request: Request, key: str, value: str) -> None:
    if key == "recipe":
        if request.recipe is not None:
            raise UserError(f"recipe is given twice: '{request.recipe}' and '{value}'")
        request.recipe = value
    elif key == "config":
        request.overlays.append(value)
    elif key == "resume":
        request.resume = value
    else:
        request.overrides.append(f"{key}={value}")

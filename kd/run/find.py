"""Finds recipes and overlays: inside the installed package, else beside it in a checkout."""

import difflib
from pathlib import Path

from kd.errors import UserError

PACKAGE = Path(__file__).parent.parent


def folder(kind: str) -> Path:
    """The folder of ``recipes`` or ``configs``: the wheel carries them as ``kd/_recipes`` and ``kd/_configs``."""
    inside = PACKAGE / f"_{kind}"
    return inside if inside.is_dir() else PACKAGE.parent / kind


def names(kind: str) -> dict[str, str]:
    """All recipes or overlays: name -> the first comment line of the file."""
    return {p.stem: _first_comment(p) for p in sorted(folder(kind).glob("*.yaml"))}


def listing(kind: str, prefix: str) -> str:
    """Recipes or overlays, a line each."""
    return "".join(f"  {prefix}{name:<22} {first}\n" for name, first in names(kind).items())


def part_of(overlay: str, recipe: str) -> list[Path]:
    """What an overlay changes of one recipe alone: ``recipes/<overlay>/<recipe>.yaml``, where there is such a file."""
    file = folder("recipes") / overlay / f"{recipe}.yaml"
    return [file] if file.is_file() else []


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def find(kind: str, name: str) -> Path:
    """The file of a recipe or overlay, by its name or as a path.

    Raises:
        UserError: there is none; the nearest name is told.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or "/" in name:
        if path.is_file():
            return path
        raise UserError(f"no file {name}")
    found = folder(kind) / f"{name}.yaml"
    if found.is_file():
        return found
    what = {"recipes": "recipe", "configs": "overlay"}[kind]
    near = difflib.get_close_matches(name, names(kind), 1, 0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise UserError(f"no {what} '{name}'{hint} (kd-train --list)")

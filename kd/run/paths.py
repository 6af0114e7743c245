"""Recipes and overlays by their names."""

from pathlib import Path

from kd.config.parts import describe_list, of_kind
from kd.config.suggest import near, why_needless
from kd.errors import UserError
from kd.machine import shipped

SETTINGS = (".yaml", ".yml")
"""Endings of files of settings."""


PARTS = ("FeatureRegression",)
"""Classes that losses are made of: ``--list losses`` leaves them out."""
LISTS = {"losses": "loss", "sources": "source", "tasks": "task"}
"""The words of ``kd-train --list``, and the kind of class that each lists."""
OTHER_NAMES = {"distill": "grocery_vit"}
"""Other names of recipes: name -> file's name."""


def names(kind: str) -> dict[str, str]:
    """All recipes or overlays by name, with the first line of the file where that is a comment, else "".

    Args:
        kind: ``recipes`` or ``configs``.
    """
    comments = {}
    for file in sorted(shipped(kind).glob("*.yaml")):
        first_line = file.read_text(encoding="utf-8").partition("\n")[0]
        comment = ""
        if first_line.startswith("#"):
            comment = first_line[1:].strip()
        comments[file.stem] = comment
    return comments


def files_listed(kind: str, prefix: str) -> str:
    """Recipes or overlays with their first comment line, a line each.

    Args:
        kind: ``recipes`` or ``configs``.
        prefix: before each name, as one types it (``recipe=``).
    """
    text = ""
    for name, first_line in names(kind).items():
        text += f"  {prefix}{name:<22} {first_line}\n"
    return text


def part_of(overlay: str, recipe: str) -> list[Path]:
    """What an overlay changes of one recipe alone: ``recipes/<overlay>/<recipe>.yaml``; [] where there is no such file.

    Args:
        overlay: its name, as in ``config=``; ``tune`` for the search that is shipped with a recipe.
        recipe: the recipe's name, or another of :data:`OTHER_NAMES`; a recipe named by its path has no such file.
    """
    file = shipped("recipes") / overlay / f"{OTHER_NAMES.get(recipe, recipe)}.yaml"
    if file.is_file():
        return [file]
    return []


def find(kind: str, name: str) -> Path:
    """The file of a recipe or overlay, by its name or as a path.

    Args:
        kind: ``recipes`` or ``configs``.
        name: a path where it has a slash or ends in ``.yaml`` or ``.yml``.

    Raises:
        UserError: no such file or name; the message has the nearest name.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or "/" in name:
        if path.is_file():
            return path
        raise UserError(f"no file {name}")
    if kind == "recipes":
        name = OTHER_NAMES.get(name, name)
    file = shipped(kind) / f"{name}.yaml"
    if file.is_file():
        return file
    what = {"recipes": "recipe", "configs": "overlay"}[kind]
    known = [*names(kind)]
    if kind == "recipes":
        known += OTHER_NAMES
    known += [file.name for file in sorted(Path().glob("*.yaml"))]
    remedy = why_needless(name) or f"{near(name, known)} (kd-train --list)"
    raise UserError(f"no {what} '{name}'{remedy}")


def list_of_kind(kind: str) -> str:
    """What ``--list KIND`` prints.

    Args:
        kind: ``losses``, ``sources``, ``tasks``, ``models`` (timm's; imports it) or ``classes``; "": recipes and overlays.

    Raises:
        UserError: another kind.
    """
    if not kind:
        return files_listed("recipes", "recipe=") + files_listed("configs", "config=")
    if kind == "models":
        import timm

        return "".join(f"{name}\n" for name in timm.list_models())
    if kind == "classes":
        return describe_list()
    if kind not in LISTS:
        raise UserError(f"--list: lists {', '.join([*LISTS, 'models', 'classes'])}, not '{kind}'")
    first_lines = {one.short: one.text for one in of_kind(LISTS[kind]) if one.short not in PARTS}
    return "".join(f"  {name:<20} {text}\n" for name, text in sorted(first_lines.items()))

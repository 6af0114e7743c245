"""Values that a setting can't have, by its type as the source says it: reported before torch is imported."""

import ast
import math
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.run.keys import CLASSES, Key, definition, members, plain, subclasses
from kd.run.suggest import near, nearest
from kd.settings import Like, Range

TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "dict": "settings (NAME: VALUE)",
    "list": "a list",
    "tuple": "a list",
}
SETTINGS = (".yaml", ".yml")
LOGGERS = {"csv": "CSVLogger", "mlflow": "MLFlowLogger", "tensorboard": "TensorBoardLogger", "wandb": "WandbLogger",
           "comet": "CometLogger", "neptune": "NeptuneLogger"}  # fmt: skip
HALF = {
    "amp": "16-mixed",
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "half": "16-mixed",
    "bfloat16": "bf16-mixed",
}
PRECISIONS = {**HALF, "fp32": "32-true", "float32": "32-true"}
REASONS = {
    "trainer.precision": {
        name: f"{name} has no room for gradients; 16-mixed scales them"
        for name in ("16-true", "transformer-engine-float16")
    },
    "trainer.enable_checkpointing": {
        "False": "must be true: a run is resumed from its last epoch and exports its best one"
    },
    "trainer.strategy": {
        "smddp": "smddp is a backend of DDP; config=smddp_4x8 sets it (no smddp for kd's torch exists yet)"
    }
    | {
        f"{module}ModelParallelStrategy": "tensor and pipeline parallel training is not supported: a student fits on "
        "one device; config=fsdp shards one that does not, model.teacher.placement=shard a teacher"
        for module in ("", "lightning.pytorch.strategies.", "pytorch_lightning.strategies.")
    },
    "trainer.barebones": {
        "True": "must be false: callbacks, checkpoints and log make a run's folder"
    },
}
"""Values that Lightning takes and a run can't use."""
CLASS = re.compile(
    r"data\.source|model\.task|model\.distill_losses\.[^.]+|trainer\.(callbacks|logger|strategy)|.*\.class_path"
)
"""Settings that take a class by its name or path."""


def check_values(
    given: Iterable[tuple[str, Any]], known: Mapping[str, Key], losses: Iterable[str] = ()
) -> None:
    """Refuses values that their settings' types and ranges do not allow.

    Args:
        given: keys and values, as typed or as read.
        known: all settings.
        losses: names of the recipe's distillation losses.

    Raises:
        UserError: the first one, by its key, with what is allowed or probably meant.
    """
    for key, value in given:
        name = plain(key)
        meant = meant_by(name, value, losses)
        if meant:
            raise UserError(
                f"{name}: got '{'null' if value is None else value}'; did you mean '{meant}'?"
            )
        if problem := _unknown_class(name, value) or _unknown_to_timm(name, value):
            raise UserError(f"{name.removesuffix('.class_path')}: {problem}")
        kind = _kind(name, known)
        if kind is None and (problem := _misplaced(name, value, known)):
            raise UserError(problem)
        if kind is None or "${" in str(value):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}: must be a finite number, got {value}")
        if why := REASONS.get(name, {}).get(str(value)):
            raise UserError(f"{name}: {why}")
        one = (
            [value] if key.endswith("+") and not isinstance(value, list) else value
        )  # what a list gets more of
        if _takes(kind, one) is False:
            if value is None:
                raise UserError(f"{name}: can't be null")
            words = list(dict.fromkeys(_words(kind)))
            raise UserError(
                f"{name}: must be {' or '.join(words)}, got '{value}'{near(value, _allowed(kind))}"
            )
        for limit in _limits(kind):
            if problem := limit.refuses(_number(value)):
                raise UserError(
                    f"{name}: {problem}, got {_shown(value)}{near(value, _allowed(kind))}"
                )


def wrong(kind: ast.expr, value: object) -> str:
    """What is wrong with a value of an annotation; empty where it fits, or where only the parser can tell."""
    if "${" in str(value) or _takes(kind, value) is not False:
        return ""
    return f"must be {' or '.join(dict.fromkeys(_words(kind)))}, got '{str(value)[:80]}'"


def _misplaced(name: str, value: object, known: Mapping[str, Key]) -> str:
    """What is wrong with a plain value for a group of settings, or with a key below a plain setting."""
    above, _, _ = name.rpartition(".")
    if above in known and _takes(known[above].kind, {}) is False:
        words = " or ".join(dict.fromkeys(_words(known[above].kind)))
        return f"no key '{name}': {above} has no keys of its own, it is {words}"
    group = any(key.startswith(f"{name}.") for key in known)
    fits = value is None or isinstance(value, dict) or str(value).endswith(SETTINGS)
    return no_plain_value(name, value) if group and not fits else ""


def _kind(name: str, known: Mapping[str, Key]) -> ast.expr | None:
    name = re.sub(r"^model\.teachers\.[^.]+\.", "model.teacher.", name)
    if name in known:
        return known[name].kind
    parent = known.get(name.rpartition(".")[0])
    inside = (
        [n for n in ast.walk(parent.kind) if isinstance(n, ast.Subscript) and _name(n) == "dict"]
        if parent
        else []
    )
    return _inside(inside[0])[-1] if inside else None


def no_plain_value(key: str, given: object) -> str:
    """The message for a plain value where settings of its own belong."""
    model = key in ("model.teacher", "model.student")
    own = f"{key}.arch=NAME, {key}.checkpoint=FILE" if model else f"{key}.NAME=VALUE"
    return f"{key}: has settings of its own ({own}), got '{given}'"


def _shown(value: object) -> str:
    return f"'{value[:80]}'" if isinstance(value, str) else f"{value}"


def meant_by(key: str, value: object, losses: Iterable[str] = ()) -> str:
    """The setting that other programs' users mean by a value; or an empty text."""
    if not isinstance(value, str) or value.endswith(SETTINGS):
        return (
            f"{key}.weight=0"
            if value is None and re.fullmatch(r"model\.distill_losses\.\w+", key)
            else ""
        )
    if key == "optim":
        return f"optim.name={next(iter(nearest(value, timm_names('optim'))), value.lower())}"
    if key in ("data", "monitor"):
        return f"{key}.source={value}" if key == "data" else f"checkpoint.monitor={value}"
    if key == "model.distill_losses":
        return f"{key}.{next(iter(losses), 'kd')}={value}"
    names = {"trainer.logger": LOGGERS, "trainer.precision": PRECISIONS}.get(key, {})
    if value.lower() in names:
        return f"{key}={names[value.lower()]}"
    return (
        "model.task.class_weights=auto"
        if key.endswith("class_weights") and value == "balanced"
        else ""
    )


def no_class(key: str, given: str) -> str:
    """The message for an unknown class in the place of a setting, with the nearest name or the known ones."""
    known = _class_names(key)
    ours = any(part[:-1] in key for part in CLASSES)
    listed = (
        f"ours: {', '.join(known)}; others by their class path"
        if ours
        else "a class path: package.Class"
    )
    what = "class or folder" if key == "data.source" and "." not in given else "class"
    return f"no {what} '{given}'{near(given.rpartition('.')[2], known) or f' ({listed})'}"


def _class_names(key: str) -> list[str]:
    """The classes that a setting takes by name alone: ours by their bases, and Lightning's from its source."""
    part = next((part for part in (*CLASSES, "callbacks", "loggers") if part[:-1] in key), "")
    if part in CLASSES:
        return sorted(subclasses(*CLASSES[part]))
    lightning = find_spec("pytorch_lightning") if part else None
    file = Path(
        next(iter(lightning.submodule_search_locations or ())) if lightning else "",
        part,
        "__init__.py",
    )
    public = re.findall(r'^    "(\w+)",', file.read_text("utf-8"), re.M) if file.is_file() else []
    return public + list(subclasses("Callback") if part == "callbacks" else ())


def _unknown_class(key: str, value: object) -> str:
    """What is wrong with a class's name; empty for a path outside kd, which the parser imports."""
    if not CLASS.fullmatch(re.sub(r"^students\.[^.]+\.", "", key)):
        return ""
    for one in value if isinstance(value, list) else [value]:
        given = one.get("class_path") if isinstance(one, dict) else one
        if not (
            isinstance(given, str) and re.fullmatch(r"\w+|kd(\.\w+)+", given)
        ) or given.endswith(SETTINGS):
            continue
        name, known = given.rpartition(".")[2], _class_names(key)
        if name in known or (definition(name) if name != given else not known):
            continue
        if not any(
            isinstance(vars(module).get(name), type) for module in [*sys.modules.values()] if module
        ):
            return no_class(key, given)
    return ""


def _number(value: object) -> object:
    """A number that YAML took for text (``1e-3``)."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _name(kind: ast.expr) -> str:
    return ast.unparse(kind.value if isinstance(kind, ast.Subscript) else kind).rpartition(".")[2]


def _inside(kind: ast.expr) -> list[ast.expr]:
    """What ``Annotated`` is about, or a list, tuple or dict holds."""
    inside = kind.slice if isinstance(kind, ast.Subscript) else ast.Tuple([])
    return inside.elts if isinstance(inside, ast.Tuple) else [inside]


def _takes(kind: ast.expr, value: object) -> bool | None:
    """Whether a type takes a value; None where only the parser knows."""
    if isinstance(kind, ast.BinOp):
        found = [_takes(part, value) for part in members(kind)]
        return True if True in found else None if None in found else False
    name = _name(kind)
    if name == "Annotated":
        return _takes(_inside(kind)[0], value)
    if name == "Literal":
        return value in (words := [ast.literal_eval(part) for part in _inside(kind)]) or str(
            value
        ) in map(str, words)
    if name == "None":
        return value is None or value == "null"
    if isinstance(value, str) and value.endswith(SETTINGS) and name in ("dict", "list", "tuple"):
        return None
    if name in ("int", "float"):
        number = _number(value)
        whole = isinstance(number, int | float) and not isinstance(number, bool)
        return whole and (name == "float" or number == number // 1)  # type: ignore[operator]
    if name == "bool":
        return isinstance(value, bool)
    if name == "str":
        return not isinstance(value, dict | list)
    if name == "dict":
        inside = _inside(kind)[1:]
        return (
            isinstance(value, dict) and _all(inside[0], value.values())
            if inside
            else isinstance(value, dict)
        )
    if name in ("list", "tuple"):
        inside = _inside(kind)
        any_length = name == "list" or ast.unparse(inside[-1]) == "..."
        if not isinstance(value, list | tuple) or not (any_length or len(value) == len(inside)):
            return False
        return _all(inside[0], value)
    return None


def _all(kind: ast.expr, values: Iterable[object]) -> bool | None:
    found = [_takes(kind, value) for value in values]
    return False if False in found else None if None in found else True


def _words(kind: ast.expr) -> list[str]:
    if isinstance(kind, ast.BinOp):
        return [word for part in members(kind) if _name(part) != "None" for word in _words(part)]
    if _name(kind) == "Annotated":
        return _words(_inside(kind)[0])
    if _name(kind) == "Literal":
        return [
            f"one of {', '.join(dict.fromkeys(str(ast.literal_eval(part)) for part in _inside(kind)))}"
        ]
    return [TYPES.get(_name(kind), _name(kind))]


def _allowed(kind: ast.expr) -> list[str]:
    """The words that a type takes, for a suggestion: of ``Literal``, and plain ones of ``Like``."""
    named = [
        str(ast.literal_eval(word))
        for part in ast.walk(kind)
        if isinstance(part, ast.Subscript) and _name(part) == "Literal"
        for word in _inside(part)
    ]
    likes = [limit for limit in _limits(kind) if isinstance(limit, Like)]
    return named + [
        word
        for like in likes
        for word in re.findall(r"\w+", like.text)
        if word in like.pattern.split("|")
    ]


def _limits(kind: ast.expr) -> list[Range | Like]:
    found: list[Range | Like] = []
    for node in ast.walk(kind):
        if isinstance(node, ast.Call) and _name(node.func) in ("Range", "Like"):
            found.append(
                {"Range": Range, "Like": Like}[_name(node.func)](*map(ast.literal_eval, node.args))
            )
    return found


@cache
def timm_names(part: str) -> frozenset[str]:
    """Names of timm's models, or of its optimizers, from its source; empty where it has none that is understood."""
    timm = find_spec("timm")
    root = Path(next(iter(timm.submodule_search_locations or ()))) if timm else Path("timm")
    if part == "optim":
        files, pattern = [root / "optim" / "_optim_factory.py"], r"[\"'](\w+)[\"']"
    else:
        files, pattern = (
            list((root / "models").glob("*.py")),
            r"^@register_model\s*\n(?:@.*\n)*def (\w+)",
        )
    return frozenset(
        name
        for f in files
        if f.is_file()
        for name in re.findall(pattern, f.read_text("utf-8"), re.M)
    )


def _unknown_to_timm(key: str, value: object) -> str:
    """What is wrong with the name of an optimizer or a model; empty where it may be one."""
    if "${" in str(value):
        return ""
    if key == "optim.name" and isinstance(value, str) and timm_names("optim"):
        there = timm_names("optim")
        return (
            ""
            if value in there
            else f"must be one of timm's optimizers, got '{value}'{near(value, there, 3)}"
        )
    if not (
        re.fullmatch(r"model\.(student|teacher)\.arch", key) and isinstance(value, str) and value
    ):
        return ""
    name = re.sub(r"^timm/", "", value)
    known = timm_names("models")
    timm = sys.modules.get("timm")  # where it is imported, models of one's own may be registered
    if (
        not known
        or ":" in name
        or name.partition(".")[0] in known
        or (timm and timm.is_model(name))
    ):
        return ""
    return f"timm has no model '{name}'{near(name, known)}"

"""Values that a setting can't have, by its type as the source says it: reported before torch is imported."""

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from kd.errors import UserError
from kd.run.keys import Key

TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "dict": "settings (NAME: VALUE)",
    "list": "a list",
}
LOGGERS = {"csv": "CSVLogger", "mlflow": "MLFlowLogger", "tensorboard": "TensorBoardLogger", "wandb": "WandbLogger",
           "comet": "CometLogger", "neptune": "NeptuneLogger"}  # fmt: skip
HALF = {"amp": "16-mixed", "fp16": "16-mixed", "float16": "16-mixed", "half": "16-mixed", "bfloat16": "bf16-mixed"}
PRECISIONS = {**HALF, "fp32": "32-true", "float32": "32-true"}


def check_types(given: Iterable[tuple[str, Any]], known: Mapping[str, Key], losses: Iterable[str] = ()) -> None:
    """Refuses text in place of numbers, truth values and fixed names; all else is left to the parser.

    Args:
        given: keys and values as YAML reads them.
        known: the settings that there are.
        losses: names of the recipe's distillation losses.

    Raises:
        UserError: the first such value, with what is allowed or meant.
    """
    for key, value in given:
        name = key.rstrip("+").replace(".init_args", "")
        meant = meant_by(name, value, losses)
        if meant:
            raise UserError(f"{name}: got '{value}'; did you mean '{meant}'?")
        if name not in known or not isinstance(value, str | float) or "${" in str(value):
            continue
        wanted = _wanted(ast.parse(known[name].type, mode="eval").body)
        if wanted and not _is_one(value, wanted):
            words = " or ".join(dict.fromkeys(word for word, _ in wanted))
            raise UserError(f"{name}: must be {words}, got '{value}'")


def meant_by(key: str, value: object, losses: Iterable[str] = ()) -> str:
    """The setting that other programs' users mean by a value; empty where there is none.

    >>> meant_by("optim", "SGD"), meant_by("monitor", "val/acc1"), meant_by("trainer.logger", "wandb")
    ('optim.name=sgd', 'checkpoint.monitor=val/acc1', 'trainer.logger=WandbLogger')
    """
    if not isinstance(value, str) or value.endswith((".yaml", ".yml")):
        return ""
    if key == "optim":
        return f"optim.name={value.lower()}"
    if key in ("data", "monitor"):
        return f"{key}.source={value}" if key == "data" else f"checkpoint.monitor={value}"
    if key == "model.distill_losses":
        return f"{key}.{next(iter(losses), 'kd')}={value}"
    if key == "trainer.logger" and value.lower() in LOGGERS:
        return f"{key}={LOGGERS[value.lower()]}"
    if key == "trainer.precision" and value.lower() in PRECISIONS:
        return f"{key}={PRECISIONS[value.lower()]}"
    return "model.task.class_weights=auto" if key.endswith("class_weights") and value == "balanced" else ""


Taken = tuple[str, frozenset[object]]


def _wanted(kind: ast.expr) -> list[Taken]:
    """What a type takes, in words and as what is taken; empty where it takes more than a check of this kind knows."""
    if isinstance(kind, ast.BinOp):
        parts: list[ast.expr] = [kind.left, kind.right]
    elif isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Union" and isinstance(kind.slice, ast.Tuple):
        parts = kind.slice.elts
    elif isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Literal":
        names = ast.literal_eval(kind.slice)
        names = names if isinstance(names, tuple) else (names,)
        return [(f"one of {', '.join(map(str, names))}", frozenset(names))]
    else:
        name = ast.unparse(kind)
        return [(TYPES[name], frozenset([name]))] if name in ("int", "float", "bool") else []
    found = [_wanted(part) for part in parts if ast.unparse(part) != "None"]
    return [one for each in found for one in each] if all(found) else []


def _is_one(value: str | float, wanted: list[Taken]) -> bool:
    taken = frozenset[object]().union(*(names for _, names in wanted))
    if isinstance(value, str) and value in taken - {"int", "float", "bool"}:
        return True
    try:
        number = float(value)
    except ValueError:
        return False
    return "float" in taken or ("int" in taken and not number % 1)

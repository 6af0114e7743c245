"""Every setting is read somewhere, and one that nothing reads beside the others ends a run before it begins."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import pytorch_lightning

from kd.config import parts as listed
from kd.config.suggest import words
from kd.run import keys
from kd.run.request import translate
from kd.run.resolve import keys_of_classes
from scripts.house import tree_of
from tests._files import read_yaml, write_yaml
from tests._helpers import ROOT, refuses

CLASSES = [one for kind in ("loss", "source", "task") for one in listed.of_kind(kind)]


@cache
def reads(file: Path) -> dict[str, int]:
    """The lines that read a name, as ``x.name``, as a variable, or by its text (``getattr``, a dict's key)."""
    found: dict[str, int] = {}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.attr if isinstance(node, ast.Attribute) else node.id] = node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.setdefault(node.value, node.lineno)
    return found


def readers(name: str) -> list[str]:
    """``file:line`` of each place in the package that reads a name."""
    files = sorted((ROOT / "kd").rglob("*.py"))
    return [
        f"{file.relative_to(ROOT)}:{reads(file)[name]}" for file in files if name in reads(file)
    ]


def test_every_setting_says_where_it_is_read() -> None:
    own = [name for one in CLASSES for name in one.arguments]
    whole = [name for name in keys.schema() if not name.startswith("trainer.")]
    places = {name: readers(name.rpartition(".")[2]) for name in [*whole, *own]}
    assert not [name for name, found in places.items() if not found]
    assert readers("read_by_nobody_at_all") == []
    trainer = {
        name.removeprefix("trainer.") for name in keys.schema() if name.startswith("trainer.")
    }
    assert not trainer - set(reads(Path(inspect.getfile(pytorch_lightning.Trainer))))


def test_what_decides_is_a_setting() -> None:
    known = set(keys.schema()) | {"model.teachers.a.cache"}
    for idle in words()["idle"]:
        pattern, switches = idle["settings"], idle["of"]
        named = [
            found
            for name in [*known, *keys_of_classes([])]
            if (found := re.fullmatch(pattern, name))
        ]
        assert named, pattern
        assert {named[0].expand(switch) for switch in switches} <= known


def check(items: list[str]) -> None:
    request = translate(items)
    request.check_read(request.resolved())


SMOOTH = ["model.task=Classification", "model.task.label_smoothing=0.1"]


@pytest.mark.parametrize(
    "items",
    [
        [*SMOOTH],
        [
            "model.task=Classification",
            "model.task.label_smoothing=0.0",
            "model.task_loss_weight=0",
        ],  # the default
        ["model.teacher.cache=on", "model.teacher.cache_views=2"],
        ["data.augment.cutmix=1", "data.augment.mix_probability=0.5"],
        ["monitor.enabled=false", "monitor.rules_every_s=0"],  # asks for nothing
        ["trainer.default_root_dir=x", "trainer.callbacks+=tests._stop.Slow"],
        ["config=debug"],  # inherit_pictures, for recipes whose student inherits
    ],
    ids=lambda items: items[-1],
)
def test_a_setting_that_is_read_passes(items: list[str], recipe: Path) -> None:
    check([f"recipe={recipe}", *items])


def test_a_recipes_setting_may_be_made_idle_but_not_be_idle(recipe: Path) -> None:
    config = read_yaml(recipe)
    config["model"]["task"] = {
        "class_path": "kd.tasks.Classification",
        "init_args": {"label_smoothing": 0.1},
    }
    write_yaml(recipe, config)
    check([f"recipe={recipe}", "model.task_loss_weight=0"])
    config["model"]["task_loss_weight"] = 0.0
    write_yaml(recipe, config)
    with refuses(r"label_smoothing: 0\.1 has no effect"):
        check([f"recipe={recipe}"])
    write_yaml(
        recipe, {**config, "name": None, "resume": None, "rank_timeout_s": 600}
    )  # as a run saves it
    check([f"recipe={recipe}"])


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "recipes").glob("*.yaml"))])
@pytest.mark.parametrize("overlay", [[], ["config=debug"]])
def test_our_recipes_have_no_idle_setting(name: str, overlay: list[str]) -> None:
    check([f"recipe={name}", *overlay])

"""The table of classes is that of the classes: under its versions to the letter, under others each argument exists."""

import inspect
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest

import kd.data.sources
import kd.losses
import kd.tasks
from kd.config import parts as listed
from kd.config.kinds import read
from kd.data.sources import Source
from kd.losses import DistillLoss
from kd.tasks import Task
from scripts import parts


def test_the_table_is_what_its_script_writes() -> None:
    """``python scripts/parts.py`` writes it anew."""
    held = listed.positive_list()
    if held["versions"] == {
        package: version(package).partition("+")[0] for package in held["versions"]
    }:
        assert held == parts.table()


@pytest.mark.parametrize("one", listed.classes(), ids=lambda one: one.short)
def test_each_listed_argument_exists(one: listed.Listed) -> None:
    module, _, name = one.name.rpartition(".")
    cls = getattr(import_module(module), name)
    parameters = inspect.signature(cls).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    assert takes_any or {*one.arguments} <= {*parameters}
    for path in one.paths:
        home, _, short = path.rpartition(".")
        assert getattr(import_module(home), short) is cls


@pytest.mark.parametrize(
    ("package", "base", "kind"),
    [(kd.losses, DistillLoss, "loss"), (kd.data.sources, Source, "source"), (kd.tasks, Task, "task")],
)  # fmt: skip
def test_our_public_classes_are_listed(package: Any, base: type, kind: str) -> None:
    public = {name for name in package.__all__ if inspect.isclass(getattr(package, name))}
    bases = {"Task", "Source", "DistillLoss", "LogitLoss", "FeatureLoss"}
    ours = {name for name in public if issubclass(getattr(package, name), base)}
    assert ours - bases <= {one.short for one in listed.of_kind(kind)}


def test_types_of_the_table() -> None:
    loss = next(one for one in listed.of_kind("loss") if one.short == "KDLoss")
    assert loss.arguments["temperature"].type == "a number > 0"
    assert loss.arguments["weight"].type == "a number >= 0"
    assert loss.arguments["final_temperature"].type == "a number or null > 0"
    assert read(listed.kind_named("dict[str, list[float]] | Literal['auto', 3]")).shown == (
        "settings (NAME: VALUE) or one of auto, 3"
    )

"""Listed classes: each of their arguments is checked by its type, wherever it is given, before torch is imported."""

import re

import pytest

from kd.config import parts as listed
from kd.config.kinds import read, wrong
from kd.errors import UserError
from kd.run.resolve import resolve

PLACES = {
    "source": "data.source",
    "task": "model.task",
    "loss": "model.distill_losses.kd",
    "projection": "model.distill_losses.kd.projection",
    "builder": "model.teacher.builder",
    "strategy": "trainer.strategy",
    "callback": "trainer.callbacks",
    "logger": "trainer.logger",
    "profiler": "trainer.profiler",
    "transform": "data.augment.transform",
}
"""A setting that takes a class of the kind."""
WRONG = [{"wrong": [1]}, "a word", -3.5, ["a word"]]
"""Values of which each type refuses one."""
RIGHT = ["a word", 1, ["a word"], {}]
"""Values of which each type takes one."""


def arguments_with_wrong_values() -> list[tuple[listed.Listed, str, object]]:
    """Each argument of each listed class that has a type of plain values, with a value that the type refuses."""
    cases = []
    for one in listed.classes():
        for name, kind in one.fields.items():
            refused = [value for value in WRONG if wrong(kind, value)]
            if refused and not read(kind).part:
                cases.append((one, name, refused[0]))
    return cases


def required_arguments(one: listed.Listed) -> dict[str, object]:
    """A value that fits for each argument without a default."""
    given: dict[str, object] = {}
    for name, argument in one.arguments.items():
        if argument.default or not one.all_known:
            continue
        if read(argument.kind).part == "loss":
            given[name] = {"class_path": "KDLoss"}
        else:
            given[name] = next(value for value in RIGHT if not wrong(argument.kind, value))
    return given


CASES = arguments_with_wrong_values()


@pytest.mark.parametrize(
    ("one", "name", "value"), CASES, ids=[f"{one.short}.{name}" for one, name, _ in CASES]
)
def test_a_value_of_another_type_names_its_key(
    one: listed.Listed, name: str, value: object
) -> None:
    """In a file and on a command line alike: both are resolved here."""
    place = PLACES[one.kind]
    given = {**required_arguments(one), name: value}
    node: dict[str, object] = {"class_path": one.name, "init_args": given}
    if place.endswith(".projection"):
        layers = {"model.distill_losses.kd": {"class_path": "HintLoss"}, place: node}
    else:
        layers = {place: [node] if one.kind == "callback" else node}
    with pytest.raises(UserError) as caught:
        resolve([layers])
    message = str(caught.value)
    assert re.match(rf"{re.escape(place)}\.{name}(\.wrong)?: must be ", message), message
    assert "got" in message
    assert "\n" not in message


def test_all_classes_of_kd_have_arguments_in_the_walk() -> None:
    """A class without a typed argument would pass it unseen."""
    walked = {one.name for one, _, _ in CASES}
    untyped = set()
    for one in listed.classes():
        has_values = any(not read(kind).part for kind in one.fields.values())
        if one.name.startswith("kd.") and has_values and one.name not in walked:
            untyped.add(one.name)
    assert untyped == set()
    assert "kd.teachers.StoredAnswers" in walked

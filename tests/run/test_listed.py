"""Listed classes: each of their arguments is checked by its type, wherever it is given, before torch is imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kd.cli import main
from kd.config import parts as listed
from kd.config.kinds import takes
from kd.errors import UserError
from kd.run.request import Request
from kd.run.resolve import resolve
from kd.run.run import Run
from kd.run.trust import check_machines

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
            refused = [value for value in WRONG if not takes(kind, value)]
            if refused and not listed.kind_of(kind):
                cases.append((one, name, refused[0]))
    return cases


def required_arguments(one: listed.Listed) -> dict[str, object]:
    """A value that fits for each argument without a default."""
    given: dict[str, object] = {}
    for name, argument in one.arguments.items():
        if argument.default or not one.all_known:
            continue
        if listed.kind_of(argument.kind) == "loss":
            given[name] = {"class_path": "KDLoss"}
        else:
            given[name] = next(value for value in RIGHT if takes(argument.kind, value))
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
        has_values = any(not listed.kind_of(kind) for kind in one.fields.values())
        if one.name.startswith("kd.") and has_values and one.name not in walked:
            untyped.add(one.name)
    assert untyped == set()
    assert {"kd.teachers.Address", "kd.teachers.AnswersFile", "kd.teachers.ChatAddress"} <= walked


ADDRESS = "model.teacher.answers=http://127.0.0.1:9"
CHAT = "model.teacher.answers=http://127.0.0.1:9/v1/chat/completions"
FILE = "model.teacher.answers=answers.csv"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([ADDRESS, "model.teacher.builder.rate=abc"], "model.teacher.builder.rate: must be a number, got 'abc'"),
        ([ADDRESS, "model.teacher.builder.retries=x"], "model.teacher.builder.retries: must be a whole number, got 'x'"),
        ([ADDRESS, "model.teacher.builder.budget=-5"], "model.teacher.builder.budget: must be > 0, got -5"),
        ([ADDRESS, "model.teacher.builder.price=-1"], "model.teacher.builder.price: must be >= 0, got -1"),
        ([ADDRESS, "model.teacher.builder.batch=1.5"], "model.teacher.builder.batch: must be a whole number, got '1.5'"),
        ([CHAT], "model.teacher.answers: needs model: model.teacher.builder.model=VALUE (The endpoint's name of the model)"),
        (["model.teacher.answers=no.such.Teacher"], "model.teacher.answers: no class 'no.such.Teacher'; "
         "no.py was not found in this folder, nor on PYTHONPATH"),
        (["model.teacher.builder=no.such.Teacher", "model.teacher.checkpoint=null", "model.teacher.recipe=null"],
         "model.teacher.builder: no class 'no.such.Teacher'; no.py was not found in this folder, nor on PYTHONPATH"),
        ([FILE, "model.teacher.builder.budget=5"],
         "no key 'model.teacher.builder.budget' (model.teacher.builder takes file); budget is of Address and ChatAddress"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_answers_from_elsewhere(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("train", ["recipe=photos", *words]) == 2
    assert capsys.readouterr().err == f"kd-train: {message}\n"


def test_they_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    words = ["recipe=photos", ADDRESS, "model.teacher.builder.rate=abc"]
    code = f"import sys; from kd.cli import main; print(main('train', {words}), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 False\n"


def test_a_recipe_from_elsewhere_names_no_address_and_no_key_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures, and the variable of the environment that ``key`` names, would be sent there. A file is no address."""
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()

    def settings(builder: dict[str, object], *words: str) -> dict[str, object]:
        file = tmp_path / "theirs.yaml"
        teacher = {"checkpoint": None, "recipe": None, "builder": builder}
        file.write_text(yaml.safe_dump({"model": {"teacher": teacher}}))
        return Run.of(Request("photos", [str(file)], [*words])).config

    url = {"url": "http://evil.example/v1/chat/completions", "model": "eyes"}
    secret = {"model": "eyes", "key": "AWS_SECRET_ACCESS_KEY"}
    monkeypatch.chdir(tmp_path / "mine")
    with pytest.raises(
        UserError, match=r"^model\.teacher\.builder\.url: a file from elsewhere names"
    ):
        settings({"class_path": "kd.teachers.ChatAddress", "init_args": url})
    with pytest.raises(
        UserError, match=r"^model\.teacher\.builder\.key: a file from elsewhere names"
    ):
        settings({"class_path": "kd.teachers.ChatAddress", "init_args": secret}, CHAT)
    settings({"class_path": "kd.teachers.AnswersFile", "init_args": {"file": "a.csv"}})
    for place in ("model.student", "students.a.model.student"):  # any builder may be one that asks
        builder: dict[str, object] = {"class_path": "kd.teachers.ChatAddress", "init_args": url}
        for name in reversed([*place.split("."), "builder"]):
            builder = {name: builder}
        file = tmp_path / "theirs.yaml"
        file.write_text(yaml.safe_dump(builder))
        with pytest.raises(UserError, match=rf"{place}\.builder\.url: a file from elsewhere names"):
            check_machines(Run.of(Request("photos", [str(file)], [])).config, [])
    monkeypatch.chdir(tmp_path)
    settings({"class_path": "kd.teachers.ChatAddress", "init_args": url})

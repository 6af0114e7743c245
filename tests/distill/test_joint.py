"""Several students in one run."""

import csv
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kd.cli import eval_main, train_main
from tests._helpers import TINY, write_recipe
from tests._runs import assert_same, run_folders, student_of

STUDENTS: dict[str, dict[str, Any]] = {
    "labels": {
        "model.distill_losses.kd.weight": 0,
        "model.task_loss_weight": 1.0,
        "optim.lr": 0.003,
    },
    "dropped": {
        "model.student.kwargs.proj_drop_rate": 0.5,
        "model.ema_decay": 0.9,
        "optim.name": "sgd",
    },
}
AS = f"students={json.dumps(STUDENTS)}"


def columns(file: Path, name: str) -> list[str]:
    with file.open() as opened:
        return [row[name] for row in csv.DictReader(opened) if row.get(name)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, pictures: Path, teacher: Path) -> Path:
    return write_recipe(tmp_path_factory.mktemp("joint") / "tiny.yaml", pictures, teacher)


@pytest.fixture(scope="module")
def joint(recipe: Path) -> Path:
    """A finished run of the two; not to be changed. What it has printed is beside it."""
    with (recipe.parent / "out").open("w") as out, redirect_stdout(out):
        assert train_main([f"recipe={recipe}", AS, "name=joint"]) == 0
    return recipe.parent / "runs" / "tiny" / "joint"


def test_each_student_comes_out_as_if_trained_alone(recipe: Path, joint: Path) -> None:
    out = (recipe.parent / "out").read_text()
    summary = json.loads((joint / "summary.json").read_text())
    assert list(summary["students"]) == list(STUDENTS)
    for name in STUDENTS:
        own = joint / "students" / name
        assert f"{name}, best epoch" in out
        assert (
            train_main([str(own / "config.yaml")]) == 0
        )  # its own settings: the same run without the others
        alone = run_folders(recipe)[-1]
        assert_same(student_of(own), student_of(alone))
        for metric in ("train/loss", "val/acc1"):
            assert columns(own / "metrics.csv", metric) == columns(alone / "metrics.csv", metric), (
                name,
                metric,
            )
        theirs = json.loads((alone / "summary.json").read_text())["student"]
        assert summary["students"][name] == theirs
        assert json.loads((own / "summary.json").read_text())["student"] == theirs
    assert eval_main([str(joint / "students" / "labels")]) == 0
    assert eval_main([str(joint)]) == 2  # which one?


def test_it_resumes_bit_for_bit(recipe: Path, joint: Path) -> None:
    stop = json.dumps({"class_path": "tests._stop.FailAtStep", "init_args": {"step": 8}})
    assert train_main([f"recipe={recipe}", AS, f"trainer.callbacks+={stop}"]) == 1
    part = run_folders(recipe)[-1]
    assert train_main([f"resume={part}", "trainer.callbacks=null"]) == 0
    for name in STUDENTS:
        assert_same(student_of(part / "students" / name), student_of(joint / "students" / name))


def test_the_teacher_is_asked_once_a_batch(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kd.teachers import FrozenTeacher

    asked = []
    whole = FrozenTeacher.__call__
    monkeypatch.setattr(
        FrozenTeacher,
        "__call__",
        lambda self, images: asked.append(len(images)) or whole(self, images),
    )
    assert train_main([f"recipe={recipe}", AS, "trainer.max_epochs=1"]) == 0
    preflight, steps = 2, 6
    assert len(asked) == preflight + steps


@pytest.mark.parametrize(
    ("students", "message"),
    [
        (
            {"a": {"data.batch_size": 3}},
            "students.a: may differ in model.student, its losses and optim, not in",
        ),
        ({"a": {"model.teacher.arch": "resnet10t"}}, "students.a: may differ"),
        ({"a": {"optim.zero": True}}, "optim.zero: needs several processes"),
        ({"a/b": {}}, "students: a name is made of letters"),
        ({"a": {"optim.rl": 1}}, "no key 'optim.rl'"),
    ],
)
def test_mistakes_end_in_one_line(
    students: dict, message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(recipe.parent.rglob("*"))
    assert train_main([f"recipe={recipe}", f"students={json.dumps(students)}"]) == 2
    assert message in capsys.readouterr().err
    assert sorted(recipe.parent.rglob("*")) == before


def test_the_saved_configuration_holds_the_students(joint: Path) -> None:
    assert yaml.safe_load((joint / "config.yaml").read_text())["students"] == STUDENTS
    assert torch.load(joint / "checkpoints" / "last.ckpt", weights_only=True)["kd_classes"]


def test_a_single_student_may_have_a_name(recipe: Path) -> None:
    assert (
        train_main([f"recipe={recipe}", "students={low: {optim.lr: 1e-4}}", "trainer.max_epochs=1"])
        == 0
    )
    assert (run_folders(recipe)[-1] / "students" / "low" / "student.safetensors").is_file()


def test_losses_with_parameters_are_drawn_as_alone(recipe: Path) -> None:
    """Whatever is drawn before a loss's projection: a student of its own size, a teacher that another has built."""
    losses = [
        f"model.distill_losses.{name}={kind}"
        for name, kind in {"hint": "HintLoss", "cosine": "CosineLoss", "crd": "CRDLoss"}.items()
    ]
    taps = {
        "hint": {"student": "norm", "teacher": "norm"},
        "cosine": {"student": "prelogits", "teacher": "prelogits"},
    }
    items = [f"recipe={recipe}", *losses, f"model.taps={json.dumps(taps)}", "trainer.max_epochs=1"]
    other = {"model.student.kwargs": {**TINY, "depth": 2}, "optim.lr": 0.003}
    assert train_main([*items, f"students={json.dumps({'as_it_is': {}, 'other': other})}"]) == 0
    joint = run_folders(recipe)[-1]
    for name in ("as_it_is", "other"):
        own = joint / "students" / name
        assert train_main([str(own / "config.yaml")]) == 0
        alone = run_folders(recipe)[-1]
        for loss in ("kd", "hint", "cosine", "crd"):
            column = f"train/{loss}_loss"
            assert columns(own / "metrics.csv", column) == columns(alone / "metrics.csv", column)
        saved = [
            torch.load(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (joint, alone)
        ]
        theirs = {k.removeprefix("students.student."): v for k, v in saved[1].items()}
        assert_same(
            {
                k.removeprefix(f"students.{name}."): v
                for k, v in saved[0].items()
                if f".{name}." in k
            },
            theirs,
        )

"""A finished run's teachers, where their weights still are or no longer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from kd.errors import UserError
from kd.models import Preprocess, TeacherSpec
from kd.ship import finished as finished_module
from kd.ship.finished import FinishedRun
from kd.ship.latency import _loaders
from kd.tasks import Classification
from kd.teachers import StoredAnswers


def run_with(spec: TeacherSpec) -> FinishedRun:
    """A run of one teacher; nothing of it is built."""
    data: Any = None
    return FinishedRun(
        Path(), {}, nn.Identity(), Preprocess(32, (0.5,) * 3, (0.5,) * 3),
        ["a", "b"], Classification(), lambda: {"": spec}, data,
    )  # fmt: skip


def test_a_teacher_with_weights_of_timm_is_measured_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no checkpoint to look for: it was trained with ``model.teacher.pretrained=true``."""
    monkeypatch.setattr(finished_module, "check_downloadable", lambda *_: None)
    run = run_with(TeacherSpec("resnet18", pretrained=True))
    assert run.has_teacher and not replace(run, classes=[]).has_teacher
    assert capsys.readouterr().err == ""


def test_weights_of_timm_that_can_not_be_had_leave_the_student_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(arch: str, key: str) -> None:
        raise UserError(f"{key}: no internet, and the weights of timm's {arch} are not here")

    monkeypatch.setattr(finished_module, "check_downloadable", unreachable)
    run = run_with(TeacherSpec("resnet18", pretrained=True))
    assert not run.has_teacher and run.feature_teachers() == {}
    why = "model.teacher.checkpoint: no internet, and the weights of timm's resnet18 are not here"
    assert capsys.readouterr().err.splitlines() == [
        f"{why}: only the student is measured", f"{why}: it is left out",
    ]  # fmt: skip


def test_a_checkpoint_that_is_gone_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run_with(TeacherSpec("resnet18", checkpoint="gone.pth")).has_teacher
    assert not run_with(TeacherSpec("resnet18")).has_teacher
    assert capsys.readouterr().err.splitlines() == [
        "the teacher's checkpoint gone.pth not found: only the student is measured",
        "the teacher has no checkpoint: only the student is measured",
    ]


def test_stored_answers_are_compared_with_but_neither_timed_nor_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are of their own pictures: as a runtime the teacher would fail at the first picture."""
    builder: Any = StoredAnswers(str(tmp_path))
    run = run_with(TeacherSpec(builder=builder))
    assert run.has_teacher and run.teacher() is not None  # kd-eval reads it for its own pictures
    assert run.teacher_runtime() is None
    reopen: Any = None
    assert list(_loaders(run, reopen, {"torch": {}}, 1)) == [("student", "torch")]
    assert capsys.readouterr().err == f"{tmp_path} holds the answers to its own pictures alone\n"

"""The next batch's copy and answer beside a step (``data.copy_ahead``, ``model.teacher.overlap``)."""

import json
from pathlib import Path
from typing import Any

import pytest

from kd.cli import train_main
from kd.distill.step import Distillation
from kd.teachers import FrozenTeacher
from tests._runs import assert_same, losses, run, student_of


def order_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by ``t`` for each answer of the teacher, by ``s`` for each step of the student."""
    found: list[str] = []
    answer, learn = FrozenTeacher.answer, Distillation.learn
    monkeypatch.setattr(
        FrozenTeacher, "answer", lambda self, *a: (found.append("t"), answer(self, *a))[1]
    )
    monkeypatch.setattr(
        Distillation, "learn", lambda self, *a: (found.append("s"), learn(self, *a))[1]
    )
    return found


@pytest.mark.parametrize("extra", [
    ["model.teacher.overlap=true"],
    ["model.teacher.overlap=true", "data.copy_ahead=true", "data.engine=device", "data.augment.mixup=0.8",
     "trainer.accumulate_grad_batches=2", "trainer.precision=bf16-true"],
], ids=["overlap", "all"])  # fmt: skip
def test_the_next_answer_is_made_before_a_step_and_nothing_else_changes(
    recipe: Path, extra: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    items = ["trainer.limit_val_batches=0", "trainer.max_epochs=2", "preflight=off"]
    plain = run(
        recipe, *items, *[item for item in extra if "overlap" not in item and "ahead" not in item]
    )
    order = order_of(monkeypatch)
    ahead = run(recipe, *items, *extra)
    assert "".join(order) == 2 * ("tt" + "st" * 4 + "ss")
    assert losses(ahead) == losses(plain)
    assert_same(student_of(ahead), student_of(plain))


def test_a_copy_ahead_of_cached_answers_changes_nothing(recipe: Path, tmp_path: Path) -> None:
    items = ["trainer.limit_val_batches=0", "trainer.max_epochs=2", "preflight=off", "model.teacher.cache=on",
             f"model.teacher.cache_dir={tmp_path / 'answers'}", "model.teacher.cache_views=1"]  # fmt: skip
    plain = run(recipe, *items)
    ahead = run(recipe, *items, "data.copy_ahead=true")
    assert json.loads((ahead / "summary.json").read_text())["cache"]["answers_read"] == 96
    assert losses(ahead) == losses(plain)


@pytest.mark.parametrize(("items", "message"), [
    (["model.teacher.cache=on"], "model.teacher.overlap: needs cache=off, got True"),
    (["model.teacher.placement=cpu"], "model.teacher.overlap: needs placement=same, got cpu"),
    (["model.teacher.compile=reduce-overhead"],
     "model.teacher.overlap: needs compile=default, got reduce-overhead"),
])  # fmt: skip
def test_what_can_not_overlap_is_refused(
    recipe: Path, items: list[str], message: str, capsys: Any
) -> None:
    assert train_main([f"recipe={recipe}", "model.teacher.overlap=true", *items]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (recipe.parent / "runs").exists()

"""``kd-eval cascade=true``: how sure the student is of each picture, both models' times, and the rule for serving."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.models import Prepare
from kd.proof.cascade import CascadePlan, Goal, choose, features_of
from kd.report.evaluated import cascade_parts
from kd.report.tables import write_parts
from kd.run.eval_options import CascadeWish
from kd.ship.cascade_rule import goal_of_rule
from kd.storage.of_weights import CASCADE, write_of_weights
from kd.tasks import Task
from kd.teachers import RunTeacher

REPEATS = 15
"""Runs of each model on one picture; the median counts, without the first."""
FEWEST = 40
"""Labelled pictures that a cascade needs, at least."""


class Pair(Protocol):
    """A student and its teacher (:class:`kd.run.measure.Subject`)."""

    name: str
    run: Path | None
    model: nn.Module
    prepare: Prepare
    classes: list[str]
    data: DistillationDataModule
    task: Task
    teacher: RunTeacher | None


@dataclass
class Sureness:
    """Takes in batches of logits (:class:`kd.module.evaluation.Listener`) and keeps what scores are made of."""

    features: list[np.ndarray] = field(default_factory=list)
    """``(N, 6)`` (:func:`kd.proof.cascade.features_of`), batch by batch."""
    student: list[np.ndarray] = field(default_factory=list)
    """Whether it is right, bool ``(N,)``."""
    teacher: list[np.ndarray] = field(default_factory=list)
    """Likewise."""

    def update(
        self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor
    ) -> None:
        """Adds a batch: logits ``(N, C)`` of both, class ids ``(N,)``; pictures without a label (-1) are left out.

        An answer with a NaN is wrong.
        """
        assert teacher is not None
        known = target >= 0
        target = target[known]
        student = student[known]
        teacher = teacher[known]
        probabilities = student.double().softmax(1)
        self.features.append(features_of(probabilities.cpu().numpy()))
        self.student.append(_is_right(student, target))
        self.teacher.append(_is_right(teacher, target))


def _is_right(logits: Tensor, target: Tensor) -> np.ndarray:
    """Whether each answer of logits ``(N, C)`` is the class id of ``(N,)``, bool ``(N,)``; one with NaN is not."""
    is_number = ~logits.isnan().any(1)
    right = logits.argmax(1) == target
    return (right & is_number).cpu().numpy()


def check_cascade(pairs: Sequence[Pair]) -> None:
    """Refuses what has no cascade.

    Raises:
        UserError: several models, no teacher, or a task without one class a picture.
    """
    if len(pairs) > 1:
        raise UserError("cascade: takes one run, with its teacher")
    if pairs[0].teacher is None:
        raise UserError(f"cascade: {pairs[0].name} has no teacher that can be asked here")
    if not pairs[0].task.one_class:
        raise UserError("cascade: needs one class a picture (model.task=Classification)")


def cascade_of(
    pair: Pair, sureness: Sureness, wish: CascadeWish, place: str, cautions: Sequence[str]
) -> dict[str, Any]:
    """The curve, the threshold and its check, and milliseconds; they go to the run's ``cascade.json`` too.

    A goal that no threshold reaches leaves a file that is there with a rule for the same weights; then the result has
    ``kept_goal``, the text of that rule's goal.

    Args:
        pair: the models; a bare weights file has no folder to write to.
        sureness: of the student on each labelled picture.
        wish: the goal.
        place: the pictures' split.
        cautions: what speaks against the pictures (:func:`kd.run.certify.check_pictures`), lines.

    Returns:
        What :func:`kd.proof.cascade.choose` gives, with ``goal``, ``cautions``, ``student_ms``, ``teacher_ms``, and ``ms``
        in each row of the curve, in ``chosen`` and in ``checked``: milliseconds of a picture, on average. Of a teacher
        that is stored answers ``teacher_ms`` is None, and there is no ``ms``.

    Raises:
        UserError: too few pictures, or a ``latency_ms`` that the student alone takes.
    """
    student = np.concatenate(sureness.student)
    teacher = np.concatenate(sureness.teacher)
    if len(student) < FEWEST:
        raise UserError(f"cascade: needs {FEWEST} labelled pictures or more, got {len(student)}")
    student_ms, teacher_ms = times_of(pair, place)
    goal = wish.goal
    if goal is None:
        assert wish.latency_ms is not None
        if teacher_ms is None:
            raise UserError("latency_ms: stored answers can't be timed; give accuracy= or share=")
        # the student sees each picture, the teacher a share of them: student_ms + share * teacher_ms = latency_ms
        share = (wish.latency_ms - student_ms) / teacher_ms
        if share <= 0:
            raise UserError(
                f"latency_ms: must be above the student's {student_ms:.3g} ms, got {wish.latency_ms:g}"
            )
        goal = Goal(share=min(share, 1.0))
    plan = CascadePlan(goal, wish.confidence, wish.score)
    rule = choose(np.concatenate(sureness.features), student, teacher, plan)
    rule |= {"goal": wish.text, "cautions": [*cautions]}
    rule |= {"student_ms": student_ms, "teacher_ms": teacher_ms}
    rows = [*rule["curve"], *(rule[part] for part in ("chosen", "checked") if part in rule)]
    if teacher_ms is not None:
        for row in rows:
            row["ms"] = student_ms + row["share"] * teacher_ms
    if pair.run is None:
        return rule
    earlier = None
    if rule["threshold"] is None:  # a rule that was found before stays: it is for the same weights
        earlier = goal_of_rule(pair.run)
    if earlier is None:
        write_of_weights(pair.run, CASCADE, rule)
    else:
        rule["kept_goal"] = earlier
    write_parts(pair.run, "cascade", cascade_parts(rule))
    return rule


@torch.inference_mode()
def times_of(pair: Pair, place: str) -> tuple[float, float | None]:
    """Median milliseconds of one picture, of student and teacher; in turns, so that both meet the same machine. None of a
    teacher that is stored answers.

    On the GPU where there is one: the student is left there, the teacher stays where the evaluation has put it. Loading
    the picture is not timed, making the model's input of it is.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first_batch = next(iter(pair.data.eval_dataloader(place)))
    image = first_batch["image"][:1].to(device)
    model = pair.model.to(device).eval()
    teacher = pair.teacher
    assert teacher is not None
    calls: list[Callable[[], object]] = [lambda: model(pair.prepare(image))]
    if not teacher.stored:
        calls.append(lambda: teacher(image))
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, times in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            times.append(1000 * seconds)
    student_ms, *of_teacher = [round(median(times[1:]), 3) for times in taken]  # the first warms up
    return student_ms, of_teacher[0] if of_teacher else None

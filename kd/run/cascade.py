"""``kd-eval cascade=true``: how sure the student is of each picture, both models' times, and the rule for serving."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kd.errors import UserError
from kd.machine import choose_device
from kd.proof.cascade import Goal, Measured, choose_threshold, sureness
from kd.report.evaluated import cascade_parts
from kd.report.tables import write_parts
from kd.run.eval_options import EvalOptions
from kd.run.subject import Subject
from kd.ship.latency import times_here
from kd.storage.elsewhere import Json
from kd.storage.of_weights import CASCADE, write_of_weights

SECONDS = 1.0
"""Seconds for which each model is timed on one picture."""
FEWEST = 40
"""Labelled pictures that a cascade needs, at least."""


@dataclass
class Sureness:
    """Takes in batches of logits (:class:`kd.module.evaluation.Listener`) and keeps scores and outcomes."""

    scores: list[np.ndarray] = field(default_factory=list)
    """How sure the student is, ``(N,)`` (:func:`kd.proof.cascade.sureness`), batch by batch."""
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
        student = student[known]
        teacher = teacher[known]
        target = target[known]
        probabilities = student.double().softmax(1).cpu()
        self.scores.append(sureness(probabilities.numpy()))
        self.student.append(_is_right(student, target))
        self.teacher.append(_is_right(teacher, target))

    @property
    def measured(self) -> Measured:
        """All pictures so far."""
        parts = self.scores, self.student, self.teacher
        return Measured(*(np.concatenate(part) for part in parts))


def _is_right(logits: Tensor, target: Tensor) -> np.ndarray:
    """Whether each answer of logits ``(N, C)`` is the class id of ``(N,)``, bool ``(N,)``; one with NaN is not."""
    is_number = ~logits.isnan().any(1)
    right = logits.argmax(1) == target
    return (right & is_number).cpu().numpy()


def cascade_of(
    subject: Subject, sureness: Sureness, options: EvalOptions, cautions: Sequence[str]
) -> Json:
    """The curve, the threshold and its check, and milliseconds; also written to the run's ``cascade.json`` and its page.

    Where no threshold reaches the goal, ``cascade.json`` is not written: a rule that was found before stays.

    Args:
        subject: the models; a bare weights file has no folder to write to.
        sureness: of the student on each labelled picture.
        options: name the goal and the pictures.
        cautions: what speaks against the pictures (:func:`kd.run.certify.cautions_about`), lines.

    Returns:
        What :func:`kd.proof.cascade.choose_threshold` gives, with ``goal``, ``cautions``, ``student_ms``, ``teacher_ms``,
        and ``ms`` in each row of the curve, in ``chosen`` and in ``checked``: milliseconds of a picture, on average. Of a
        teacher that is stored answers ``teacher_ms`` is None, and there is no ``ms``.

    Raises:
        UserError: too few pictures, or a ``latency_ms`` that the student alone takes.
    """
    pictures = sureness.measured
    count = len(pictures.scores)
    if count < FEWEST:
        raise UserError(f"cascade: needs {FEWEST} labelled pictures or more, got {count}")
    student_ms, teacher_ms = times_of(subject, options.place)
    goal, text = options.cascade_goal
    if goal is None:
        assert options.latency_ms is not None
        if teacher_ms is None:
            raise UserError("latency_ms: stored answers can't be timed; give accuracy= or share=")
        # the student sees each picture, the teacher a share of them: student_ms + share * teacher_ms = latency_ms
        share = (options.latency_ms - student_ms) / teacher_ms
        if share <= 0:
            raise UserError(
                f"latency_ms: must be above the student's {student_ms:.3g} ms, got {options.latency_ms:g}"
            )
        goal = Goal(share=min(share, 1.0))
    rule = choose_threshold(pictures, goal, options.confidence)
    rule |= {"goal": text, "cautions": [*cautions]}
    rule |= {"student_ms": student_ms, "teacher_ms": teacher_ms}
    if teacher_ms is not None:
        for row in [
            *rule["curve"],
            *(rule[part] for part in ("chosen", "checked") if part in rule),
        ]:
            row["ms"] = student_ms + row["share"] * teacher_ms
    if subject.run is None:
        return rule
    if rule["threshold"] is not None:
        write_of_weights(subject.run, CASCADE, rule)
    write_parts(subject.run, "cascade", cascade_parts(rule))
    return rule


@torch.inference_mode()
def times_of(subject: Subject, place: str) -> tuple[float, float | None]:
    """Median milliseconds of one picture, of student and teacher; in turns, so that both meet the same machine. For a
    teacher that is stored answers the second is None.

    On the GPU where there is one: the student is moved there and stays; the evaluation has put the teacher there before.
    Loading the picture is not timed, making the model's input of it is.
    """
    device = choose_device()
    first_batch = next(iter(subject.data.eval_dataloader(place)))
    image = first_batch["image"][:1].to(device)
    model = subject.model.to(device).eval()
    teacher = subject.teacher
    assert teacher is not None
    calls: dict[str, Callable[[], object]] = {"student": lambda: model(subject.prepare(image))}
    if not teacher.stored:
        calls["teacher"] = lambda: teacher(image)

    def complete(call: Callable[[], object]) -> None:
        """A call with all that it has given a GPU to do."""
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()

    timed = {name: partial(complete, call) for name, call in calls.items()}
    ms = times_here(timed, SECONDS, "timing one picture")
    return ms["student"], ms.get("teacher")

"""What losses must know of the teachers' features before the first step: a sample's statistics."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kd.clock import part_of_the_start
from kd.data.batch import Batch
from kd.distill.feature_taps import Read
from kd.distill.inherit.ridge import fit_projection
from kd.distill.student import Student
from kd.distill.students import Students
from kd.losses import FeatureRegression
from kd.losses.ranks import without_gather
from kd.losses.targets import Standardizer
from kd.models.preprocess import evaluating
from kd.teachers import RunTeacher
from kd.teachers.answer import Answer


@part_of_the_start("fit of the losses' projections")
@torch.no_grad()
def settle_losses(
    students: Students,
    teacher: RunTeacher,
    sample: Callable[[int], Tensor],
    broadcast: Callable[[Any], Any],
) -> None:
    """Standardises the teachers' features by a sample, and fits linear projections of inherited features to it."""
    for student in students.named().values():
        active = student.objective.active
        parts = [part for loss in active.values() for part in loss.modules()]
        found = [part for part in parts if isinstance(part, Standardizer)]
        fitted = student.start == "inherited"
        if not found and not (
            fitted and any(isinstance(part, FeatureRegression) for part in parts)
        ):
            continue
        of_student, of_teacher = _answers(student, teacher, sample(student.sample_size))
        with without_gather():
            for loss, ours, wanted in student.objective.feature_taps.regressions(
                active, of_student, of_teacher
            ):
                pair = loss.settle(ours, wanted)
                if fitted:
                    fit_projection(loss.projection, *pair)
        for standardizer in (
            found
        ):  # the first process's for all: another machine's eigenvectors may differ in sign
            standardizer.load_state_dict(broadcast(standardizer.state_dict()))


def _answers(student: Student, teacher: RunTeacher, pictures: Tensor) -> tuple[Read, Answer]:
    """How to read the student's layers, and the teacher's answer, for all pictures."""
    caught, answers = [], []
    for part in pictures.split(64):
        with evaluating(student), student.taps as seen:
            student.model(student.prepare(part))
        caught.append(seen)
        answers.append(teacher.answer(Batch(image=part), student.objective.wanted).features)

    def own(layers: list[str], form: str) -> list[Tensor]:
        return [
            torch.cat(x)
            for x in zip(*(student.taps.read(c, layers, form) for c in caught), strict=True)
        ]

    return own, Answer(
        features={layer: torch.cat([a[layer] for a in answers]) for layer in answers[0]}
    )

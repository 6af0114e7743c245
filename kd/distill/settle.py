"""What losses must know of the teachers' features before the first step: a sample's statistics."""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
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
from kd.progress import bar
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
    """Standardises the teachers' features by a sample, and fits linear projections of inherited features to it.

    Args:
        students: of the run; those whose losses need neither are left alone.
        teacher: of the run.
        sample: gives so many training pictures, uint8 ``(N, 3, H, W)``.
        broadcast: gives every process the first one's object.
    """
    for student in students.named().values():
        losses = student.objective.active
        modules = [module for loss in losses.values() for module in loss.modules()]
        standardizers = [module for module in modules if isinstance(module, Standardizer)]
        has_regression = any(isinstance(module, FeatureRegression) for module in modules)
        fits_projections = student.start == "inherited"
        if not standardizers and not (fits_projections and has_regression):
            continue
        read, answer = _answers(student, teacher, sample(student.sample_size))
        with without_gather():
            for (
                loss,
                student_features,
                teacher_features,
            ) in student.objective.feature_taps.regressions(losses, read, answer):
                inputs, outputs = loss.settle(student_features, teacher_features)
                if fits_projections:
                    fit_projection(loss.projection, inputs, outputs)
        # The first process's for all: another machine's eigenvectors may differ in sign.
        for standardizer in standardizers:
            standardizer.load_state_dict(broadcast(standardizer.state_dict()))


def _answers(student: Student, teacher: RunTeacher, pictures: Tensor) -> tuple[Read, Answer]:
    """How to read the student's layers, and the teacher's answer, for all pictures, uint8 ``(N, 3, H, W)``."""
    tapped_batches = []  # what the student's taps caught of each batch
    teacher_batches = []  # the teacher's features of each batch, by layer
    hidden = getattr(rank_zero_only, "rank", 0) != 0
    parts = pictures.split(64)
    for part in bar(parts, label="what the losses read", unit=" parts", disable=hidden):
        with evaluating(student), student.taps as tapped:
            student.model(student.prepare(part))
        tapped_batches.append(tapped)
        answer = teacher.answer(Batch(image=part), student.objective.wanted)
        teacher_batches.append(answer.features)

    def read(layers: list[str], form: str) -> list[Tensor]:
        batches = [student.taps.read(tapped, layers, form) for tapped in tapped_batches]
        return [torch.cat(of_one_layer) for of_one_layer in zip(*batches, strict=True)]

    features = {}
    for layer in teacher_batches[0]:
        features[layer] = torch.cat([batch[layer] for batch in teacher_batches])
    return read, Answer(features=features)

"""What losses must know of the teachers' features before the first step: a sample's statistics."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kd.clock import part_of_the_start
from kd.data.batch import Batch
from kd.distill.inherit.ridge import fit_projection
from kd.distill.student import Student
from kd.losses import FeatureRegression
from kd.losses.ranks import without_gather
from kd.losses.targets import Standardizer
from kd.models.preprocess import evaluating
from kd.progress import bar_at_start
from kd.teachers import RunTeacher
from kd.teachers.answer import Answer, Layer


@part_of_the_start("fit of the losses' projections")
@torch.no_grad()
def settle_losses(
    student: Student,
    teacher: RunTeacher,
    sample: Callable[[int], Tensor],
    broadcast: Callable[[Any], Any],
) -> None:
    """Standardises the teachers' features by a sample, and fits linear projections of inherited features to it.

    Called before the first step of a run that does not resume, when the student has its first weights and the teacher is
    on its device: in the first process alone, whose tensors the caller sends to all; or in every process, where the
    teacher's weights are shared out (:func:`kd.module.start.settle_once`). The teacher runs on all pictures, an inherited
    student too; of another one only the size of its maps is read, which the first 64 show.

    Args:
        student: of the run; where its losses need neither it is left alone.
        teacher: of the run.
        sample: gives so many training pictures, uint8 ``(N, 3, H, W)``.
        broadcast: gives every process the first one's object, called for each standardizer; in the first process alone it
            returns its argument.
    """
    objective = student.objective
    losses = nn.ModuleList(objective.active.values())
    standardizers = [part for part in losses.modules() if isinstance(part, Standardizer)]
    regresses = any(isinstance(loss, FeatureRegression) for loss in losses)
    fits_projections = regresses and student.start == "inherited"
    if not standardizers and not fits_projections:
        return
    pictures = sample(student.sample_size)
    tapped_batches: list[dict[str, Tensor]] = []
    features: dict[Layer, list[Tensor]] = defaultdict(list)
    with bar_at_start(label="what the losses read", total=len(pictures)) as shown:
        for part in pictures.split(64):
            if fits_projections or not tapped_batches:
                with evaluating(student), student.taps as tapped:
                    student.model(student.prepare(part))
                tapped_batches.append(tapped)
            answer = teacher.answer(Batch(image=part), objective.wanted)
            for layer, of_layer in answer.features.items():
                features[layer].append(of_layer)
            shown.update(len(part))

    def read(layers: list[str], form: str) -> list[Tensor]:
        """As :data:`kd.distill.objective.Read`, of the whole sample."""
        batches = [student.taps.read(tapped, layers, form) for tapped in tapped_batches]
        by_layer = zip(*batches, strict=True)
        return [torch.cat(of_layer) for of_layer in by_layer]

    whole = Answer(features={layer: torch.cat(parts) for layer, parts in features.items()})
    with without_gather():
        for loss, student_features, teacher_features in objective.regressions(read, whole):
            inputs, targets = loss.settle(student_features, teacher_features)
            if fits_projections:
                fit_projection(loss.projection, inputs, targets)
    # The first process's for all: another machine's eigenvectors may differ in sign.
    for standardizer in standardizers:
        standardizer.load_state_dict(broadcast(standardizer.state_dict()))

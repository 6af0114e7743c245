"""What losses must know of the teachers' features before the first step: a sample's statistics."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kd.clock import part_of_the_start
from kd.data.batch import Batch
from kd.distill.inherit.ridge import fit_projection
from kd.distill.student import Student
from kd.losses import FeatureRegression
from kd.losses.ranks import without_gather
from kd.models.preprocess import evaluating
from kd.progress import bar_at_start
from kd.teachers import RunTeacher
from kd.teachers.answer import Answer, Layer


@part_of_the_start("fit of the losses' projections")
@torch.no_grad()
def settle_losses(student: Student, teacher: RunTeacher, sample: Callable[[int], Tensor]) -> None:
    """Sets the statistics by which losses standardise the teachers' features, from a sample; of a student that begins with
    trained weights, its teacher's or its own, it also fits the losses' linear projections to the sample. Random ones would
    drive it from these weights (``scripts/bench/log/groceries.md``).

    Called before the first step of a run that does not resume, when the student has its first weights and the teacher is
    on its device: in the first process alone, whose tensors the caller sends to all; or in every process, where the
    teacher's weights are shared out (:func:`kd.module.start.settle_once`). The teacher runs on all pictures, a student with
    trained weights too; one with random weights on the first 64 alone, for the size of its maps.

    Args:
        student: of the run; its losses are changed in place. Where none needs either of these, no picture is read.
        teacher: of the run.
        sample: gives so many training pictures, uint8 ``(N, 3, H, W)``.
    """
    objective = student.objective
    fits_projections = student.start in ("inherited", "pre-trained")
    regressions: dict[str, FeatureRegression] = {}
    for name, loss in objective.active.items():
        if isinstance(loss, FeatureRegression) and (fits_projections or loss.standardize != "none"):
            regressions[name] = loss
    if not regressions:
        return
    pictures = sample(student.sample_size)
    student_parts: dict[str, list[Tensor]] = defaultdict(list)
    teacher_parts: dict[Layer, list[Tensor]] = defaultdict(list)
    with bar_at_start(label="what the losses read", total=len(pictures)) as shown:
        for part in pictures.split(64):
            if fits_projections or not student_parts:
                with evaluating(student), student.taps as caught:
                    student.model(student.inputs(part))
                for path, output in caught.items():
                    student_parts[path].append(output)
            answer = teacher.answer(Batch(image=part), objective.wanted)
            for layer, features in answer.features.items():
                teacher_parts[layer].append(features)
            shown.update(len(part))

    # each layer's parts go as they are joined
    outputs = {path: torch.cat(student_parts.pop(path)) for path in list(student_parts)}
    joined = {layer: torch.cat(teacher_parts.pop(layer)) for layer in list(teacher_parts)}
    whole = Answer(features=joined)
    with without_gather():
        for name, loss in regressions.items():
            of_student, of_teacher = objective.features(name, outputs, whole)
            layers: Any = zip(loss.pairs, of_student, of_teacher, strict=True)
            for of_layer, student_features, teacher_features in layers:
                inputs, targets = of_layer.settle(student_features, teacher_features)
                if fits_projections:
                    fit_projection(of_layer.projection, inputs, targets)

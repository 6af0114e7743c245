"""What losses must know of the teachers' features before the first step: a sample's statistics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor

from kd.clock import part_of_the_start
from kd.data.batch import Batch
from kd.distill.inherit.ridge import fit_projection
from kd.distill.inherit.sample_taps import SampleTaps
from kd.distill.objective import Read
from kd.distill.student import Student
from kd.losses.ranks import without_gather
from kd.models.preprocess import evaluating
from kd.progress import CALM_AT_START, bar
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

    What the student's own start has read already is not read again. Called before the first step of a run that does not
    resume, when the student has its first weights and the teacher is on its device: in the first process alone, whose
    tensors the caller sends to all; or in every process, where the teacher's weights are shared out
    (:func:`kd.module.start.settle_once`).

    Args:
        student: of the run; where its losses need neither it is left alone. Its ``sample_taps`` is freed.
        teacher: of the run.
        sample: gives so many training pictures, uint8 ``(N, 3, H, W)``.
        broadcast: gives every process the first one's object, called for each standardizer; in the first process alone it
            returns its argument.
    """
    taps = student.sample_taps
    student.sample_taps = None
    if not student.is_settled_by_sample:
        return
    outputs = _read_by_the_start(student, taps)
    if outputs is None:
        outputs = _read_anew(student, teacher, sample(student.sample_size))
    read, answer = _joined(student, outputs)
    with without_gather():
        for loss, student_features, teacher_features in student.objective.regressions(read, answer):
            inputs, targets = loss.settle(student_features, teacher_features)
            if student.start == "inherited":
                fit_projection(loss.projection, inputs, targets)
    # The first process's for all: another machine's eigenvectors may differ in sign.
    for standardizer in student.standardizers:
        standardizer.load_state_dict(broadcast(standardizer.state_dict()))


class SampleOutputs(NamedTuple):
    """What losses read of a sample, batch by batch."""

    student: list[dict[str, Tensor]]
    """What the student's taps caught, by path; of the first batch alone where the student is not inherited."""
    teacher: list[dict[Layer, Tensor]]
    """The teachers' features, by layer, of every batch."""


def _read_by_the_start(student: Student, taps: SampleTaps | None) -> SampleOutputs | None:
    """What the fit of the student's start has read; None where the losses read a layer that it did not run.

    Args:
        student: whose losses read layers.
        taps: what its start has caught; None: it was not fitted, or its losses read another teacher, too.
    """
    if taps is None:
        return None
    paths: set[str] = set()
    for layers in student.objective.layers.values():
        paths.update(layers.student)
    student_batches = taps.caught(student.model)
    teacher_batches = taps.caught(taps.teacher)
    wanted = list(student.objective.wanted.features)
    teacher_paths = {path for _, path, _ in wanted}
    if not student_batches or not teacher_batches:
        return None
    if not all(paths <= set(caught) for caught in student_batches):
        return None
    if not all(teacher_paths <= set(caught) for caught in teacher_batches):
        return None

    teacher_taps = taps.on(taps.teacher)
    features = []
    for caught in teacher_batches:
        of_batch = {}
        for layer in wanted:
            _, path, tokens = layer
            (feature,) = teacher_taps.read(caught, path, tokens)
            of_batch[layer] = feature.float()
        features.append(of_batch)
    return SampleOutputs(student_batches, features)


def _read_anew(student: Student, teacher: RunTeacher, pictures: Tensor) -> SampleOutputs:
    """Runs the teacher on all pictures, and the student on all or on the first part.

    Projections are fitted to an inherited student alone, which needs all. Of another one only the size of its maps is
    read, which the first part shows.

    Args:
        student: run in eval mode.
        teacher: answers to each part what the student's losses read.
        pictures: the sample, uint8 ``(N, 3, H, W)``; 64 run at once.
    """
    tapped_batches: list[dict[str, Tensor]] = []
    teacher_batches = []
    hidden = getattr(rank_zero_only, "rank", 0) != 0
    label = "what the losses read"
    shown = bar(label=label, total=len(pictures), calm=CALM_AT_START, disable=hidden)
    with shown:
        for part in pictures.split(64):
            if student.start == "inherited" or not tapped_batches:
                with evaluating(student), student.taps as tapped:
                    student.model(student.prepare(part))
                tapped_batches.append(tapped)
            answer = teacher.answer(Batch(image=part), student.objective.wanted)
            teacher_batches.append(dict(answer.features))
            shown.update(len(part))
    return SampleOutputs(tapped_batches, teacher_batches)


def _joined(student: Student, outputs: SampleOutputs) -> tuple[Read, Answer]:
    """The batches of a sample as if they were one: how to read the student's layers, for all pictures that it has run on,
    and the teacher's answer for all.
    """

    def read(layers: list[str], form: str) -> list[Tensor]:
        """As :data:`kd.distill.objective.Read`, of the whole sample."""
        batches = [student.taps.read(caught, layers, form) for caught in outputs.student]
        by_layer = zip(*batches, strict=True)
        return [torch.cat(of_layer) for of_layer in by_layer]

    features = {}
    for layer in outputs.teacher[0]:
        of_layer = [batch[layer] for batch in outputs.teacher]
        features[layer] = torch.cat(of_layer)
    return read, Answer(features=features)

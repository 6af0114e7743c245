"""A student's first weights, before training: its teacher's layers, or a fitted classifier."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kd.clock import part_of_the_start
from kd.distill.classifier import Sample, fit_classifier
from kd.distill.inherit import inherit_together
from kd.distill.on_device import CPU, fitting_on
from kd.distill.student import Student
from kd.errors import UserError
from kd.report.records import FIT_OF_THE_START
from kd.teachers import RunTeacher


def give_first_weights(
    students: Sequence[Student],
    teacher: RunTeacher | None,
    pictures: Callable[[int], Tensor] | None,
    sample: Sample | None = None,
    device: torch.device = CPU,
) -> list[str]:
    """Gives students their first weights, while the teacher is whole and not yet placed.

    A student starts from its teacher's layers where its settings say so; else a new classifier on pre-trained weights is
    fitted (:func:`kd.distill.classifier.fit_classifier`). A run has one student; ``kd-size`` starts its candidates
    together, for which the teacher runs once.
    Called in the first process alone, before training; the caller sends the weights to the others.

    Args:
        students: changed in place, their moving averages too; those that inherit share one parent and one
            ``sample_size``.
        teacher: the run's.
        pictures: gives so many training pictures (or all, if there are fewer), uint8 ``(N, 3, H, W)``; None where there
            are none.
        sample: gives training pictures with their labels, for the fit of a new classifier; None: it is not fitted.
        device: where the run trains, and the fits run (that of a classifier to the teacher's answers runs where the models
            are); each model is put back where it was.

    Returns:
        Each student's message for the user; "" where there is nothing to report.

    Raises:
        UserError: no pictures to fit by, or a teacher that can't be inherited from.
    """
    inheriting = [student for student in students if student.start == "inherited"]
    if inheriting:
        _inherit(inheriting, teacher, pictures, device)
    messages = []
    for student in students:
        message = student.begin(pictures)
        if not message:
            message = fit_classifier(student, teacher, sample, device)
            student.classifier_is_fitted = bool(message)
        if student.average is not None:
            student.average.set(student.model)
        messages.append(message)
    return messages


def _inherit(
    students: Sequence[Student],
    teacher: RunTeacher | None,
    pictures: Callable[[int], Tensor] | None,
    device: torch.device,
) -> None:
    """Overwrites students' weights with their parent's layers; arguments as of :func:`give_first_weights`.

    Raises:
        UserError: no pictures to fit by, or a teacher that can't be inherited from.
    """
    if pictures is None:
        raise UserError("model.student.inherit: needs training pictures: a DistillationDataModule")
    assert teacher is not None
    parent = teacher.members[students[0].parent]
    big = parent.original()
    sample = pictures(students[0].sample_size)
    pairs: Any = [(student.model, student.prepare) for student in students]
    try:
        with (
            part_of_the_start(FIT_OF_THE_START),
            fitting_on(device, big, *(small for small, _ in pairs)) as place,
        ):
            inherit_together(pairs, big, sample.to(place), parent.prepare)
    except ValueError as error:
        raise UserError(f"model.student.inherit: {error}") from error

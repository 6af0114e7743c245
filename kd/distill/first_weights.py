"""A student's first weights, before training: its teacher's layers, or a fitted classifier."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kd.clock import part_of_the_start
from kd.distill.classifier import Sample, fit_new_classifier, fit_to_answers
from kd.distill.inherit import inherit_together
from kd.distill.inherit.sample_taps import SampleTaps
from kd.distill.on_device import CPU, fit_on
from kd.distill.student import Student
from kd.errors import UserError
from kd.models import Prepare
from kd.models.taps import Taps
from kd.report.records import FIT_OF_THE_START
from kd.teachers import FrozenTeacher, RunTeacher


def give_first_weights(
    students: Sequence[Student],
    teacher: RunTeacher | None,
    pictures: Callable[[int], Tensor] | None,
    labelled: Sample | None = None,
    device: torch.device = CPU,
) -> list[str]:
    """Gives students their first weights, while the teacher is whole and not yet placed.

    A student starts from its teacher's layers where its settings say so; else a new classifier on pre-trained weights is
    fitted: to labels where they train it, or to the teacher's answers where these alone do. A run has one student;
    ``kd-size`` starts its candidates together, for which the teacher runs once.
    Called in the first process alone, before training; the caller sends the weights to the others.

    Args:
        students: changed in place; those that inherit have one parent, and as many pictures.
        teacher: the run's.
        pictures: gives so many training pictures (or all, if there are fewer), uint8 ``(N, 3, H, W)``; None where there
            are none.
        labelled: likewise with labels, for a new classifier that is fitted to them; None: it is not.
        device: where the run trains, and the fits run (that to the teacher's answers runs where the models are); each
            model is put back where it was.

    Returns:
        Each student's message for the user, or "" where nothing is unusual.

    Raises:
        UserError: no pictures to fit by, or a teacher that can't be inherited from.
    """
    inheriting = [student for student in students if student.start == "inherited"]
    if inheriting:
        _inherit(inheriting, teacher, pictures, device)
    messages = [student.begin(pictures) for student in students]
    for i, student in enumerate(students):
        if messages[i]:
            continue
        messages[i] = fit_new_classifier(student, labelled, device)
        messages[i] = messages[i] or fit_to_answers(student, teacher, pictures)
        student.classifier_is_fitted = bool(messages[i])
    return messages


def _inherit(
    students: Sequence[Student],
    teacher: RunTeacher | None,
    pictures: Callable[[int], Tensor] | None,
    device: torch.device,
) -> None:
    """Overwrites students' weights with their parent's layers; arguments as of :func:`give_first_weights`."""
    if pictures is None:
        raise UserError("model.student.inherit: needs training pictures: a DistillationDataModule")
    assert teacher is not None
    first = students[0]
    parent = teacher.members[first.parent]
    parent_model = parent.original()
    taps = _taps_of_losses(students, parent, parent_model)
    fit = partial(_fit, students, parent_model, parent.prepare, pictures(first.sample_size), taps)
    models = [parent_model, *(student.model for student in students)]
    try:
        with part_of_the_start(FIT_OF_THE_START):
            fit_on(device, models, fit)
    except ValueError as error:
        raise UserError(f"model.student.inherit: {error}") from error


def _fit(
    students: Sequence[Student],
    parent_model: nn.Module,
    parent_input: Prepare,
    sample: Tensor,
    taps: SampleTaps,
    device: torch.device,
) -> None:
    """:func:`kd.distill.inherit.inherit_together` of models that are on ``device``; the sample is brought there.

    Args:
        students: changed in place.
        parent_model: the teacher's model.
        parent_input: prepares pictures for it.
        sample: uint8 pictures ``(N, 3, H, W)``.
        taps: records what losses need of both models on the way.
        device: of the models.
    """
    models = [(student.model, student.prepare) for student in students]
    inherit_together(
        models,  # type: ignore[arg-type]
        parent_model,
        sample.to(device),
        parent_input,  # type: ignore[arg-type]
        taps,
    )


def _taps_of_losses(
    students: Sequence[Student], parent: FrozenTeacher, parent_model: nn.Module
) -> SampleTaps:
    """Taps on what the students' losses read of themselves and of the teacher whose layers they take.

    Students whose losses read other teachers, too, or need no sample (:attr:`Student.is_settled_by_sample`), get none.

    Args:
        students: of one parent; each that gets taps has them as its ``sample_taps`` afterwards.
        parent: the teacher.
        parent_model: its model as the fit runs it, which may be another than the one that answers.

    Returns:
        The taps of all of them together; without any it reads no model.
    """
    taps: dict[nn.Module, Taps] = {}
    teacher_paths: list[str] = []
    reading_students = []
    for student in students:
        layers = list(student.objective.wanted.features)
        of_parent = all(member == student.parent for member, _, _ in layers)
        if of_parent and student.is_settled_by_sample:
            reading_students.append(student)
            taps[student.model] = student.taps
            teacher_paths += [path for _, path, _ in layers]
    if reading_students:
        is_the_same = parent_model is parent.model
        taps[parent_model] = (
            parent.taps if is_the_same else Taps(parent_model, [teacher_paths], parent.prepare)
        )
    sample_taps = SampleTaps(taps, parent_model)
    for student in reading_students:
        student.sample_taps = sample_taps
    return sample_taps

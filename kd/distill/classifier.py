"""A new classifier on weights that were trained elsewhere starts as a linear probe of their features.

A random one would first distort those weights (Kumar et al., Fine-Tuning can Distort Pretrained Features, arXiv
2202.10054), and at the small learning rate that they need it learns slowly. It is fitted to the labels where they train
it, else to the teacher's answers where losses over logits do.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from kd.data.batch import Batch
from kd.data.datamodule import SampledPictures
from kd.distill.inherit.ridge import fit_first_classifier
from kd.distill.on_device import CPU, fitting_on
from kd.distill.student import Student
from kd.models.loading import has_new_classifier
from kd.models.output_scale import set_in_units
from kd.models.preprocess import evaluating
from kd.models.taps import PRELOGITS, linear_classifier
from kd.progress import bar_at_start
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Wanted

Sample = Callable[[int, bool], SampledPictures]
"""Gives so many training pictures at most; only those with a class id, labels or numbers if the second argument is true."""

PER_CLASS = 64
"""Pictures that a fit uses, on average of a class."""
LEAST = 1024
"""Pictures that a fit to several labels, or numbers, a picture uses at least; all, if there are fewer."""
MOST = 4096
"""Pictures that a fit uses at most, of all classes."""
BATCH = 64
"""Pictures that run through the model at once."""


@torch.no_grad()
def fit_classifier(
    student: Student,
    teacher: RunTeacher | None,
    pictures: Callable[[int], Tensor] | None,
    labelled: Sample | None,
    device: torch.device = CPU,
) -> str:
    """Sets a new linear classifier to a ridge regression on its features of training pictures.

    Left as they are: a classifier that came with the weights, one that is inherited, SimKD's, one of maps, and any where
    fewer than two pictures have a label, or whose teacher is stored answers. Called in the first process, before training.

    Args:
        student: with pre-trained weights.
        teacher: the run's; None: there is none.
        pictures: gives so many training pictures, uint8 ``(N, 3, H, W)``; None: there are none.
        labelled: gives labelled training pictures; None: there are none.
        device: where the run trains; the fit to labels computes the features there if it is a GPU, else on the CPU, and
            puts the student back where it was. The fit to answers runs where the models are.

    Returns:
        A message for the user; "" where the classifier was left as it is.
    """
    classifier = linear_classifier(student.model)
    if classifier is None or student.start == "inherited" or not has_new_classifier(student.model):
        return ""
    objective = student.objective
    count = min(PER_CLASS * len(student.classes), MOST)
    if objective.task_loss_weight:
        if labelled is None:
            return ""
        if not objective.task.one_class:  # a label, or a number, is not one picture's alone
            count = max(count, LEAST)
        chosen = labelled(count, True)
        if len(chosen) < 2:
            return ""
        with fitting_on(device, student.model) as place:
            features, targets = _of_labelled(student, chosen, place)
        if features.ndim != 2:  # of maps each place has a label
            return ""
        first = objective.task.first_classifier(features, targets)
        if first is None:
            return ""
        set_in_units(classifier, first.weight, first.bias)
        fitted_to = (
            f"on the features of {len(targets)} training pictures (leave-one-out {first.score})"
        )
    else:
        is_taught = objective.trains_logits and student.data.scales is None
        if teacher is None or teacher.stored or pictures is None or not is_taught:
            return ""
        if student.start != "pre-trained":
            return ""
        features, answers = _of_answers(student, teacher, pictures(count))
        if features.ndim != 2 or answers.ndim != 2:
            return ""
        fit_first_classifier(classifier, [features], answers, torch.zeros_like(classifier.weight))
        fitted_to = f"of the teacher's answers on the features of {len(answers)} training pictures"
    if student.average is not None:
        student.average.set(student.model)
    return f"student: the new classifier starts as a ridge regression {fitted_to}"


def _of_labelled(
    student: Student, sample: SampledPictures, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The classifier's input for labelled pictures, ``(N, D)``, and their targets, ``(N,)`` or ``(N, C)``, on the CPU.

    Args:
        student: on ``device``, to which pictures are brought batch by batch.
        sample: the pictures with their labels.
        device: of the student.
    """
    labels: list[Any] = []

    def batches() -> Iterator[Tensor]:
        """The pictures; their labels are kept."""
        pairs = iter(sample)
        while part := list(islice(pairs, BATCH)):
            pictures, targets = zip(*part, strict=True)
            labels.extend(targets)
            yield torch.stack(pictures).to(device)

    features = _features(student, batches(), len(sample))
    with CPU:  # the fit's own context would make them on the GPU
        return features, sample.stack(labels)


def _of_answers(student: Student, teacher: RunTeacher, sample: Tensor) -> tuple[Tensor, Tensor]:
    """The classifier's input for pictures, ``(N, D)``, and the teacher's logits ``(N, C)``, on the CPU.

    Args:
        student: with a linear classifier.
        teacher: of the run.
        sample: uint8 ``(N, 3, H, W)``, where the models are.
    """
    logits: list[Any] = []

    def batches() -> Iterator[Tensor]:
        """The pictures; the teacher's logits of them are kept."""
        for part in sample.split(BATCH):
            answer = teacher.answer(Batch(image=part), Wanted())
            logits.append(answer.logits[ALL])
            yield part

    features = _features(student, batches(), len(sample))
    return features, torch.cat(logits).cpu()


def _features(student: Student, batches: Iterator[Tensor], total: int) -> Tensor:
    """The input of the student's classifier for ``total`` pictures in batches, as its tap catches it: float32, on the
    CPU.
    """
    student.taps.add(PRELOGITS)
    features = []
    with bar_at_start(label="a first classifier", total=total) as shown:
        for images in batches:
            with evaluating(student.model), student.taps as caught:
                student.model(student.prepare(images))
            features.append(caught[PRELOGITS].float().cpu())
            shown.update(len(images))
    with CPU:
        return torch.cat(features)

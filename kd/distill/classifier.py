"""A new classifier on weights that were trained elsewhere starts as a linear probe of their features.

A random one would first distort those weights (Kumar et al., Fine-Tuning can Distort Pretrained Features, arXiv
2202.10054), and at the small learning rate that they need it learns slowly.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from kd.data.batch import Batch
from kd.data.datamodule import SampledPictures
from kd.data.info import Target
from kd.distill.inherit.ridge import fit_linear
from kd.distill.on_device import CPU, fit_on
from kd.distill.student import Student
from kd.models.loading import has_new_classifier
from kd.models.output_scale import set_in_units
from kd.models.preprocess import evaluating
from kd.models.taps import linear_classifier
from kd.progress import CALM_AT_START, bar
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
def fit_new_classifier(student: Student, sample: Sample | None, device: torch.device = CPU) -> str:
    """Sets a new linear classifier to a ridge regression of the labels on labelled pictures' features.

    Left as they are: a classifier that came with the weights, one that is inherited, one that labels do not train (SimKD's
    is the teacher's), one of maps, and any where fewer than two pictures have a label. Called in the first process, before
    training.

    Args:
        student: with pre-trained weights.
        sample: gives training pictures; None: there are none.
        device: where the run trains; the student computes the features there if it is a GPU, else on the CPU, and is where
            it was afterwards.

    Returns:
        A message for the user; "" where the classifier was left as it is.
    """
    classifier = linear_classifier(student.model)
    if sample is None or classifier is None:
        return ""
    if student.start == "inherited" or not student.objective.task_loss_weight:
        return ""
    if not has_new_classifier(student.model):
        return ""
    task = student.objective.task
    count = min(PER_CLASS * len(student.classes), MOST)
    if not task.one_class:  # a label, or a number, is not one picture's alone
        count = max(count, LEAST)
    features, labels = fit_on(
        device, [student.model], partial(_features, student, classifier, sample, count)
    )
    if features.ndim != 2 or len(labels) < 2:
        return ""
    first = task.first_classifier(features, labels)
    if first is None:
        return ""
    if classifier.bias is None:
        classifier.weight.copy_(first.weight)
    else:
        set_in_units(classifier, first.weight, first.bias)
    if student.average is not None:
        student.average.set(student.model)
    return (
        f"student: the new classifier starts as a ridge regression on the features of {len(labels)} training pictures "
        f"(leave-one-out {first.score})"
    )


@torch.no_grad()
def fit_to_answers(
    student: Student, teacher: RunTeacher | None, pictures: Callable[[int], Tensor] | None
) -> str:
    """Sets a new linear classifier to a ridge regression of the teacher's logits on the student's features.

    For a student with pre-trained weights whose classifier losses over logits train, and labels do not
    (:func:`fit_new_classifier` reads those), and which answers with classes, not with numbers or maps. Any other
    classifier is left as it is. Called in the first process, before training; both models run where they are.

    Args:
        student: with pre-trained weights.
        teacher: the run's; None, or stored answers: nothing is fitted.
        pictures: gives so many training pictures, uint8 ``(N, 3, H, W)``; None: there are none.

    Returns:
        A message for the user; "" where the classifier was left as it is.
    """
    classifier = linear_classifier(student.model)
    if teacher is None or teacher.stored or pictures is None:
        return ""
    if student.start != "pre-trained" or student.objective.task_loss_weight:
        return ""
    is_taught = student.objective.trains_logits and student.data.scales is None
    if classifier is None or not (is_taught and has_new_classifier(student.model)):
        return ""
    sample = pictures(min(PER_CLASS * len(student.classes), MOST))
    features: list[Tensor] = []
    logits: list[Tensor] = []

    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        features.append(inputs[0].float())

    hidden = getattr(rank_zero_only, "rank", 0) != 0
    hook = classifier.register_forward_pre_hook(record)
    with hook, evaluating(student.model):
        for part in bar(
            sample.split(BATCH), label="a first classifier", calm=CALM_AT_START, disable=hidden
        ):
            student.model(student.prepare(part))
            answer = teacher.answer(Batch(image=part), Wanted()).logits[ALL]
            assert isinstance(answer, Tensor)
            logits.append(answer)
    if features[0].ndim != 2 or logits[0].ndim != 2:  # of maps each place has an answer
        return ""
    start = torch.zeros_like(classifier.weight)
    fit_linear(classifier, [(torch.cat(features), torch.cat(logits))], start)
    if student.average is not None:
        student.average.set(student.model)
    return (
        "student: the new classifier starts as a ridge regression of the teacher's answers "
        f"on the features of {len(sample)} training pictures"
    )


def _features(
    student: Student, classifier: nn.Linear, sample: Sample, count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The classifier's input for up to ``count`` labelled pictures, ``(N, D)``, and their targets, ``(N,)`` or ``(N, C)``.

    Both are on the CPU, and empty (of shape ``(0,)``) without any such picture.

    Args:
        student: runs on ``device``.
        classifier: its last layer, whose input is recorded.
        sample: gives the pictures, with labels alone.
        count: of pictures, at most.
        device: of the student; pictures are brought there batch by batch.
    """
    features: list[Tensor] = []
    labels: list[Target] = []

    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        features.append(inputs[0].float().cpu())

    chosen = sample(count, True)
    labelled_pictures = iter(chosen)
    hook = classifier.register_forward_pre_hook(record)
    hidden = getattr(rank_zero_only, "rank", 0) != 0
    label = "a first classifier"
    shown = bar(label=label, total=len(chosen), calm=CALM_AT_START, disable=hidden)
    with hook, evaluating(student.model), shown:
        while batch := list(islice(labelled_pictures, BATCH)):
            pictures, targets = zip(*batch, strict=True)
            images = student.prepare(torch.stack(pictures).to(device))
            student.model(images)
            labels += targets
            shown.update(len(batch))
    if not features:
        return torch.empty(0, device=CPU), torch.empty(0, device=CPU)
    with CPU:  # the fit's own context would make them on the GPU
        stacked = chosen.stack(labels)
    return torch.cat(features), stacked

"""A new classifier on weights that were trained elsewhere starts as a linear probe of their features.

A random one would first distort those weights (Kumar et al., Fine-Tuning can Distort Pretrained Features, arXiv
2202.10054), and at the small learning rate that they need it learns slowly. It is fitted to the labels where they train
it, else to the teacher's answers where losses over logits do.
"""

from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

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
    student: Student, teacher: RunTeacher | None, sample: Sample | None, device: torch.device = CPU
) -> str:
    """Sets a new linear classifier to a ridge regression on its features of training pictures.

    It is fitted to the labels where the task's loss trains it (weight above 0), else to the teacher's logits where losses
    over logits do. Left as they are: a classifier that came with the weights, one that is inherited, SimKD's, one of maps,
    any with fewer than two pictures to fit by; and, of those fitted to logits, one of numbers that have a scale
    (regression), and one whose teacher is missing or stored answers. Called in the first process, before training.

    Args:
        student: with pre-trained weights.
        teacher: the run's; None: there is none.
        sample: gives training pictures; None: there are none.
        device: where the run trains; a fit to labels computes the features there if it is a GPU, else on the CPU, and
            puts the student back where it was. A fit to answers runs where the models are.

    Returns:
        A message for the user; "" where the classifier was left as it is.
    """
    classifier = linear_classifier(student.model)
    if classifier is None or student.start == "inherited" or not has_new_classifier(student.model):
        return ""
    task = student.task
    count = min(PER_CLASS * len(student.classes), MOST)
    source = None  # of the targets: a teacher, or None for the labels
    if not student.objective.task_loss_weight:
        is_taught = student.objective.trains_logits and student.data.scales is None
        if not is_taught or student.start != "pre-trained":
            return ""
        if teacher is None or teacher.stored:
            return ""
        source = teacher
        device = CPU
    elif not task.one_class:
        count = max(count, LEAST)  # also few labels, or numbers, need many pictures
    if sample is None:
        return ""
    chosen = sample(count, source is None)
    if len(chosen) < 2:
        return ""
    with fitting_on(device, student.model) as place:
        features, targets = _features_and_targets(student, source, chosen, place)
    if features.ndim != 2:  # of maps each place has a label
        return ""
    if source is not None:
        fit_first_classifier(classifier, [features], targets, torch.zeros_like(classifier.weight))
        fitted_to = f"of the teacher's answers on the features of {len(targets)} training pictures"
    else:
        first = task.first_classifier(features, targets)
        if first is None:
            return ""
        set_in_units(classifier, first.weight, first.bias)
        fitted_to = (
            f"on the features of {len(targets)} training pictures (leave-one-out {first.score})"
        )
    return f"student: the new classifier starts as a ridge regression {fitted_to}"


def _features_and_targets(
    student: Student, teacher: RunTeacher | None, sample: SampledPictures, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The classifier's input for pictures, as its tap catches it (added to the student's taps), and what it is fitted to;
    both on the CPU.

    Args:
        student: on ``device``, to which pictures are brought batch by batch.
        teacher: whose logits it is fitted to; None: to the labels.
        sample: the pictures, with their labels.
        device: of the student.

    Returns:
        Float32 ``(N, D)``; and logits ``(N, C)``, or targets ``(N,)`` or ``(N, C)``.
    """
    student.taps.add(PRELOGITS)
    features = []
    targets = []
    pairs = iter(sample)
    with bar_at_start(label="a first classifier", total=len(sample)) as shown:
        while part := list(islice(pairs, BATCH)):
            pictures, labels = zip(*part, strict=True)
            images = torch.stack(pictures).to(device)
            of_part = teacher(images) if teacher is not None else sample.stack(labels)
            with evaluating(student.model), student.taps as caught:
                student.model(student.inputs(images))
            features.append(caught[PRELOGITS].float().cpu())
            targets.append(of_part.cpu())
            shown.update(len(images))
    with CPU:  # the fit's own context would make new tensors on the GPU
        return torch.cat(features), torch.cat(targets)

"""A new classifier on weights that were trained elsewhere starts as a linear probe of their features.

A random one would first distort those weights (Kumar et al., Fine-Tuning can Distort Pretrained Features, arXiv
2202.10054), and at the small learning rate that they need it learns slowly.
"""

from collections.abc import Callable, Iterable
from itertools import islice

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from kd.data.batch import Target
from kd.distill.student import Student
from kd.models.loading import has_new_classifier
from kd.models.preprocess import evaluating
from kd.progress import bar
from kd.tasks.features import starting_classifier

Sample = Callable[[int, bool], Iterable[tuple[Tensor, Target]]]
A_CLASS, MOST = 64, 4096  # labelled pictures that are used: on average of a class, and in all
BATCH = 64


@torch.no_grad()
def fit_new_classifier(student: Student, sample: Sample | None) -> str:
    """Sets a new linear classifier to a ridge regression of labelled pictures' features; returns a message or ""."""
    found = getattr(student.model, "get_classifier", lambda: None)()
    taken = student.start == "inherited" or not student.objective.task_loss_weight  # SimKD's is 0
    if (
        sample is None
        or taken
        or not has_new_classifier(student.model)
        or not isinstance(found, nn.Linear)
    ):
        return ""
    features, labels = _features(student, found, sample, min(A_CLASS * len(student.classes), MOST))
    if features.ndim != 2 or len(labels) < 2:
        return ""
    weight, bias, right = starting_classifier(features, labels, len(student.classes))
    found.weight.copy_(weight)
    if found.bias is not None:
        found.bias.copy_(bias)
    if student.average is not None:
        student.average.set(student.model)
    return (
        f"student: the new classifier starts as a ridge regression on the features of {len(labels)} training pictures "
        f"(leave-one-out accuracy {right:.1%})"
    )


def _features(
    student: Student, classifier: nn.Linear, sample: Sample, count: int
) -> tuple[Tensor, Tensor]:
    """What the classifier sees of the pictures ``(N, D)``, and their labels."""
    seen: list[Tensor] = []
    labels: list[Target] = []
    pictures = iter(sample(count, True))
    hook = classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float()))
    off = getattr(rank_zero_only, "rank", 0) != 0
    with hook, evaluating(student.model), bar(label="a first classifier", disable=off) as shown:
        while part := list(islice(pictures, BATCH)):
            student.model(student.prepare(torch.stack([picture for picture, _ in part])))
            labels += [target for _, target in part]
            shown.update(len(part))
    return (torch.cat(seen), torch.tensor(labels)) if seen else (torch.empty(0), torch.empty(0))

"""How good features are without training a head: k nearest neighbours, a ridge probe, RankMe. Tensors in, numbers out.

Features are ``(N, D)``, one vector a picture, on any device; labels are class ids ``(N,)`` from 0. The *bank* is what
answers are looked up in or fitted to, usually the training set's features of the same model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1024  # pictures whose similarities with the whole bank are in memory at once
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    features: Tensor,
    labels: Tensor,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Top-1 accuracy of the ``k`` nearest neighbours by cosine, each with a vote of ``exp(cosine / temperature)``.

    Source: Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, arXiv 1805.01978,
    section 3.4; with 20 neighbours as DINO (arXiv 2104.14294) has it. ``bank`` is ``(M, D)``, ``features`` ``(N, D)``;
    in 0..1. Sizes that do not fit raise a ValueError.

    Args:
        bank: ``(M, D)``.
        bank_labels: ``(M,)``.
        features: ``(N, D)``.
        labels: ``(N,)``.
        k: neighbours, > 0; all of a smaller bank.
        temperature: > 0.

    Returns:
        In 0..1.

    Raises:
        ValueError: sizes that do not fit each other, an empty bank, or no features.

    >>> bank, names = torch.tensor([[1.0, 0], [2, 0.1], [0, 1]]), torch.tensor([0, 0, 1])
    >>> knn_accuracy(bank, names, torch.tensor([[5.0, 1], [1, 5]]), torch.tensor([0, 1]), k=2)
    1.0
    """
    _check(bank, bank_labels, features, labels)
    keys, k = F.normalize(bank.float(), dim=1), min(k, len(bank))
    classes, right = int(bank_labels.max()) + 1, 0
    for some, wanted in zip(features.split(CHUNK), labels.split(CHUNK), strict=True):
        cosines, nearest = (F.normalize(some.float(), dim=1) @ keys.T).topk(k, dim=1)
        votes = cosines.new_zeros(len(some), classes)
        votes.scatter_add_(1, bank_labels[nearest], ((cosines - 1) / temperature).exp())
        right += int((votes.argmax(1) == wanted).sum())
    return right / len(features)


def starting_classifier(
    bank: Tensor, bank_labels: Tensor, classes: int
) -> tuple[Tensor, Tensor, float]:
    """:func:`ridge_classifier` as the first weights of a classifier, and its leave-one-out accuracy in 0..1.

    The logits are scaled by the power of two with the least leave-one-out cross-entropy: regression of 0 and 1 names
    the right class with hardly more than the others.

    Args:
        bank: ``(M, D)``.
        bank_labels: ``(M,)``.
        classes: C, some of which the bank may lack.

    Returns:
        Weight ``(C, D)``, bias ``(C,)``, float64, and the accuracy on pictures left out one by one, in 0..1.
    """
    weight, bias, without = ridge_classifier(bank, bank_labels, classes)
    labels = bank_labels.long()
    scale = min(
        (2.0**k for k in range(8)), key=lambda s: float(F.cross_entropy(s * without, labels))
    )
    return scale * weight, scale * bias, float((without.argmax(1) == labels).double().mean())


def ridge_classifier(
    bank: Tensor, bank_labels: Tensor, classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A linear classifier by ridge regression of one-hot labels: weight ``(C, D)`` and bias ``(C,)``, float64.

    Features count with mean 0 and variance 1. Of :data:`STRENGTHS` (of the penalty, relative to M) the one with the
    highest leave-one-out accuracy on the bank is taken, of equals the strongest. The intercept is not penalised. The
    third tensor is what each picture of the bank gets by a fit without itself, ``(M, C)``.
    """
    x, count = bank.double(), len(bank)
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    x = (x - mean) / deviation
    targets = F.one_hot(bank_labels.long(), classes).double()
    share = targets.mean(dim=0)
    values, vectors = torch.linalg.eigh(x.T @ x)
    turned = x @ vectors
    towards = turned.T @ (targets - share)
    best, chosen, left_out = -1.0, STRENGTHS[0], targets
    for strength in sorted(STRENGTHS, reverse=True):
        shrunk = 1 / (values.clamp_min(0) + strength * count)
        fitted = turned @ (shrunk[:, None] * towards) + share
        leverage = 1 / count + (turned.square() * shrunk).sum(dim=1, keepdim=True)
        without = targets - (targets - fitted) / (1 - leverage).clamp_min(
            1e-9
        )  # the fit without the picture itself
        accuracy = float((without.argmax(1) == bank_labels).double().mean())
        if accuracy > best:
            best, chosen, left_out = accuracy, strength, without
    shrunk = 1 / (values.clamp_min(0) + chosen * count)
    weight = (vectors @ (shrunk[:, None] * towards)).T / deviation
    return weight, share - weight @ mean, left_out


def ridge_accuracy(bank: Tensor, bank_labels: Tensor, features: Tensor, labels: Tensor) -> float:
    """Top-1 accuracy, in 0..1, of :func:`ridge_classifier` fitted to the bank.

    >>> bank, names = torch.tensor([[0.0], [1], [4], [5]]), torch.tensor([0, 0, 1, 1])
    >>> ridge_accuracy(bank, names, torch.tensor([[1.5], [3.0]]), torch.tensor([0, 1]))
    1.0
    """
    _check(bank, bank_labels, features, labels)
    weight, bias, _ = ridge_classifier(bank, bank_labels, int(bank_labels.max()) + 1)
    answers = torch.cat(
        [(some.double() @ weight.T + bias).argmax(1) for some in features.split(CHUNK)]
    )
    return float((answers == labels).double().mean())


def rank_of_gram(gram: Tensor) -> float:
    """RankMe: how many directions features ``X`` use, 1 (one line) to D (all alike), from ``X'X``; 0 where all are 0.

    ``exp(-sum p log p)`` with ``p = s / sum(s) + 1e-7`` of the singular values ``s``. It shows collapsed features
    without labels. Source: Garrido et al., RankMe, arXiv 2210.02885, equation 1 (it advises 25,600 pictures).

    >>> round(rank_of_gram(torch.eye(8).double()), 3), round(rank_of_gram(torch.ones(4, 4).double()), 3)
    (8.0, 1.0)
    """
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    if not values.sum() > 0:
        return 0.0
    p = values / values.sum() + 1e-7
    return float((-(p * p.log()).sum()).exp())


def _check(bank: Tensor, bank_labels: Tensor, features: Tensor, labels: Tensor) -> None:
    for name, x, ids in (("bank", bank, bank_labels), ("features", features, labels)):
        if x.ndim != 2 or not len(x) or ids.shape != x.shape[:1]:
            raise ValueError(
                f"{name} must be (N, D) with N >= 1 and a label each, got {tuple(x.shape)} with labels "
                f"{tuple(ids.shape)}"
            )
    if bank.shape[1] != features.shape[1]:
        raise ValueError(
            f"bank and features must have one width, got {bank.shape[1]} and {features.shape[1]}"
        )

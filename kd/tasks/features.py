"""How good features are without training a head: k nearest neighbours, a ridge probe, RankMe. Tensors in, numbers out.

Features are ``(N, D)``, one vector a picture, on any device; labels are class ids ``(N,)`` from 0. The *bank* is what
answers are looked up in or fitted to, usually the training set's features of the same model.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1024
"""Pictures whose similarities with the whole bank are in memory at once."""
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Penalties of the ridge regression that are tried, relative to the number of pictures."""


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
    section 3.4; with 20 neighbours as DINO (arXiv 2104.14294) has it.

    Args:
        bank: ``(M, D)``.
        bank_labels: ``(M,)``.
        features: ``(N, D)``.
        labels: ``(N,)``.
        k: neighbours, > 0; all of a smaller bank.
        temperature: > 0.

    Returns:
        In 0..1.

    >>> bank, names = torch.tensor([[1.0, 0], [2, 0.1], [0, 1]]), torch.tensor([0, 0, 1])
    >>> knn_accuracy(bank, names, torch.tensor([[5.0, 1], [1, 5]]), torch.tensor([0, 1]), k=2)
    1.0
    """
    keys_MD = F.normalize(bank.float(), dim=1)
    neighbours = min(k, len(bank))
    classes = int(bank_labels.max()) + 1
    right = 0
    chunks = zip(features.split(CHUNK), labels.split(CHUNK), strict=True)
    for queries, truth in chunks:
        queries_ND = F.normalize(queries.float(), dim=1)
        cosines_NM = queries_ND @ keys_MD.T
        cosines_Nk, nearest_Nk = cosines_NM.topk(neighbours, dim=1)
        # less 1: at most exp(0), whatever the temperature
        votes_Nk = ((cosines_Nk - 1) / temperature).exp()
        votes_NC = votes_Nk.new_zeros(len(queries), classes)
        votes_NC.scatter_add_(1, bank_labels[nearest_Nk], votes_Nk)
        is_right = votes_NC.argmax(1) == truth
        right += int(is_right.sum())
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
    weight, bias, left_out_logits = ridge_classifier(bank, bank_labels, classes)
    labels = bank_labels.long()
    scale = best_scale(left_out_logits, labels)
    is_right = left_out_logits.argmax(1) == labels
    accuracy = float(is_right.double().mean())
    return scale * weight, scale * bias, accuracy


def starting_labels(bank: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
    """The first weights of a classifier whose labels do not exclude each other: a ridge regression of 0 and 1.

    An output of 1/2 becomes a logit of 0, and the logits are scaled by the power of two, 1 to 128, with the least
    leave-one-out cross-entropy.

    Args:
        bank: ``(M, D)``.
        targets: ``(M, C)``, 0 or 1.

    Returns:
        Weight ``(C, D)``, bias ``(C,)``, float64, and F1 of all labels on pictures left out one by one, in 0..1.
    """
    targets_MC = targets.double()
    weight_CD, bias_C, left_out_MC = ridge_fit(bank, targets_MC, partial(_closeness, targets_MC))
    logits_MC = left_out_MC - 0.5
    scale = best_scale(logits_MC, targets_MC, F.binary_cross_entropy_with_logits)
    is_yes_MC = logits_MC > 0
    is_right_MC = is_yes_MC * targets_MC
    right = float(is_right_MC.sum())
    answered_and_true = is_yes_MC.sum() + targets_MC.sum()
    f1 = 2 * right / max(1.0, float(answered_and_true))
    return scale * weight_CD, scale * (bias_C - 0.5), f1


def starting_numbers(bank: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
    """The first weights of a regression's last layer: a ridge regression of its targets, in their units.

    Args:
        bank: ``(M, D)``.
        targets: ``(M, C)``, finite.

    Returns:
        Weight ``(C, D)``, bias ``(C,)``, float64, and R2 on pictures left out one by one, the mean over the targets
        that vary (0 where none does).
    """
    targets_MC = targets.double()
    quality = partial(_closeness, targets_MC)
    weight_CD, bias_C, left_out_MC = ridge_fit(bank, targets_MC, quality)
    return weight_CD, bias_C, quality(left_out_MC)


def _closeness(targets: Tensor, outputs: Tensor) -> float:
    """R2, the mean over the targets that vary: 1 less the squared error over the variance; 0 where none varies.

    Args:
        targets: ``(M, C)``.
        outputs: likewise.
    """
    variance_C = targets.var(dim=0, correction=0)
    error_C = (outputs - targets).square().mean(dim=0)
    varies_C = variance_C > 0
    if not varies_C.any():
        return 0.0
    return float((1 - error_C[varies_C] / variance_C[varies_C]).mean())


def best_scale(
    logits: Tensor, targets: Tensor, loss: Callable[..., Tensor] = F.cross_entropy
) -> float:
    """The power of two, 1 to 128, that gives logits ``(N, C)`` the least mean loss, by default cross-entropy with labels
    ``(N,)``; of equals the smallest.
    """
    scales = [2.0**power for power in range(8)]
    losses = [float(loss(scale * logits, targets)) for scale in scales]
    return scales[losses.index(min(losses))]


def ridge_classifier(
    bank: Tensor, bank_labels: Tensor, classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A linear classifier by ridge regression of one-hot labels.

    Features count with mean 0 and variance 1. Of :data:`STRENGTHS` (of the penalty, relative to M) the one with the
    highest leave-one-out accuracy on the bank is taken, of equals the strongest. The intercept is not penalised.

    With X the standardised features, ``X'X = V diag(e) V'``, s the share of each class, Y the one-hot labels and p the
    penalty, the fit is ``X V diag(1 / (e + p)) V' X' (Y - s) + s``. What a picture gets by a fit without itself is
    ``y - (y - fit) / (1 - h)``, h its leverage, ``1 / M + sum_i (XV)_i^2 / (e_i + p)`` (Hastie, Tibshirani and
    Friedman, The Elements of Statistical Learning, 7.10).

    Args:
        bank: ``(M, D)``.
        bank_labels: ``(M,)``.
        classes: C.

    Returns:
        Weight ``(C, D)``, bias ``(C,)``, and what each picture of the bank gets by a fit without itself, ``(M, C)``;
        float64.
    """
    targets_MC = F.one_hot(bank_labels.long(), classes).double()

    def accuracy(left_out_MC: Tensor) -> float:
        """The share of pictures whose highest output is their label's."""
        is_right = left_out_MC.argmax(1) == bank_labels
        return float(is_right.double().mean())

    return ridge_fit(bank, targets_MC, accuracy)


def ridge_fit(
    bank: Tensor, targets: Tensor, quality: Callable[[Tensor], float]
) -> tuple[Tensor, Tensor, Tensor]:
    """A linear fit of any targets by ridge regression, as :func:`ridge_classifier` describes it.

    Args:
        bank: ``(M, D)``.
        targets: ``(M, C)``, float64.
        quality: how good outputs ``(M, C)`` are, as a number; it is called with what each picture gets by a fit without
            itself. Of the penalties the one with the highest is taken, of equals the strongest.

    Returns:
        Weight ``(C, D)``, bias ``(C,)`` for features as they are, and these outputs, ``(M, C)``, of the chosen penalty;
        float64.
    """
    # Standardised features, in the basis of their principal directions.
    targets_MC = targets
    count = len(bank)
    features_MD = bank.double()
    mean_D = features_MD.mean(dim=0)
    deviation_D = features_MD.std(dim=0, correction=0)
    ones_D = torch.ones_like(deviation_D)
    deviation_D = torch.where(deviation_D > 0, deviation_D, ones_D)
    x_MD = (features_MD - mean_D) / deviation_D
    shares_C = targets_MC.mean(dim=0)
    values_D, vectors_DD = torch.linalg.eigh(x_MD.T @ x_MD)
    turned_MD = x_MD @ vectors_DD
    cross_DC = turned_MD.T @ (targets_MC - shares_C)

    # The strength whose fits without a picture have the highest quality.
    best_quality = -math.inf
    best_strength = STRENGTHS[0]
    best_left_out_MC = targets_MC
    for strength in sorted(STRENGTHS, reverse=True):
        shrunk_D = 1 / (values_D.clamp_min(0) + strength * count)
        coefficients_DC = shrunk_D[:, None] * cross_DC
        fitted_MC = turned_MD @ coefficients_DC + shares_C
        weighted_squares_MD = turned_MD.square() * shrunk_D
        leverage_M1 = 1 / count + weighted_squares_MD.sum(dim=1, keepdim=True)
        rest_M1 = (1 - leverage_M1).clamp_min(1e-9)
        left_out_MC = targets_MC - (targets_MC - fitted_MC) / rest_M1
        quality_of_fit = quality(left_out_MC)
        if quality_of_fit > best_quality:
            best_quality = quality_of_fit
            best_strength = strength
            best_left_out_MC = left_out_MC

    # The fit for features as they are.
    shrunk_D = 1 / (values_D.clamp_min(0) + best_strength * count)
    coefficients_DC = shrunk_D[:, None] * cross_DC
    weight_CD = (vectors_DD @ coefficients_DC).T / deviation_D
    bias_C = shares_C - weight_CD @ mean_D
    return weight_CD, bias_C, best_left_out_MC


def ridge_accuracy(bank: Tensor, bank_labels: Tensor, features: Tensor, labels: Tensor) -> float:
    """Top-1 accuracy, in 0..1, of :func:`ridge_classifier` fitted to the bank.

    Args:
        bank: features ``(M, D)``.
        bank_labels: class ids ``(M,)``.
        features: to be classified, ``(N, D)``.
        labels: their class ids ``(N,)``.

    >>> bank, names = torch.tensor([[0.0], [1], [4], [5]]), torch.tensor([0, 0, 1, 1])
    >>> ridge_accuracy(bank, names, torch.tensor([[1.5], [3.0]]), torch.tensor([0, 1]))
    1.0
    """
    is_right = ridge_outcomes(bank, bank_labels, features, labels)
    return float(is_right.double().mean())


def ridge_outcomes(bank: Tensor, bank_labels: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Whether :func:`ridge_classifier`, fitted to the bank, is right on each picture: ``(N,)``, true or false.

    Args:
        bank: ``(M, D)``.
        bank_labels: ``(M,)``.
        features: ``(N, D)``.
        labels: ``(N,)``.
    """
    classes = int(bank_labels.max()) + 1
    weight, bias, _ = ridge_classifier(bank, bank_labels, classes)
    answers = []
    for chunk in features.split(CHUNK):
        logits = chunk.double() @ weight.T + bias
        answers.append(logits.argmax(1))
    return torch.cat(answers) == labels


def half_of_each_class(labels: Tensor, seed: int) -> Tensor:
    """Numbers of half of the pictures of each class, drawn at random; of an odd number the larger half.

    Args:
        labels: class ids ``(N,)``.
        seed: of the draw.

    Returns:
        Places in ``labels``, int64 ``(K,)`` on their device: those of the lowest class id first.

    >>> half_of_each_class(torch.tensor([0, 0, 1]), seed=0).shape
    torch.Size([2])
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for class_id in labels.unique():
        numbers = (labels == class_id).nonzero()[:, 0]
        half = (len(numbers) + 1) // 2
        order = torch.randperm(len(numbers), generator=generator, device="cpu")
        chosen.append(numbers[order[:half].to(numbers.device)])
    return torch.cat(chosen)


def rank_of_gram(gram: Tensor) -> float:
    """RankMe: how many directions features ``X`` ``(N, D)`` use, from ``X'X`` ``(D, D)``, float64.

    1 where all lie on one line, D where they reach equally far in all directions; 0 where all are 0, NaN where one is NaN
    or infinite.

    ``exp(-sum p log p)`` with ``p = s / sum(s) + 1e-7`` of the singular values ``s``. It shows collapsed features
    without labels. Source: Garrido et al., RankMe, arXiv 2210.02885, equation 1 (it advises 25,600 pictures).

    >>> round(rank_of_gram(torch.eye(8).double()), 3), round(rank_of_gram(torch.ones(4, 4).double()), 3)
    (8.0, 1.0)
    """
    if not gram.isfinite().all():  # eigvalsh raises an error on them
        return math.nan
    eigenvalues = torch.linalg.eigvalsh(gram)
    singular_values = eigenvalues.clamp_min(0).sqrt()
    total = singular_values.sum()
    if not total > 0:
        return 0.0
    p = singular_values / total + 1e-7
    entropy = -(p * p.log()).sum()
    return float(entropy.exp())

"""Recognises a teacher that ends with a softmax or a sigmoid, and recovers its logits."""

from torch import Tensor

INVERSE = {"softmax": "their logarithm", "sigmoid": "their log-odds"}
"""The function that turns probabilities into logits, by the function that made them."""

SMALLEST = 1e-12
"""The smallest probability of a softmax: its logits are at least ``log(1e-12) = -27.6``."""

MARGIN = 1e-6
"""The smallest distance of a sigmoid's probability from 0 and 1: its logits are within -13.8 and 13.8."""

FEWEST = 16
"""Numbers that a decision about a sigmoid needs: a few logits may lie between 0 and 1 by chance."""


def are_probabilities(outputs: Tensor, link: str) -> bool:
    """Whether a model's outputs are probabilities already; waits for the device.

    Args:
        outputs: ``(N, C, ...)``.
        link: ``softmax``: all are within 0 and 1, and add up to 1 (by 0.01) over the C classes, two or more.
            ``sigmoid``: all are within 0 and 1, some below 0.5, not all equal, and :data:`FEWEST` or more. Logits
            within 0 and 1 would say that every label of every picture is more likely than not.

    >>> import torch
    >>> shares = torch.tensor([[0.1, 0.9]])
    >>> are_probabilities(shares, "softmax"), are_probabilities(2 * shares, "softmax")
    (True, False)
    >>> labels = torch.tensor([[0.01, 0.98, 0.3, 0.05]]).expand(4, 4)
    >>> are_probabilities(labels, "sigmoid"), are_probabilities(labels - 0.1, "sigmoid")
    (True, False)
    """
    if outputs.ndim < 2 or not outputs.numel():
        return False
    lowest, highest = outputs.aminmax()
    within = (lowest >= 0) & (highest <= 1)
    if link == "sigmoid":
        says_no = lowest < 0.5
        differ = lowest < highest
        return outputs.numel() >= FEWEST and bool(within & says_no & differ)
    if outputs.shape[1] < 2:
        return False
    sums_N = outputs.float().sum(1)
    error = (sums_N - 1).abs().max()
    return bool(within & (error < 0.01))


def logits_of_probabilities(probabilities: Tensor, link: str) -> Tensor:
    """Logits ``(N, C, ...)`` that ``link`` (``softmax`` or ``sigmoid``) turns into these probabilities.

    ``softmax(log p) = p`` and ``sigmoid(log(p / (1 - p))) = p``. Logits of a softmax are unique up to a constant for
    each picture. Probabilities of 0 (and, of a sigmoid, of 1) are moved inwards first, by :data:`SMALLEST` or
    :data:`MARGIN`, so that all logits are finite.

    >>> import torch
    >>> logits_of_probabilities(torch.tensor([[0.25, 0.75]]), "sigmoid").sigmoid()
    tensor([[0.2500, 0.7500]])
    """
    if link == "sigmoid":
        return probabilities.logit(eps=MARGIN)
    return probabilities.clamp_min(SMALLEST).log()

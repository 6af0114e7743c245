"""How much each class counts in the loss on the labels."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kd.config.suggest import near
from kd.errors import UserError

KEY = "model.task.class_weights"

ClassWeights: TypeAlias = dict[str, float] | list[float] | Literal["auto"] | None


def check_class_weights(given: ClassWeights) -> None:
    """Raises a ValueError for weights that no classes can have; what depends on the classes :func:`weights_of` checks.

    Args:
        given: as of :func:`weights_of`. A word other than ``auto``, and a number that is negative, NaN or infinite, are
            refused.
    """
    if isinstance(given, str) and given != "auto":
        raise ValueError(
            f"class_weights must be auto, a list of numbers or numbers by class name, got '{given}'"
        )
    values = given.values() if isinstance(given, Mapping) else given
    if values is None or isinstance(values, str):
        return
    if not all(0 <= value < float("inf") for value in values):
        raise ValueError(f"class_weights must be >= 0, and not all 0, got {given}")


def weights_of(
    given: ClassWeights, classes: Sequence[str], counts: Sequence[int] | None
) -> Tensor | None:
    """The weight of each class, float32 ``(C,)``; None where all count alike.

    Args:
        given: by class id, or by name (the others weigh 1); ``auto``: N / (K n) for a class of n of the N training
            pictures, with K the classes that have any, so that these weigh the same and the mean over the pictures is 1
            (a class without any weighs as one with a single picture); None: all count alike.
        classes: names of the C classes, by class id.
        counts: training pictures of each class, ``(C,)``; read for ``auto`` alone. None: not known, as of masks or
            several labels a picture, or not what is shown, as with ``data.balance_classes`` or ``data.sampler``.

    Raises:
        UserError: too many or too few of them, an unknown class, all 0, or ``auto`` without counts.

    >>> weights_of("auto", ["a", "b"], [30, 10])
    tensor([0.6667, 2.0000])
    >>> weights_of({"b": 3}, ["a", "b"], None)
    tensor([1., 3.])
    """
    if given is None:
        return None
    if given == "auto":
        if counts is None:
            raise UserError(
                f"{KEY}: auto needs the number of training pictures of each class: one label a picture, no data.sampler, "
                "and no data.balance_classes, which shows all classes equally often already"
            )
        seen = torch.tensor(counts, dtype=torch.float64)
        return (seen.sum() / (seen.count_nonzero() * seen.clamp_min(1))).float()
    if isinstance(given, list):
        if len(given) != len(classes):
            raise UserError(f"{KEY}: {len(given)} numbers for {len(classes)} classes")
        weights = torch.tensor(given, dtype=torch.float32)
    else:
        assert isinstance(given, dict)
        unknown = next((name for name in given if name not in classes), None)
        if unknown is not None:
            raise UserError(f"{KEY}: no class '{unknown}'{near(unknown, classes)}")
        weights = torch.tensor([given.get(name, 1.0) for name in classes], dtype=torch.float32)
    if not weights.any():
        raise UserError(f"{KEY}: must be >= 0, and not all 0, got {given}")
    return weights

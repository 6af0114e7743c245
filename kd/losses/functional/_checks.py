"""What all losses share: float32 inside, and checks of shapes."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """float32 at least: under CPU autocast a bfloat16 log-softmax stays bfloat16 and loses the small terms."""
    return x if x.dtype == torch.float64 else x.float()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in their own precision: autocast would round to bfloat16 first."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def same_shape(student: Tensor, teacher: Tensor, kind: str) -> None:
    """Raises a ValueError unless both have one shape; ``kind`` is ``logits`` or ``features``."""
    if student.shape != teacher.shape:
        raise ValueError(
            f"student_{kind} and teacher_{kind} must have one shape, got {tuple(student.shape)} "
            f"and {tuple(teacher.shape)}"
        )


def class_ids(target: Tensor, loss: str) -> Tensor:
    """The target, or a ValueError where it holds probabilities, for which ``loss`` is not defined."""
    if target.is_floating_point():
        raise ValueError(
            f"target must hold class ids (N,) for {loss}, got probabilities of shape {tuple(target.shape)}"
        )
    return target


def positive(name: str, value: float) -> None:
    """Raises a ValueError unless ``value`` > 0."""
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}")

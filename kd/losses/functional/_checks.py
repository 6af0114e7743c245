"""What all losses share: float32 inside, and checks of shapes."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """The same numbers in float32 at least.

    Under CPU autocast a bfloat16 log-softmax stays bfloat16 and loses the small terms.
    """
    if x.dtype == torch.float64:
        return x
    return x.float()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, as torch multiplies them, in their own precision: autocast would round to bfloat16 first."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def directions(x: Tensor, dim: int, eps: float = 1e-12, noise: Tensor | float = 0.0) -> Tensor:
    """Vectors over ``dim`` divided by their length; one of length 0 stays 0 and has no gradient.

    :func:`torch.nn.functional.normalize`, which has a gradient of ``1 / eps`` there: two equal pictures in a batch, or
    a position where a ReLU lets nothing through, would outweigh all others.

    Args:
        x: ``(..., D, ...)``.
        dim: the axis of ``D``.
        eps: the least length to divide by.
        noise: lengths up to this count as 0 too; one number, or of the shape of the lengths with ``dim`` kept.
    """
    length = x.norm(2, dim, keepdim=True)
    return x / torch.where(length > noise, length.clamp_min(eps), torch.inf)


def rounding(x: Tensor, dim: int) -> Tensor:
    """What rounding may leave of equal numbers over ``dim`` once their mean is subtracted: a length, ``dim`` kept."""
    return 10 * torch.finfo(x.dtype).eps * x.detach().norm(2, dim, keepdim=True)


def same_shape(student: Tensor, teacher: Tensor, kind: str) -> None:
    """Raises a ValueError unless ``student`` and ``teacher`` have one shape; ``kind`` is ``logits`` or ``features``."""
    if student.shape != teacher.shape:
        raise ValueError(
            f"student_{kind} and teacher_{kind} must have one shape, got {tuple(student.shape)} "
            f"and {tuple(teacher.shape)}"
        )


def same_grid(student: Tensor, teacher: Tensor) -> None:
    """Raises a ValueError unless both maps ``(N, C, H, W)`` have one height and width."""
    if student.shape[2:] != teacher.shape[2:]:
        raise ValueError(
            f"student_features must have the teacher's height and width {tuple(teacher.shape[2:])}, "
            f"got {tuple(student.shape[2:])}"
        )


def positive(name: str, value: float) -> None:
    """Checks a setting of a loss.

    Raises:
        ValueError: ``value`` is not > 0 (NaN too); the message has ``name``.
    """
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}")

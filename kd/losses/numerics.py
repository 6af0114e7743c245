"""What losses compute with: float32 inside, exact products, directions, and a check of shapes."""

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """The same numbers in float32 at least.

    Under CPU autocast a bfloat16 log-softmax stays bfloat16 and loses the small terms.
    """
    if x.dtype == torch.float64:
        return x
    return x.float()


def both(student: Tensor, teacher: Tensor, kind: str = "features") -> tuple[Tensor, Tensor]:
    """Student and teacher in float32 at least (float64 stays), the teacher's side without a gradient.

    Raises:
        ValueError: they have other shapes; ``kind`` (``logits`` or ``features``) says of what.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"student_{kind} and teacher_{kind} must have one shape, got {tuple(student.shape)} "
            f"and {tuple(teacher.shape)}"
        )
    return wide(student), wide(teacher.detach())


def mean_squared(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean squared error of two features of one shape, a scalar, as of :func:`both`."""
    return F.mse_loss(*both(student, teacher))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, as torch multiplies them, in their own precision: autocast would round to bfloat16 first."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def directions(x: Tensor, dim: int, eps: float = 1e-12, noise: Tensor | float = 0.0) -> Tensor:
    """Vectors over ``dim`` divided by their length; one of length 0 stays 0 and has no gradient.

    With :func:`torch.nn.functional.normalize` it would have a gradient of ``1 / eps``: two equal pictures in a batch, or a
    position where a ReLU lets nothing through, would outweigh all others.

    Args:
        x: ``(..., D, ...)``.
        dim: the axis of ``D``.
        eps: the least length to divide by.
        noise: lengths up to this count as 0 too; one number, or of the shape of the lengths with ``dim`` kept.
    """
    length = x.norm(2, dim, keepdim=True)
    return x / torch.where(length > noise, length.clamp_min(eps), torch.inf)


def rounding(x: Tensor, dim: int) -> Tensor:
    """The largest length that rounding may leave of equal numbers over ``dim`` once their mean is subtracted; ``dim`` is
    kept, without a gradient.
    """
    return 10 * torch.finfo(x.dtype).eps * x.detach().norm(2, dim, keepdim=True)


def kl(log_p_teacher: Tensor, log_p_student: Tensor, dim: int) -> Tensor:
    """``KL(teacher || student)`` in nats, summed over ``dim``, of log-probabilities of one shape."""
    terms = F.kl_div(log_p_student, log_p_teacher, reduction="none", log_target=True)
    return terms.sum(dim=dim)


def cosines(x: Tensor) -> Tensor:
    """Between all L positions of each map: ``(N, C, ...)`` -> ``(N, L, L)``."""
    units = directions(x.flatten(2), dim=1)
    return matmul(units.transpose(1, 2), units)

"""What is kept of a teacher's logits when only the largest k are."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class TopKLogits:
    """The k largest logits of each answer, and the mass of all others as one number a temperature.

    Attributes:
        values: ``(N, k)`` float32, relative to the largest (which is 0), falling.
        indices: ``(N, k)`` their classes.
        tails: temperature ``T`` -> ``(N,)``: ``log sum exp(z_c / T)`` over the other classes, with the same reference.
    """

    values: Tensor
    indices: Tensor
    tails: dict[float, Tensor]

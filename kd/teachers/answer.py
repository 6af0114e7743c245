"""What a teacher says of a batch, and how a model's output becomes logits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kd.errors import UserError
from kd.losses.topk import TopKLogits

ALL = ""
"""The name of the answer of all teachers together, and of a single teacher."""

Layer = tuple[str, str, str]
"""The teacher's name, the path of the layer, and the form of its tokens (:class:`kd.models.taps.TapSpec`)."""


@dataclass(frozen=True)
class Wanted:
    """What losses look at of a teacher.

    Attributes:
        logits: whether any looks at logits.
        features: the layers, with the shapes that they give for two pictures.
    """

    logits: bool = True
    features: Mapping[Layer, tuple[int, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.logits or bool(self.features)

    def __or__(self, other: "Wanted") -> "Wanted":
        return Wanted(self.logits or other.logits, {**self.features, **other.features})


@dataclass
class Answer:
    """What the teachers said of one batch, without gradients.

    Attributes:
        logits: by teacher, and of all together under :data:`ALL`: ``(N, C)`` (dense: ``(N, C, h, w)``), float32; or the
            largest of them, from a cache.
        features: by layer.
    """

    logits: dict[str, Tensor | TopKLogits] = field(default_factory=dict)
    features: dict[Layer, Tensor] = field(default_factory=dict)


def logits_of(output: Any) -> Tensor:
    """The logits (or features) in whatever a model gives: a tensor; ``.logits``; a dict's ``logits``; a tuple's first.

    Raises:
        UserError: none of these.

    >>> import torch
    >>> logits_of({"logits": torch.zeros(1, 2), "loss": None}).shape
    torch.Size([1, 2])
    """
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(output, (tuple, list)) and found is None and output:
        found = output[0]
    if isinstance(found, Tensor):
        return found
    given = type(output).__name__
    raise UserError(f"a model must give a tensor, an output with .logits, a dict with 'logits' or a tuple, got {given}")

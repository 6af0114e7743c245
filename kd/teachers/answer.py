"""What a teacher says of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

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

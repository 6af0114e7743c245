"""What losses read of teachers, and what teachers answer to a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kd.losses import LogitLoss
from kd.losses.base import TopKLogits

ALL = ""
"""The name of the answer of all teachers together, and of a single teacher."""

Layer = tuple[str, str, str]
"""The teacher's name, the path of the layer, and the form of its tokens (:class:`kd.models.taps.TapSpec`)."""


@dataclass(frozen=True)
class Wanted:
    """What losses read of one teacher or several.

    Attributes:
        logits: the losses that read logits, by their teacher; :data:`ALL`: the mean of all. A key with no losses:
            the logits are wanted for another use.
        features: the layers, with the shapes that they give for two pictures.
    """

    logits: Mapping[str, Sequence[LogitLoss]] = field(default_factory=lambda: {ALL: ()})
    features: Mapping[Layer, tuple[int, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.logits or self.features)

    @property
    def losses(self) -> list[LogitLoss]:
        """All losses that read logits, of whichever teacher."""
        return [loss for losses in self.logits.values() for loss in losses]

    @property
    def maps(self) -> bool:
        """Whether losses read logits of every pixel."""
        return any(loss.for_maps for loss in self.losses)

    def of(self, name: str) -> "Wanted":
        """What is wanted of one teacher: its logits and its layers' features, under its ``name``.

        Its logits are wanted where :attr:`logits` has a key for it or for the mean of all teachers; the losses of both keys
        are in one list. The result is falsy where nothing of this teacher is wanted.
        """
        losses: list[LogitLoss] = []
        reads_logits = False
        for key in dict.fromkeys((ALL, name)):  # once where the name is ALL
            if key in self.logits:
                reads_logits = True
                losses.extend(self.logits[key])
        logits = {}
        if reads_logits:
            logits = {name: losses}
        features = {}
        for layer, shape in self.features.items():
            if layer[0] == name:
                features[layer] = shape
        return Wanted(logits, features)


@dataclass
class Answer:
    """The teachers' answers to one batch, without gradients.

    Attributes:
        logits: by teacher, and the mean of all under :data:`ALL`: float32 ``(N, C)``, for segmentation
            ``(N, C, h, w)``; or the largest logits, from a cache.
        features: by layer, float32, in the shape that the layer gives.
    """

    logits: dict[str, Tensor | TopKLogits] = field(default_factory=dict)
    features: dict[Layer, Tensor] = field(default_factory=dict)

"""A teacher of one's own: two methods. With a third it is named in settings."""

from typing import Any

import torch
from torch import Tensor, nn

from kd.data.batch import Batch
from kd.teachers.answer import Answer, Wanted


class Bright:
    """Tells classes by the pictures' mean colour: logits ``(N, 4)``."""

    def __init__(self, scale: float = 10.0) -> None:
        self.scale, self.asked = scale, 0

    def answer(self, batch: Batch, wanted: Wanted) -> Answer:
        self.asked += 1
        return Answer({"": self.scale * self.colour(batch["image"])})

    def colour(self, images: Tensor) -> Tensor:
        mean = images.float().mean((2, 3)) / 255
        return torch.stack([mean[:, 0], mean[:, 1], mean[:, 2], mean.mean(1)], 1)

    def identity(self) -> dict[str, Any]:
        return {"scale": self.scale}


class Named(Bright):
    """As ``model.teacher.builder``."""

    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> nn.Module:
        return self  # type: ignore[return-value]

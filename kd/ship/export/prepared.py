"""The student with its preprocessing: uint8 pictures in, logits out, so that nobody can normalise wrongly."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kd.models import Preprocess
from kd.ship.export.manifest import Layout


class Prepared(nn.Module):
    """uint8 pictures -> the student's float32 logits.

    Scaling to the student's size, where the data's views have another, is written as two matrix products: runtimes do
    not agree on what an antialiased resize operator is, but all of them multiply.

    Args:
        model: the student, in eval mode.
        preprocess: its input.
        size: height and width of the pictures.
        layout: of the pictures.
    """

    rows: Tensor
    """Scaling matrix of the rows, where the student's size is another."""
    columns: Tensor
    """Scaling matrix of the columns, transposed."""
    mean: Tensor
    """``(1, 3, 1, 1)``, of values in 0..255."""
    std: Tensor
    """``(1, 3, 1, 1)``, of values in 0..255."""

    def __init__(
        self, model: nn.Module, preprocess: Preprocess, size: tuple[int, int], layout: Layout
    ) -> None:
        super().__init__()
        self.model, self.layout = model, layout
        self.scaled = tuple(size) != tuple(preprocess.size)
        if self.scaled:
            self.register_buffer("rows", _scaling(size[0], preprocess.size[0]))
            self.register_buffer("columns", _scaling(size[1], preprocess.size[1]).T.contiguous())
        self.register_buffer("mean", 255 * torch.tensor(preprocess.mean).view(1, -1, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(preprocess.std).view(1, -1, 1, 1))
        self.eval().requires_grad_(False)

    def forward(self, pictures: Tensor) -> Tensor:
        """``(N, H, W, 3)`` or ``(N, 3, H, W)`` -> logits ``(N, C)``, dense ``(N, C, H', W')``, features ``(N, D)``."""
        x = (pictures.permute(0, 3, 1, 2) if self.layout == "nhwc" else pictures).to(torch.float32)
        if self.scaled:
            x = (
                (x @ self.columns).round().clamp(0, 255)
            )  # training's pictures are whole numbers after each pass too
            x = (self.rows @ x).round().clamp(0, 255)
        return self.model((x - self.mean) / self.std)


def _scaling(before: int, after: int) -> Tensor:
    """The matrix ``(after, before)`` of an antialiased bilinear resize along one side."""
    each = torch.eye(before, dtype=torch.float64)[None, None]  # one lit pixel a row
    return (
        F.interpolate(each, (before, after), mode="bilinear", antialias=True)[0, 0]
        .T.float()
        .contiguous()
    )

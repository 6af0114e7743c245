"""The student with its preprocessing: uint8 pictures in, logits out, so that nobody can normalise wrongly."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kd.models import Preprocess


class Prepared(nn.Module):
    """uint8 pictures -> the student's float32 logits, or what else it answers.

    Scaling to the student's size, where the data's views have another, is written as two matrix products: runtimes do
    not agree on what an antialiased resize operator is, but all of them multiply.

    Args:
        model: the student, in eval mode.
        preprocess: its input.
        size: height and width in pixels of the pictures that the export takes; scaled where the student's differ.
    """

    rows: Tensor
    """Scaling matrix of the rows, ``(student's height, height)``, where the student's size is another."""
    columns: Tensor
    """Scaling matrix of the columns, transposed: ``(width, student's width)``."""
    mean: Tensor
    """``(1, 3, 1, 1)``, of values in 0..255."""
    std: Tensor
    """``(1, 3, 1, 1)``, of values in 0..255."""

    def __init__(self, model: nn.Module, preprocess: Preprocess, size: tuple[int, int]) -> None:
        """Puts scaling and normalisation before the model; the arguments are the class's.

        All is frozen and in eval mode, the model itself too: it is not copied.
        """
        super().__init__()
        self.model = model
        self.scaled = tuple(size) != tuple(preprocess.size)
        if self.scaled:
            height, width = size
            student_height, student_width = preprocess.size
            self.register_buffer("rows", _scaling(height, student_height))
            self.register_buffer("columns", _scaling(width, student_width).T.contiguous())
        mean = torch.tensor(preprocess.mean)
        std = torch.tensor(preprocess.std)
        self.register_buffer("mean", 255 * mean.view(1, -1, 1, 1))
        self.register_buffer("std", 255 * std.view(1, -1, 1, 1))
        self.eval().requires_grad_(False)

    def forward(self, pictures: Tensor) -> Tensor:
        """uint8 ``(N, H, W, 3)`` -> float32 logits ``(N, C)``, dense ``(N, C, H', W')``, features ``(N, D)``."""
        x = pictures.permute(0, 3, 1, 2).to(torch.float32)
        if self.scaled:
            # Two products: runtimes resize with antialiasing each in their own way, and all of them multiply.
            # Whole numbers after each, as the pictures of training are.
            x = x @ self.columns
            x = x.round().clamp(0, 255)
            x = self.rows @ x
            x = x.round().clamp(0, 255)
        normalised = (x - self.mean) / self.std
        return self.model(normalised)


def _scaling(before: int, after: int) -> Tensor:
    """The matrix ``(after, before)`` of an antialiased bilinear resize along one side, from ``before`` to ``after`` pixels:
    its columns are the resized unit vectors.
    """
    lit_pixels = torch.eye(before, dtype=torch.float64)[None, None]  # one a row
    scaled = F.interpolate(lit_pixels, (before, after), mode="bilinear", antialias=True)
    return scaled[0, 0].T.float().contiguous()

"""The moving average of a student's weights."""

import torch
from timm.utils import ModelEmaV3
from torch import nn


class MovingAverage(ModelEmaV3):
    """timm's average, for weights that change their device and precision after it was made.

    bfloat16 weights are averaged with stochastic rounding: a move of a thousandth would be rounded away. timm makes one
    generator for these roundings, on the CPU, where the weights are at first. That generator can't draw on a GPU, and no
    checkpoint has its state. So each update makes a new one where the weights are, seeded with the step: a resumed run
    rounds as the uninterrupted one, and all processes alike.
    """

    def update(self, model: nn.Module, step: int | None = None) -> None:
        """Moves the average towards a model's weights and buffers; buffers of whole numbers are copied.

        Called after each optimizer step, on every process.

        Args:
            model: of the same architecture.
            step: optimizer steps done, this one included. The decay is 0 at the first, then at most
                ``1 - step ** (-2/3)``, up to the full one. None: the full decay at once.
        """
        weight = next(self.module.parameters())
        if weight.dtype == torch.bfloat16:
            generator = torch.Generator(device=weight.device)
            self._sr_generator = generator.manual_seed(step or 0)
        super().update(model, step)

"""Epochs in optimizer steps: an epoch's last step takes the batches that are left."""

import math

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer

from kd.module.pace import clip
from kd.optim import Pace


@pytest.mark.parametrize(
    ("total", "per_epoch", "max_epochs", "epochs"),
    [
        (10, 2, None, 5), (9, 2, -1, 5), (100, 2, 3, 3), (4, 2, 1000, 2), (math.inf, 2, None, 1),
        (7, math.inf, None, 1), (math.inf, math.inf, 4, 4),
    ],
)  # fmt: skip
def test_the_bound_that_comes_first_ends_the_run(
    total: float, per_epoch: float, max_epochs: int | None, epochs: int
) -> None:
    assert Pace(total, per_epoch).epochs(max_epochs) == epochs


@pytest.mark.parametrize(("algorithm", "largest"), [("norm", 0.25), ("value", 0.5), (None, 0.25)])
def test_gradients_of_a_fused_optimizer_are_clipped_under_bf16_mixed(
    algorithm: str | None, largest: float
) -> None:
    """Lightning refuses both there, after the first backward pass."""
    module = LightningModule()
    module.weight = torch.nn.Parameter(torch.zeros(4))
    module.weight.grad = torch.full((4,), 3.0)
    optimizer = torch.optim.AdamW([module.weight], fused=True)
    module.trainer = Trainer(
        accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False
    )
    clip(module, optimizer, None, algorithm)
    assert module.weight.grad.max() == 3.0
    clip(module, optimizer, 0.5, algorithm)
    assert module.weight.grad.max().item() == pytest.approx(largest)

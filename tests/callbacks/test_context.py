"""What callbacks read of their run."""

import torch
from pytorch_lightning import Trainer

from kd.callbacks.context import RunContext
from kd.module.distillation import DistillationModule


def test_the_device_is_that_of_the_training_also_when_the_weights_have_left_it() -> None:
    """After its last step Lightning moves the module to the host: a GPU's run was called a CPU's in its summary."""
    trainer = Trainer(accelerator="cpu", logger=False)
    trainer.strategy._root_device = torch.device("cuda", 0)
    assert RunContext(
        trainer, DistillationModule.__new__(DistillationModule)
    ).device == torch.device("cuda", 0)

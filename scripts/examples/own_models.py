"""Your own data set, your own CNN as teacher, your own student, your own Trainer.

    python scripts/examples/own_models.py

Nothing here is a kd name but the module, the task and the loss: models, loaders and Trainer are plain PyTorch and
Lightning. Seconds on one core.
"""

import tempfile
from pathlib import Path

import torch
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import kd
from kd.optim import OptimSpec

CLASSES = 3


class Squares(Dataset[tuple[Tensor, int]]):
    """Float pictures ``(3, 24, 24)`` in 0..1: a bright square whose colour is the class, on noise."""

    def __init__(self, count: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.noise = torch.rand(count, 3, 24, 24, generator=self.generator)
        self.places = torch.randint(0, 16, (count, 2), generator=self.generator)

    def __len__(self) -> int:
        return len(self.noise)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture, (top, left), target = (
            self.noise[index].clone(),
            self.places[index],
            index % CLASSES,
        )
        picture[target, top : top + 8, left : left + 8] += 0.4
        return picture, target


def cnn(width: int) -> nn.Module:
    """Three convolutions and a linear classifier."""
    layers: list[nn.Module] = []
    for given, made in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(given, made, 3, stride=2, padding=1), nn.BatchNorm2d(made), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES)
    )


def trainer(epochs: int) -> Trainer:
    """Any Trainer will do."""
    return Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
                   enable_model_summary=False, enable_progress_bar=False)  # fmt: skip


def main() -> dict[str, float]:
    """Trains the teacher, then the student from its answers; prints and returns both accuracies."""
    torch.manual_seed(0)
    train, val = DataLoader(Squares(384, 0), 32, shuffle=True), DataLoader(Squares(96, 1), 32)
    task, found = kd.Classification(CLASSES), {}

    big = cnn(16)
    fit = trainer(6)
    fit.fit(kd.DistillationModule(big, task=task, optim=OptimSpec(lr=3e-3)), train, val)
    found["teacher"] = float(fit.callback_metrics["val/acc1"])

    small = cnn(4)
    module = kd.DistillationModule(
        small, big, task=kd.Classification(CLASSES), losses={"kd": kd.KDLoss(temperature=2.0)}, task_loss_weight=0.1,
        optim=OptimSpec(lr=1e-2),
    )  # fmt: skip
    fit = trainer(6)
    fit.fit(module, train, val)
    found |= {
        "student": float(fit.callback_metrics["val/acc1"]),
        "agreement": float(fit.callback_metrics["val/agreement"]),
    }
    with tempfile.TemporaryDirectory() as folder:
        kd.save_student(module, Path(folder) / "student.safetensors")
    print(", ".join(f"{name} {value:.1%}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()

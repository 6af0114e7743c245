"""CIFAR-100's standard table (ResNet-56 teaches ResNet-20), by the protocol of its papers; for a GPU.

    python scripts/bench/cifar.py --data data/cifar100 --row kd dkd --write

``--data`` has ``train/`` and ``test/``, a folder of 32 x 32 PNG files a class. The protocol is that of Tian et al.
(Contrastive Representation Distillation, ICLR 2020, RepDistiller): random crops of pictures padded by 4 pixels, flips,
batches of 64, SGD at 0.05 with momentum 0.9, a tenth of the rate at epochs 150, 180 and 210 of 240, weight decay 5e-4
on all parameters, temperature 4. ``--epochs 20`` runs the first 20 of these epochs: no milestone lies in them.
``--teacher FILE`` takes the papers' own ResNet-56 (RepDistiller's ``ckpt_epoch_240.pth``, 72.34 %) and trains none.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch.nn.functional as F
from harness import options, write
from torch import Tensor, nn

HERE = Path(__file__).parent

PUBLISHED = {
    "alone": 69.06,
    "kd": 70.66,
    "dkd": 71.97,
    "crd": 71.16,
}  # after 240 epochs, of the papers
MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
EPOCHS, MILESTONES = 240, (150, 180, 210)


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Identity()
        if stride > 1 or inside != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``(N, inside, H, W)`` to ``(N, width, H / stride, W / stride)``."""
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.downsample(x))


class ResNet(nn.Module):
    """He et al.'s ResNet of 6n + 2 layers for 32 x 32 pixels, widths 16, 32, 64, built and named as RepDistiller's."""

    img_size, mean, std = (32, 32), MEAN, STD

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                *(
                    Block(*(shape if i == 0 else (shape[1], shape[1], 1)))
                    for i in range((depth - 2) // 6)
                )
            )
            for shape in widths
        )
        self.fc = nn.Linear(64, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Float pictures ``(N, 3, 32, 32)`` to logits ``(N, C)``."""
        maps = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(maps.mean((2, 3)))


class CifarResNet:
    """Builder of a :class:`ResNet` (``model.student.builder=cifar.CifarResNet``)."""

    def __init__(self, depth: int = 20) -> None:
        self.depth = depth

    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> nn.Module:
        """A model of 32 x 32 pixels."""
        return ResNet(self.depth, num_classes)


def recipe(data: Path, depth: int) -> dict:
    """The protocol, without a teacher."""
    return {
        "recipe": "cifar",
        "data": {
            "source": {"class_path": "ImageFolder", "init_args": {"root": str(data.resolve())}},
            "img_size": 32, "batch_size": 64, "crop_ratio": 1.0,
            "augment": {"pad": 4, "hflip": 0.5},
        },
        "model": {"student": {"builder": {"class_path": "cifar.CifarResNet", "init_args": {"depth": depth}}}},
        "optim": {
            "name": "momentum", "lr": 0.05, "weight_decay": 5e-4, "decay_norm_and_bias": True, "warmup_epochs": 0,
            "schedule": "steps", "milestones": list(MILESTONES),
        },
        "trainer": {"precision": "32-true", "gradient_clip_val": None},
    }  # fmt: skip


LOSSES: dict[str, tuple[float, dict]] = {  # weight of the labels, losses beside them
    "alone": (1.0, {}),
    "kd": (0.1, {"kd": {"class_path": "KDLoss", "init_args": {"temperature": 4.0, "weight": 0.9}}}),
    "dkd": (1.0, {"dkd": {"class_path": "DKDLoss", "init_args": {"temperature": 4.0, "alpha": 1.0, "beta": 8.0,
                                                                 "warmup_epochs": 20}}}),
    "crd": (1.0, {"crd": {"class_path": "CRDLoss", "init_args": {"weight": 0.8}}}),
}  # fmt: skip


def train(name: str, made: dict, asked: argparse.Namespace, seed: int) -> dict:
    """A run of ``kd-train``, or the finished one: its summary."""
    folder = asked.runs / "cifar" / f"{name}-{asked.epochs}-{seed}"
    if not (folder / "summary.json").is_file():
        asked.runs.mkdir(parents=True, exist_ok=True)
        file = asked.runs / f"{name}.yaml"
        file.write_text(json.dumps(made))
        own = [
            f"trainer.max_epochs={asked.epochs}",
            f"seed={seed}",
            f"name={folder.name}",
            f"runs_dir={asked.runs}",
        ]
        path = {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
        command = [
            sys.executable,
            "-m",
            "kd.cli",
            "--trust",
            f"recipe={file.resolve()}",
            *own,
            *asked.set,
        ]
        subprocess.run(command, check=True,
                       env={**os.environ, **path})  # fmt: skip
    return json.loads((folder / "summary.json").read_text())


def main() -> None:
    """Trains teacher and rows that are not there yet, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--row", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", nargs="*", default=[], help="settings for all runs")
    parser.add_argument(
        "--teacher", type=Path, help="weights of a ResNet-56, in RepDistiller's names"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/cifar"))
    asked = options(parser)
    taught, file = None, asked.teacher
    if file is None:
        taught = train("teacher", recipe(asked.data, 56), asked, 0)["student"]
        file = asked.runs / "cifar" / f"teacher-{asked.epochs}-0" / "student.safetensors"
    found: dict[str, list[float]] = {}
    for seed in asked.seeds:
        for name in asked.row:
            made, (labels, losses) = recipe(asked.data, 20), LOSSES[name]
            if losses:
                builder = {"class_path": "cifar.CifarResNet", "init_args": {"depth": 56}}
                made["model"] |= {
                    "teacher": {"builder": builder, "checkpoint": str(file.resolve())}
                }
                made["model"] |= {"distill_losses": losses, "task_loss_weight": labels}
                if name == "crd":
                    made["model"]["taps"] = {
                        "crd": {"student": "prelogits", "teacher": "prelogits"}
                    }
            summary = train(name, made, asked, seed)
            taught = summary.get("teacher") or taught
            found.setdefault(name, []).append(100 * summary["student"]["val"]["acc1"])
    known = f"{100 * taught['val']['acc1']:.2f} %" if taught else "not measured"
    lines = [f"{asked.epochs} epochs, seeds {asked.seeds}; teacher ResNet-56: {known}.", "",
             "| ResNet-20 | last epoch | published, 240 epochs |", "|---|---|---|"]  # fmt: skip
    for name, values in found.items():
        lines.append(f"| {name} | {statistics.mean(values):.2f} | {PUBLISHED[name]:.2f} |")
    write(
        "cifar", asked.hardware, asked.date, "CIFAR-100, ResNet-56 to ResNet-20", lines, asked.write
    )


if __name__ == "__main__":
    main()

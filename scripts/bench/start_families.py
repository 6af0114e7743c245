"""The start in closed form, family by family: accuracy before the first step and after, against two other starts.

For each family a teacher is trained here, on FoodTag-mini (20 classes, 32 px, drawn). A student of a quarter of its
parameters then begins in three ways: at random; with the first layers and evenly spaced channels of the teacher's weights
(Xu et al., Initializing Models with Larger Ones, ICLR 2024); with kd's start. Each is trained twice: by labels alone, and
by labels and the teacher in equal parts.

    python scripts/bench/start_families.py rotary siglip convnext resnet --seeds 0 1 2 --write
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
from harness import mean_of, options, table, write
from torch import Tensor, nn

from kd.distill.inherit import inherit_together
from kd.losses import kd_loss
from kd.models import Preprocess

SIDE = 32
INPUT = Preprocess(SIDE, (0.5,) * 3, (0.25,) * 3)
BATCH = 64
TEACHER_EPOCHS = {"plain": 7, "rotary": 7, "siglip": 7, "convnext": 5, "resnet": 5, "bottleneck": 5}
"""Transformers learn more slowly from few pictures."""
STARTS = ("random", "selected weights", "kd")
RATES = {"random": 2e-3, "selected weights": 2e-3, "kd": 5e-4}
"""The highest learning rate, by start: a student that begins near its teacher is trained more gently."""
Family = tuple[str, dict[str, Any], dict[str, Any]]


def vits(arch: str, **more: Any) -> Family:
    """Transformers of four blocks, the student half as wide."""
    shape = {"img_size": SIDE, "patch_size": 8, "depth": 4, **more}
    teacher = {**shape, "embed_dim": 128, "num_heads": 4}
    return arch, teacher, {**shape, "embed_dim": 64, "num_heads": 2}


NEXT = {"patch_size": 4, "depths": (2, 2, 4, 2), "ls_init_value": 0.1}
FAMILIES: dict[str, Family] = {
    "plain": vits("vit_tiny_patch16_224"),
    "rotary": vits("vit_small_patch16_dinov3", init_values=1.0),
    "siglip": vits("vit_base_patch16_siglip_224"),
    "convnext": (
        "convnext_atto",
        {**NEXT, "dims": (32, 64, 96, 128)},
        {**NEXT, "dims": (16, 32, 48, 64)},
    ),
    "resnet": ("resnet18", {"channels": (32, 64, 96, 128)}, {"channels": (16, 32, 48, 64)}),
    "bottleneck": ("resnet26", {"channels": (16, 32, 48, 64)}, {"channels": (8, 16, 24, 32)}),
}
"""timm's name, the teacher's arguments, the student's."""


def build(family: str, of_teacher: bool, seed: int, classes: int) -> Any:
    """A model with random weights."""
    torch.manual_seed(seed)
    arch, big, small = FAMILIES[family]
    return timm.create_model(arch, num_classes=classes, **(big if of_teacher else small))


def drawn_pictures(split: str, most: int) -> tuple[Tensor, Tensor]:
    """Pictures of FoodTag-mini, uint8 ``(N, 3, 32, 32)``, and their classes ``(N,)``."""
    from kd.data.datamodule import DistillationDataModule
    from kd.data.sources import FoodTagMini

    data = DistillationDataModule(FoodTagMini(), img_size=SIDE, crop_ratio=1.0, num_workers=0)
    data.prepare_data()
    data.setup("fit")
    if split == "train":
        pairs = list(data.sample(most, True))
        return torch.stack([picture for picture, _ in pairs]), torch.tensor([y for _, y in pairs])
    pictures, targets = [], []
    for batch in data.val_dataloader():
        pictures.append(batch["image"])
        targets.append(batch["target"])
    return torch.cat(pictures), torch.cat(targets)


def train(
    model: Any,
    pictures: Tensor,
    targets: Tensor,
    epochs: int,
    lr: float,
    seed: int,
    answers: Tensor | None = None,
) -> Iterator[int]:
    """Trains by labels, and by a teacher in equal parts if there is one; gives the number of each epoch done.

    Args:
        model: any classifier.
        pictures: uint8 ``(N, 3, H, W)``; a batch is mirrored as a whole, or not.
        targets: classes, ``(N,)``.
        epochs: how many.
        lr: the highest learning rate.
        seed: of the order of pictures, and of mirroring.
        answers: the teacher's logits of the pictures as they are and mirrored, ``(2, N, C)``.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    steps = epochs * (len(pictures) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    mirroring = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        model.train()
        shuffling = torch.Generator().manual_seed(seed * 1000 + epoch)
        order = torch.randperm(len(pictures), generator=shuffling)
        for rows in order[: len(pictures) // BATCH * BATCH].split(BATCH):
            is_mirrored = int(torch.rand(1, generator=mirroring) < 0.5)
            images = INPUT(pictures[rows])
            if is_mirrored:
                images = images.flip(3)
            logits = model(images)
            loss = nn.functional.cross_entropy(logits, targets[rows])
            if answers is not None:
                loss = 0.5 * loss + 0.5 * kd_loss(logits, answers[is_mirrored][rows], 2.0)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        yield epoch + 1


@torch.no_grad()
def accuracy(model: Any, pictures: Tensor, targets: Tensor) -> float:
    """Per cent of the pictures that a model names."""
    model.eval()
    right = 0
    for part, classes in zip(pictures.split(256), targets.split(256), strict=True):
        right += int((model(INPUT(part)).argmax(1) == classes).sum())
    return 100 * right / len(pictures)


@torch.no_grad()
def answers_of(teacher: Any, pictures: Tensor) -> Tensor:
    """A teacher's logits of pictures as they are and mirrored, ``(2, N, C)``."""
    teacher.eval()
    plain, mirrored = [], []
    for part in pictures.split(256):
        images = INPUT(part)
        plain.append(teacher(images))
        mirrored.append(teacher(images.flip(3)))
    return torch.stack([torch.cat(plain), torch.cat(mirrored)])


def selected_weights(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights picked from a larger model's: its first blocks, evenly spaced channels of each tensor (Xu et al., 2024).

    Args:
        own: the student's; a tensor of it stays where the teacher has none of that name and number of axes.
        given: the teacher's.
    """
    chosen = {}
    for name, tensor in own.items():
        picked = given.get(name, tensor)
        if picked.ndim != tensor.ndim:
            picked = tensor
        for axis, length in enumerate(tensor.shape):
            places = torch.linspace(0, picked.shape[axis] - 1, length).round().long()
            picked = picked.index_select(axis, places)
        chosen[name] = picked.contiguous()
    return chosen


def trained_teacher(
    family: str, seed: int, epochs: int, folder: Path, drawn: tuple[Tensor, ...]
) -> Any:
    """A teacher that is trained by labels, or read where it was trained before."""
    pictures, targets = drawn
    teacher = build(family, True, seed, int(targets.max()) + 1)
    file = folder / f"{family}_{seed}_{epochs}_{len(pictures)}.pt"
    if file.exists():
        teacher.load_state_dict(torch.load(file))
        return teacher.eval()
    for _ in train(teacher, pictures, targets, epochs, 2e-3, seed):
        pass
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(teacher.state_dict(), file)
    return teacher.eval()


def started_student(family: str, start: str, seed: int, teacher: Any, sample: Tensor) -> Any:
    """A student before its first step.

    Args:
        family: of :data:`FAMILIES`.
        start: of :data:`STARTS`.
        seed: of its random weights.
        teacher: of the family.
        sample: pictures for kd's start, uint8 ``(N, 3, H, W)``.
    """
    student = build(family, False, seed + 100, teacher.num_classes)
    if start == "selected weights":
        student.load_state_dict(selected_weights(student.state_dict(), teacher.state_dict()))
    elif start == "kd":
        inherit_together([(student, INPUT)], teacher, sample, INPUT)
    return student


def measured(asked: argparse.Namespace) -> dict[tuple[str, str], list[list[float]]]:
    """By family and start, for each seed: accuracy of the teacher, of the student before its first step, and after one
    epoch and all, by labels, then by labels and the teacher's answers.
    """
    drawn = drawn_pictures("train", max(asked.pictures, asked.teacher_pictures))
    held_out = drawn_pictures("val", 0)
    pictures, targets = (each[: asked.pictures] for each in drawn)
    of_teacher = tuple(each[: asked.teacher_pictures] for each in drawn)
    found: dict[tuple[str, str], list[list[float]]] = {}
    for seed, family in product(asked.seeds, asked.families):
        epochs = asked.teacher_epochs or TEACHER_EPOCHS[family]
        teacher = trained_teacher(family, seed, epochs, Path(asked.teachers), of_teacher)
        answers = answers_of(teacher, pictures)
        for start in STARTS:
            student = started_student(family, start, seed, teacher, pictures[: asked.sample])
            first_weights = {name: value.clone() for name, value in student.state_dict().items()}
            cells = [accuracy(teacher, *held_out), accuracy(student, *held_out)]
            for taught in (None, answers):
                student.load_state_dict(first_weights)
                way = train(student, pictures, targets, asked.epochs, RATES[start], seed, taught)
                for epoch in way:
                    if epoch in (1, asked.epochs):
                        cells.append(accuracy(student, *held_out))
            found.setdefault((family, start), []).append(cells)
            print(family, start, seed, cells, flush=True)
    return found


def parameters(family: str) -> str:
    """Millions of the teacher's and of the student's."""
    counts = []
    for of_teacher in (True, False):
        model = build(family, of_teacher, 0, 20)
        counts.append(sum(parameter.numel() for parameter in model.parameters()) / 1e6)
    return f"{counts[0]:.2f} M, {counts[1]:.2f} M"


def main() -> None:
    """Prints a table, and writes it with ``--write``."""
    asked = options(
        __doc__,
        "families...",
        pictures=600,
        teacher_pictures=2000,
        teacher_epochs=0,
        epochs=5,
        sample=600,
        seeds=[0, 1, 2],
        teachers="/tmp/start_families",
    )
    torch.set_num_threads(1)
    rows = []
    for (family, start), seeds in measured(asked).items():
        teacher, *cells = (mean_of(values) for values in zip(*seeds, strict=True))
        rows.append([f"{family} ({parameters(family)})", teacher, start, *cells])
    columns = ["family (parameters)", "teacher", "start", "before the first step"]
    for way, epoch in product(("labels", "teacher"), sorted({1, asked.epochs})):
        columns.append(f"{way}: epoch {epoch}")
    lines = [f"Accuracy %, mean ± standard deviation over seeds {asked.seeds}.", ""]
    write(asked, "start_families", "The start, family by family", lines + table(columns, rows))


if __name__ == "__main__":
    main()

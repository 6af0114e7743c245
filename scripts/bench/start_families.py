"""The start in closed form, family by family: accuracy before the first step and after, against two other starts.

For each family a teacher is trained here, on FoodTag-mini (20 classes, 32 px, drawn). A student of a quarter of its
parameters then begins in three ways: at random; with the first layers and evenly spaced channels of the teacher's weights
(Xu et al., Initializing Models with Larger Ones, ICLR 2024); with kd's start. Each is trained alike, by labels and by
the teacher.

    python scripts/bench/start_families.py resnet convnext rotary siglip --write
"""

import argparse
import copy
import datetime
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from kd.distill.inherit import inherit_together
from kd.losses.functional import kd_loss
from kd.models import Preprocess

SIDE = 32
INPUT = Preprocess(SIDE, (0.5,) * 3, (0.25,) * 3)
BATCH = 64
VIT = {"img_size": SIDE, "patch_size": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": (
        "vit_tiny_patch16_224",
        {**VIT, "embed_dim": 128, "depth": 4, "num_heads": 4},
        {**VIT, "embed_dim": 64, "depth": 4, "num_heads": 2},
    ),
    "rotary": (
        "vit_small_patch16_dinov3",
        {**VIT, "embed_dim": 128, "depth": 4, "num_heads": 4, "init_values": 1.0},
        {**VIT, "embed_dim": 64, "depth": 4, "num_heads": 2, "init_values": 1.0},
    ),
    "siglip": (
        "vit_base_patch16_siglip_224",
        {**VIT, "embed_dim": 128, "depth": 4, "num_heads": 4},
        {**VIT, "embed_dim": 64, "depth": 4, "num_heads": 2},
    ),
    "convnext": (
        "convnext_atto",
        {"patch_size": 2, "depths": (2, 2, 4, 2), "dims": (32, 64, 96, 128), "ls_init_value": 0.1},
        {"patch_size": 2, "depths": (2, 2, 4, 2), "dims": (16, 32, 48, 64), "ls_init_value": 0.1},
    ),
    "resnet": (
        "resnet18",
        {"channels": (32, 64, 96, 128)},
        {"channels": (16, 32, 48, 64)},
    ),
    "bottleneck": (
        "resnet26",
        {"channels": (16, 32, 48, 64)},
        {"channels": (8, 16, 24, 32)},
    ),
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


def batches(count: int, seed: int) -> Iterator[Tensor]:
    """Numbers of pictures of one epoch, shuffled, in whole batches."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for first in range(0, count - BATCH + 1, BATCH):
        yield order[first : first + BATCH]


def train(
    model: Any,
    pictures: Tensor,
    targets: Tensor,
    epochs: int,
    lr: float,
    seed: int,
    teacher: Any = None,
) -> Iterator[int]:
    """Trains by labels, and by a teacher in equal parts if there is one; gives the number of each epoch done."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    steps = epochs * (len(pictures) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for epoch in range(epochs):
        model.train()
        for rows in batches(len(pictures), seed * 1000 + epoch):
            images = INPUT(pictures[rows])
            if torch.rand(1) < 0.5:
                images = images.flip(3)
            logits = model(images)
            loss = nn.functional.cross_entropy(logits, targets[rows])
            if teacher is not None:
                with torch.no_grad():
                    answers = teacher(images)
                loss = 0.5 * loss + 0.5 * kd_loss(logits, answers, 2.0)
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


def select_weights(student: Any, teacher: Any) -> None:
    """The first layers and evenly spaced channels of the teacher's (Xu et al., 2024)."""
    given = teacher.state_dict()
    chosen = {}
    for name, own in student.state_dict().items():
        big = given[name]
        for axis, length in enumerate(own.shape):
            places = torch.linspace(0, big.shape[axis] - 1, length).round().long()
            big = big.index_select(axis, places)
        chosen[name] = big
    student.load_state_dict(chosen)


def main() -> None:
    """Prints a table, and writes it with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+", choices=FAMILIES)
    parser.add_argument("--pictures", type=int, default=6000)
    parser.add_argument("--teacher_epochs", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sample", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teachers", default="/tmp/start_families")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    pictures, targets = drawn_pictures("train", chosen.pictures)
    held_out = drawn_pictures("val", 0)
    classes = int(targets.max()) + 1
    shown = sorted({1, chosen.epochs})
    after = " | ".join(f"after epoch {epoch}" for epoch in shown)
    lines = [
        f"| family (parameters) | teacher | start | before the first step | {after} |",
        "|---" * (4 + len(shown)) + "|",
    ]
    for family in chosen.families:
        teacher = build(family, True, chosen.seed, classes)
        file = Path(chosen.teachers) / f"{family}_{chosen.seed}_{chosen.teacher_epochs}.pt"
        if file.exists():
            teacher.load_state_dict(torch.load(file))
        else:
            for epoch in train(
                teacher, pictures, targets, chosen.teacher_epochs, 2e-3, chosen.seed
            ):
                print(family, "teacher", epoch, accuracy(teacher, *held_out), flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(teacher.state_dict(), file)
        best = accuracy(teacher, *held_out)
        for start in ("random", "selected weights", "kd"):
            student = build(family, False, chosen.seed + 1, classes)
            began = time.perf_counter()
            if start == "selected weights":
                select_weights(student, teacher)
            elif start == "kd":
                inherit_together([(student, INPUT)], teacher, pictures[: chosen.sample], INPUT)
            seconds = time.perf_counter() - began
            points = [accuracy(student, *held_out)]
            print(
                family, start, f"{points[0]:.1f} before the first step, {seconds:.0f} s", flush=True
            )
            rate = 5e-4 if start == "kd" else 2e-3
            answering = copy.deepcopy(teacher).eval()
            for epoch in train(
                student, pictures, targets, chosen.epochs, rate, chosen.seed, answering
            ):
                if epoch in shown:
                    points.append(accuracy(student, *held_out))
                    print(family, start, epoch, f"{points[-1]:.1f}", flush=True)
            sizes = [
                sum(p.numel() for p in model.parameters()) / 1e6 for model in (teacher, student)
            ]
            values = " | ".join(f"{point:.1f}" for point in points)
            name = f"{family} ({sizes[0]:.2f} M, {sizes[1]:.2f} M)"
            lines.append(f"| {name} | {best:.1f} | {start} | {values} |")
    text = "\n".join(lines)
    print(text)
    if chosen.write:
        today = datetime.date.today().isoformat()
        Path(__file__).with_name(f"start_families_cpu_{today}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()

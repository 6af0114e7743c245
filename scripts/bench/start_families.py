"""The start in closed form, family by family: accuracy before the first step and after, against two other starts.

For each family a teacher is trained here, on FoodTag-mini (20 classes, 32 px, drawn). A student of a quarter of its
parameters then begins in three ways: at random; with the first layers and evenly spaced channels of the teacher's weights
(Xu et al., Initializing Models with Larger Ones, ICLR 2024); with kd's start. Each is trained twice: by labels alone, and
by labels and the teacher in equal parts.

    python scripts/bench/start_families.py rotary siglip convnext resnet --seeds 0 1 2 --write
"""

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from kd.distill.inherit import inherit_together
from kd.losses import kd_loss
from kd.models import Preprocess

SIDE = 32
INPUT = Preprocess(SIDE, (0.5,) * 3, (0.25,) * 3)
BATCH = 64
VIT = {"img_size": SIDE, "patch_size": 8}
TEACHER_EPOCHS = {"plain": 7, "rotary": 7, "siglip": 7, "convnext": 5, "resnet": 5, "bottleneck": 5}
"""Transformers learn more slowly from few pictures."""
STARTS = ("random", "selected weights", "kd")
RATES = {"random": 2e-3, "selected weights": 2e-3, "kd": 5e-4}
"""The highest learning rate, by start: a student that begins near its teacher is trained more gently."""
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
        {"patch_size": 4, "depths": (2, 2, 4, 2), "dims": (32, 64, 96, 128), "ls_init_value": 0.1},
        {"patch_size": 4, "depths": (2, 2, 4, 2), "dims": (16, 32, 48, 64), "ls_init_value": 0.1},
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
        for rows in batches(len(pictures), seed * 1000 + epoch):
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
        select_weights(student, teacher)
    elif start == "kd":
        inherit_together([(student, INPUT)], teacher, sample, INPUT)
    return student


def measured(
    families: Sequence[str],
    seeds: Iterable[int],
    chosen: argparse.Namespace,
    done: Container[tuple[str, int, str]],
) -> Iterator[dict[str, Any]]:
    """One record for each seed, family and start that is not done yet."""
    drawn = drawn_pictures("train", max(chosen.pictures, chosen.teacher_pictures))
    held_out = drawn_pictures("val", 0)
    of_teacher = tuple(each[: chosen.teacher_pictures] for each in drawn)
    pictures, targets = (each[: chosen.pictures] for each in drawn)
    for seed in seeds:
        for family in families:
            left = [start for start in STARTS if (family, seed, start) not in done]
            if not left:
                continue
            teacher_epochs = chosen.teacher_epochs or TEACHER_EPOCHS[family]
            folder = Path(chosen.teachers)
            teacher = trained_teacher(family, seed, teacher_epochs, folder, of_teacher)
            best = accuracy(teacher, *held_out)
            answers = answers_of(teacher, pictures)
            for start in left:
                began = time.perf_counter()
                student = started_student(family, start, seed, teacher, pictures[: chosen.sample])
                seconds = time.perf_counter() - began
                accuracies = trained_both_ways(
                    student,
                    drawn=(pictures, targets),
                    held_out=held_out,
                    answers=answers,
                    epochs=chosen.epochs,
                    rate=RATES[start],
                    seed=seed,
                )
                yield {
                    "family": family,
                    "parameters": [parameters(teacher), parameters(student)],
                    "seed": seed,
                    "teacher": best,
                    "start": start,
                    "seconds": seconds,
                    "accuracy": accuracies,
                }


def trained_both_ways(
    student: Any,
    *,
    drawn: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    answers: Tensor,
    epochs: int,
    rate: float,
    seed: int,
) -> dict[str, dict[int, float]]:
    """Accuracy by number of epochs (0, 1 and all), trained by labels, and by labels and the teacher's answers."""
    first_weights = {name: value.clone() for name, value in student.state_dict().items()}
    before = accuracy(student, *held_out)
    accuracies = {}
    for way, taught in (("labels", None), ("teacher", answers)):
        student.load_state_dict(first_weights)
        points = {0: before}
        for epoch in train(student, *drawn, epochs, rate, seed, taught):
            if epoch in (1, epochs):
                points[epoch] = accuracy(student, *held_out)
        accuracies[way] = points
    return accuracies


def parameters(model: nn.Module) -> float:
    """Millions of them."""
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def spread(values: Iterable[float]) -> str:
    """Mean of some seeds, and the deviation of one."""
    numbers = list(values)
    if len(numbers) == 1:
        return f"{numbers[0]:.1f}"
    return f"{statistics.mean(numbers):.1f} ± {statistics.stdev(numbers):.1f}"


def table(records: Iterable[dict[str, Any]]) -> str:
    """Markdown: a row for each family and start, of all its seeds."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        rows.setdefault((record["family"], record["start"]), []).append(record)
    ways = ("labels", "teacher")
    first = next(iter(rows.values()))[0]
    epochs = list(first["accuracy"]["labels"])[1:]
    columns = ["family (parameters)", "teacher", "start", "before the first step"]
    for way in ways:
        columns += [f"{way}: epoch {epoch}" for epoch in epochs]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (family, start), group in rows.items():
        big, small = group[0]["parameters"]
        cells = [f"{family} ({big:.2f} M, {small:.2f} M)"]
        cells.append(spread(record["teacher"] for record in group))
        cells.append(start)
        cells.append(spread(record["accuracy"]["labels"]["0"] for record in group))
        for way in ways:
            for epoch in epochs:
                cells.append(spread(record["accuracy"][way][epoch] for record in group))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints a table, and writes it with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+", choices=FAMILIES)
    parser.add_argument("--pictures", type=int, default=600)
    parser.add_argument("--teacher_pictures", type=int, default=2000)
    parser.add_argument("--teacher_epochs", type=int, help="default: 7 of transformers, 5 of CNNs")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sample", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--teachers", default="/tmp/start_families", help="folder of teachers")
    parser.add_argument("--records", help="a file of JSON lines that results are added to")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    if chosen.records and Path(chosen.records).exists():
        for line in Path(chosen.records).read_text().splitlines():
            records.append(json.loads(line))
    done = {(record["family"], record["seed"], record["start"]) for record in records}
    for record in measured(chosen.families, chosen.seeds, chosen, done):
        line = json.dumps(record)
        print(line, flush=True)
        records.append(json.loads(line))
        if chosen.records:
            with Path(chosen.records).open("a") as file:
                file.write(f"{line}\n")
    text = table(records)
    print(text)
    if chosen.write:
        today = datetime.date.today().isoformat()
        Path(__file__).with_name(f"start_families_cpu_{today}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()

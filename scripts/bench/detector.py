"""A detector's backbone from pictures without boxes: what it is worth after equal steps.

    python scripts/bench/detector.py --data BCCD_Dataset --teacher dinov2.safetensors --work DIR --write

``--data`` is the folder of the public repository Shenggan/BCCD_Dataset (364 pictures of blood cells, three kinds, MIT),
``--teacher`` a weights file of DINOv2's ViT-S/14. The parts are commands that a user types, then torchvision alone:

1. ``kd-train recipe=detector_backbone`` on the training and validation pictures, without their boxes.
2. ``kd-export to=backbone``, whose ``torchvision.safetensors`` torchvision's own detector loads.
3. FasterRCNN (MobileNetV3-Large, 320 px) from a random and from the distilled backbone: equal steps, equal batches,
   equal heads, all layers trained. mAP on the test pictures, which nothing else has seen, by torchmetrics.

Needs pycocotools, for torchmetrics.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from harness import options as harness_options
from harness import write
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.detection import MeanAveragePrecision
from torchvision.io import ImageReadMode, read_image
from torchvision.models import detection

KINDS = ("WBC", "RBC", "Platelets")
"""The boxes' classes; their numbers begin at 1, as torchvision's do."""

STUDENT = "mobilenetv3_large_100"
Sample = tuple[Tensor, dict[str, Tensor]]


class BloodCells(Dataset):
    """Pictures ``(3, H, W)`` in 0..1, with ``boxes`` ``(N, 4)`` in pixels and ``labels`` ``(N,)``.

    Args:
        root: the repository's folder.
        split: ``train``, ``val``, ``trainval`` or ``test``.
    """

    def __init__(self, root: Path, split: str) -> None:
        self.folder = root / "BCCD"
        names = (self.folder / "ImageSets" / "Main" / f"{split}.txt").read_text()
        self.names = names.split()

    def __len__(self) -> int:
        return len(self.names)

    def picture(self, number: int) -> Path:
        """The file of one picture."""
        return self.folder / "JPEGImages" / f"{self.names[number]}.jpg"

    def __getitem__(self, number: int) -> Sample:
        pixels_3HW = read_image(str(self.picture(number)), ImageReadMode.RGB)
        tree = ElementTree.parse(self.folder / "Annotations" / f"{self.names[number]}.xml")
        boxes = []
        labels = []
        for thing in tree.iter("object"):
            sides = []
            for side in ("xmin", "ymin", "xmax", "ymax"):
                sides.append(float(thing.findtext(f"bndbox/{side}", "")))
            if sides[0] >= sides[2] or sides[1] >= sides[3]:
                continue  # three boxes of the set are empty
            boxes.append(sides)
            labels.append(1 + KINDS.index(thing.findtext("name", "")))
        target = {"boxes": torch.tensor(boxes).view(-1, 4), "labels": torch.tensor(labels)}
        return pixels_3HW / 255, target


def in_lists(samples: Sequence[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """torchvision's detectors take lists, because pictures differ in size."""
    pictures, targets = zip(*samples, strict=True)
    return list(pictures), list(targets)


def command(name: str, *items: str) -> None:
    """Runs a command of kd in a process of its own."""
    program = f"import sys; from kd.cli import main; sys.exit(main({name!r}, sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", program, *items], check=True)


def distilled_backbone(options: argparse.Namespace) -> Path:
    """``torchvision.safetensors`` of a student that learned from the pictures without their boxes."""
    pictures = options.work / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    cells = BloodCells(options.data, "trainval")
    for number in range(len(cells)):
        file = cells.picture(number)
        (pictures / file.name).write_bytes(file.read_bytes())
    out = options.work / "backbone"
    if not (out / "torchvision.safetensors").is_file():
        sizes = [
            f"{part}.img_size={options.side}"
            for part in ("data", "model.student", "model.teachers.dino")
        ]
        command(
            "train",
            "recipe=detector_backbone",
            f"data.source.root={pictures}",
            f"model.teachers.dino.checkpoint={options.teacher}",
            f"model.student.arch={STUDENT}",
            *sizes,
            "model.teachers.dino.cache=on",
            f"model.teachers.dino.cache_views={options.views}",
            f"data.batch_size={options.views_batch}",
            f"trainer.max_epochs={options.epochs}",
            "optim.warmup_epochs=0.5",
            "data.num_workers=0",
            f"seed={options.seed}",
            f"runs_dir={options.work}",
            "name=distilled",
        )
        run = options.work / "detector_backbone" / "distilled"
        command("export", str(run), "to=backbone", f"out={out}")
    return out / "torchvision.safetensors"


def detector(options: argparse.Namespace, backbone: Path | None) -> nn.Module:
    """FasterRCNN at 320 px; the same seed draws the same heads, whatever the backbone."""
    torch.manual_seed(options.seed)
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=1 + len(KINDS),
        box_batch_size_per_image=options.proposals,
    )
    if backbone is not None:
        model.backbone.body.load_state_dict(load_file(backbone), strict=True)
    return model


def train(model: nn.Module, cells: BloodCells, options: argparse.Namespace) -> float:
    """Trains every layer for ``options.steps`` steps; the mean loss of the last twenty."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps)
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(
        cells, options.batch, shuffle=True, collate_fn=in_lists, drop_last=True, generator=order
    )
    model.train()
    losses: list[float] = []
    while len(losses) < options.steps:
        for pictures, targets in loader:
            terms = model(pictures, targets)
            loss = torch.stack(list(terms.values())).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if len(losses) == options.steps:
                break
    last = losses[-20:]
    return sum(last) / len(last)


@torch.no_grad()
def score(model: nn.Module, cells: BloodCells) -> dict[str, float]:
    """``map50`` and ``map`` (IoU 0.50 to 0.95) in per cent."""
    metric = MeanAveragePrecision()
    model.eval()
    for pictures, targets in DataLoader(cells, 8, collate_fn=in_lists):
        metric.update(model(pictures), targets)
    values = metric.compute()
    return {"map50": 100 * float(values["map_50"]), "map": 100 * float(values["map"])}


def main() -> None:
    """Prints and writes a row for each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=30, help="of the distillation")
    parser.add_argument("--side", type=int, default=168, help="pixels of its views, 14 to a patch")
    parser.add_argument("--views", type=int, default=4, help="of each picture")
    parser.add_argument("--views-batch", type=int, default=32, help="views in a step of it")
    parser.add_argument("--steps", type=int, default=300, help="of each detector")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--proposals", type=int, default=64, help="a picture, in the head's loss")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", nargs="+", default=["random", "distilled"])
    options = harness_options(parser)
    torch.set_num_threads(1)

    test = BloodCells(options.data, "test")
    rows: dict[str, Any] = {}
    for start in options.starts:
        backbone = distilled_backbone(options) if start == "distilled" else None
        model = detector(options, backbone)
        before = time.process_time()
        loss = train(model, BloodCells(options.data, "trainval"), options)
        seconds = time.process_time() - before
        rows[start] = {**score(model, test), "loss": loss, "cpu_s": seconds}
        print(json.dumps({start: rows[start]}), flush=True)
    lines = ["| backbone | mAP50 % | mAP50-95 % | last loss | CPU s |", "|---|---|---|---|---|"]
    for start, row in rows.items():
        numbers = f"{row['map50']:.1f} | {row['map']:.1f} | {row['loss']:.2f} | {row['cpu_s']:.0f}"
        lines.append(f"| {start} | {numbers} |")
    title = (
        f"BCCD: {options.epochs} epochs of distillation at {options.side} px, then {options.steps} steps "
        f"of {options.batch} pictures, seed {options.seed}"
    )
    write("detector", options.hardware, options.date, title, lines, options.write)


if __name__ == "__main__":
    main()

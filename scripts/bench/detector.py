"""A detector's backbone from pictures without boxes: what it is worth after equal steps.

    python scripts/bench/detector.py --data BCCD_Dataset --teacher dinov2.safetensors --work DIR --write

``--data`` is the folder of the public repository Shenggan/BCCD_Dataset (364 pictures of blood cells, three kinds, MIT),
``--teacher`` a weights file of DINOv2's ViT-S/14. The parts are commands that a user types, then torchvision alone:

1. ``kd-train recipe=detector_backbone`` on the training and validation pictures, without their boxes.
2. ``kd-export to=backbone``, whose ``torchvision.safetensors`` torchvision's own detector loads.
3. FasterRCNN (MobileNetV3-Large, 320 px) from a random and from the distilled backbone: equal steps, equal batches,
   equal heads, all layers trained; one detector for each seed. ``--frozen`` trains the head alone, on the features as
   they are. mAP on the test pictures, which nothing else has seen, by torchmetrics.

The same command resumes: an interrupted distillation goes on from its checkpoint, and a detector whose row is in
``DIR/rows.jsonl`` is not trained again. Calls with other ``--seeds`` or ``--starts`` may share ``DIR`` at the same time,
once the backbone has been exported.

Needs pycocotools, for torchmetrics.
"""

import argparse
import hashlib
import json
import math
import statistics
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
        run = options.work / "detector_backbone" / "distilled"
        if (run / "checkpoints" / "last.ckpt").is_file():
            command("train", f"resume={run}")
        else:
            command("train", *distillation(options, pictures))
        command("export", str(run), "to=backbone", f"out={out}")
    return out / "torchvision.safetensors"


def distillation(options: argparse.Namespace, pictures: Path) -> list[str]:
    """What a user types after ``kd-train``."""
    sizes = []
    for part in ("data", "model.student", "model.teachers.dino"):
        sizes.append(f"{part}.img_size={options.side}")
    return [
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
        "seed=0",
        f"runs_dir={options.work}",
        "name=distilled",
    ]


def detector(options: argparse.Namespace, seed: int, backbone: Path | None) -> nn.Module:
    """FasterRCNN at 320 px; the same seed draws the same heads, whatever the backbone."""
    torch.manual_seed(seed)
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=1 + len(KINDS),
        box_batch_size_per_image=options.proposals,
    )
    if backbone is not None:
        model.backbone.body.load_state_dict(load_file(backbone), strict=True)
    return model


def train(model: nn.Module, cells: BloodCells, options: argparse.Namespace, seed: int) -> float:
    """Trains the detector for ``options.steps`` steps; the mean loss of the last twenty."""
    model.train()
    if options.frozen:
        model.backbone.body.requires_grad_(False).eval()
    trained = [weights for weights in model.parameters() if weights.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        cells, options.batch, shuffle=True, collate_fn=in_lists, drop_last=True, generator=order
    )
    losses: list[float] = []
    before = time.monotonic()
    while len(losses) < options.steps:
        for pictures, targets in loader:
            terms = model(pictures, targets)
            loss = torch.stack(list(terms.values())).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 10.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            done = len(losses)
            if done % 25 == 0:
                left = (time.monotonic() - before) / done * (options.steps - done)
                print(
                    f"  step {done}/{options.steps}, loss {losses[-1]:.2f}, {left:.0f} s left",
                    flush=True,
                )
            if done == options.steps:
                break
    return statistics.mean(losses[-20:])


@torch.no_grad()
def score(model: nn.Module, cells: BloodCells) -> dict[str, float]:
    """``map50`` and ``map`` (IoU 0.50 to 0.95) in per cent; ``map50`` of each class too, as ``map50_WBC``."""
    metric = MeanAveragePrecision()
    by_class = MeanAveragePrecision(iou_thresholds=[0.5], class_metrics=True)
    model.eval()
    for pictures, targets in DataLoader(cells, 8, collate_fn=in_lists):
        boxes = model(pictures)
        metric.update(boxes, targets)
        by_class.update(boxes, targets)
    values = metric.compute()
    scores = {"map50": 100 * float(values["map_50"]), "map": 100 * float(values["map"])}
    at_50 = by_class.compute()
    for number, value in zip(at_50["classes"], at_50["map_per_class"], strict=True):
        scores[f"map50_{KINDS[int(number) - 1]}"] = 100 * float(value)
    return scores


def settings(options: argparse.Namespace, backbone: Path | None) -> dict[str, Any]:
    """What a row's numbers depend on, beside its seed: a row with other settings is another row."""
    digest = "random"
    if backbone is not None:
        digest = hashlib.sha256(backbone.read_bytes()).hexdigest()[:12]
    names = ("steps", "batch", "lr", "proposals", "frozen")
    return {"backbone": digest} | {name: getattr(options, name) for name in names}


def measured(
    options: argparse.Namespace, start: str, seed: int, backbone: Path | None
) -> dict[str, Any]:
    """One detector's row: of ``rows.jsonl`` if it is there, else trained and added."""
    key = {"start": start, "seed": seed} | settings(options, backbone)
    file = options.work / "rows.jsonl"
    if file.is_file():
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if key.items() <= row.items():
                return row
    print(f"{start}, seed {seed}", flush=True)
    model = detector(options, seed, backbone)
    before = time.process_time()
    loss = train(model, BloodCells(options.data, "trainval"), options, seed)
    seconds = time.process_time() - before
    row = key | score(model, BloodCells(options.data, "test")) | {"loss": loss, "cpu_s": seconds}
    print(json.dumps(row), flush=True)
    with file.open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    return row


T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t at 97.5 %, by the number of seeds (degrees of freedom: one less)."""


def difference(better: Sequence[float], base: Sequence[float]) -> str:
    """Mean difference of pairs with equal seeds, and its 95 % interval by Student's t."""
    pairs = [x - y for x, y in zip(better, base, strict=True)]
    mean = statistics.mean(pairs)
    if len(pairs) not in T_QUANTILE:
        return f"{mean:+.1f}"
    half = T_QUANTILE[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"


def table(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """One line for each start, then the gain over the first start."""
    lines = [
        "| backbone | mAP50 % | each seed | mAP50-95 % | last loss | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for start, of_start in rows.items():
        values = {}
        for name in ("map50", "map", "loss", "cpu_s"):
            values[name] = statistics.mean(row[name] for row in of_start)
        each = ", ".join(f"{row['map50']:.1f}" for row in of_start)
        cost = f"{values['loss']:.2f} | {values['cpu_s']:.0f}"
        lines.append(f"| {start} | {values['map50']:.1f} | {each} | {values['map']:.1f} | {cost} |")
    lines += ["", f"mAP50 % of each class, mean over the seeds ({', '.join(KINDS)}):", ""]
    for start, of_start in rows.items():
        means = []
        for kind in KINDS:
            means.append(f"{statistics.mean(row[f'map50_{kind}'] for row in of_start):.1f}")
        lines.append(f"- {start}: {', '.join(means)}")
    base, *others = rows
    for start in others:
        gains = []
        for name in ("map50", "map"):
            gains.append(
                difference([row[name] for row in rows[start]], [row[name] for row in rows[base]])
            )
        lines += [
            "",
            f"{start} against {base}: mAP50 {gains[0]} points, mAP50-95 {gains[1]} points (95 % interval over the seeds).",
        ]
    return lines


def main() -> None:
    """Prints and writes a row for each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=25, help="of the distillation")
    parser.add_argument("--side", type=int, default=168, help="pixels of its views, 14 to a patch")
    parser.add_argument("--views", type=int, default=4, help="of each picture")
    parser.add_argument("--views-batch", type=int, default=16, help="views in a step of it")
    parser.add_argument("--steps", type=int, default=150, help="of each detector")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--proposals", type=int, default=64, help="a picture, in the head's loss")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--frozen", action="store_true", help="the backbone is not trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the detectors")
    parser.add_argument("--starts", nargs="+", default=["random", "distilled"])
    options = harness_options(parser)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)

    backbones: dict[str, Path | None] = {}
    for start in options.starts:
        backbones[start] = distilled_backbone(options) if start == "distilled" else None
    rows: dict[str, list[dict[str, Any]]] = {start: [] for start in options.starts}
    for seed in options.seeds:  # outermost: the machine's drift meets all starts alike
        for start, backbone in backbones.items():
            rows[start].append(measured(options, start, seed, backbone))
    trained = "the head alone" if options.frozen else "all layers"
    title = (
        f"BCCD: {options.epochs} epochs of distillation at {options.side} px, then {options.steps} steps "
        f"of {options.batch} pictures, {trained} trained, seeds {options.seeds}"
    )
    theme = "detector_frozen" if options.frozen else "detector"
    write(theme, options.hardware, options.date, title, table(rows), options.write)


if __name__ == "__main__":
    main()

"""A detector's backbone from pictures without boxes: what it is worth after equal steps.

    kd-train recipe=detector_backbone data.source.root=PICTURES model.teachers.dino.checkpoint=dinov2.safetensors
    kd-export runs/detector_backbone/latest to=backbone
    python scripts/bench/detector.py FOLDER torchvision.safetensors --steps 150 --write

FOLDER has pictures with boxes in the layout of Pascal VOC or of YOLO: that of the public repository Shenggan/BCCD_Dataset
(364 pictures of blood cells, three kinds, MIT), or ``ultralytics/dataset`` of shazaizai/YOLO-for-NEU-DET-dataset (1,800
pictures of steel, six kinds of defects). The student is ``mobilenetv3_large_100`` and has seen the training pictures alone.
torchvision's FasterRCNN (MobileNetV3-Large, 320 px) learns from a random and from that backbone: equal steps, batches and
heads, all layers trained, one detector for each of ``--seeds``. mAP on the test pictures, which nothing else has seen, by
torchmetrics, which needs pycocotools.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import yaml
from harness import options, table, write
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.detection import MeanAveragePrecision
from torchvision.io import ImageReadMode, decode_image
from torchvision.models import detection

from kd.proof.seeds import gain_over_seeds

Sample = tuple[Tensor, dict[str, Tensor]]
"""A picture ``(3, H, W)`` in 0..1, with ``boxes`` ``(N, 4)`` in pixels (left, top, right, bottom) and ``labels`` ``(N,)``
from 1, as torchvision's detectors take them.
"""
Named = dict[Path, list[tuple[str, list[float]]]]
"""File of a picture -> its boxes, each with the name of its class."""


# -- pictures with boxes -----------------------------------------------------------------------------------------------
def voc(root: Path, split: str) -> Named:
    """Pictures of ``ImageSets/Main/SPLIT.txt``, with the boxes of ``Annotations``."""
    named: Named = {}
    for stem in (root / "ImageSets" / "Main" / f"{split}.txt").read_text().split():
        boxes = []
        for thing in ElementTree.parse(root / "Annotations" / f"{stem}.xml").iter("object"):
            sides = [
                float(thing.findtext(f"bndbox/{side}", ""))
                for side in ("xmin", "ymin", "xmax", "ymax")
            ]
            boxes.append((thing.findtext("name", ""), sides))
        named[root / "JPEGImages" / f"{stem}.jpg"] = boxes
    return named


def yolo(root: Path, split: str) -> Named:
    """Pictures of ``images/SPLIT``, with the boxes of ``labels``: lines of class, middle and size as shares of the sides."""
    kinds = yaml.safe_load((root / "data.yaml").read_text())["names"]
    named: Named = {}
    for file in sorted((root / "images" / split).iterdir()):
        _, height, width = decode_image(file, ImageReadMode.RGB).shape
        boxes = []
        labels = root / "labels" / split / f"{file.stem}.txt"
        for line in labels.read_text().splitlines() if labels.is_file() else []:
            number, x, y, w, h = map(float, line.split())
            left, right = (x - w / 2) * width, (x + w / 2) * width
            top, bottom = (y - h / 2) * height, (y + h / 2) * height
            boxes.append((kinds[int(number)], [left, top, right, bottom]))
        named[file] = boxes
    return named


def splits_of(folder: Path) -> tuple[Named, Named]:
    """Pictures to train with, and to judge by."""
    if (folder / "labels").is_dir():
        return yolo(folder, "train"), yolo(folder, "val")
    root = next(path.parent for path in sorted(folder.rglob("Annotations")))
    return voc(root, "trainval"), voc(root, "test")


def samples(named: Named, kinds: list[str]) -> list[Sample]:
    """All of a split, in memory; boxes without an area are left out, as some sets have such."""
    found = []
    for file, things in named.items():
        picture = decode_image(file, ImageReadMode.RGB) / 255
        _, height, width = picture.shape
        boxes, labels = [], []
        for kind, (left, top, right, bottom) in things:
            inside = [max(left, 0), max(top, 0), min(right, width), min(bottom, height)]
            if inside[2] > inside[0] and inside[3] > inside[1]:
                boxes.append(inside)
                labels.append(1 + kinds.index(kind))
        target = {"boxes": torch.tensor(boxes).view(-1, 4), "labels": torch.tensor(labels).long()}
        found.append((picture, target))
    return found


# -- the backbone, and the detector ------------------------------------------------------------------------------------
def in_lists(batch: Sequence[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Pictures and targets in a list each: torchvision's detectors take lists, because pictures differ in size."""
    pictures, targets = zip(*batch, strict=True)
    return list(pictures), list(targets)


def again_and_again(loader: DataLoader) -> Iterator[Any]:
    """Batches without an end, each pass in another order."""
    while True:
        yield from loader


def trained(
    asked: argparse.Namespace, seed: int, backbone: str | None, pictures: Any, kinds: int
) -> nn.Module:
    """A detector after ``--steps`` steps; the same seed draws the same heads and order, whatever the backbone."""
    torch.manual_seed(seed)
    detector = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=1 + kinds,
        box_batch_size_per_image=64,
    )
    if backbone is not None:
        detector.backbone.body.load_state_dict(load_file(backbone), strict=True)
    detector.train()
    weights = [one for one in detector.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=asked.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, asked.lr, asked.steps)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        pictures, asked.batch, shuffle=True, collate_fn=in_lists, drop_last=True, generator=order
    )
    torch.manual_seed(seed)  # torchvision draws the proposals that count
    for images, targets in islice(again_and_again(loader), asked.steps):
        loss = torch.stack(list(detector(images, targets).values())).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 10.0)
        optimizer.step()
        schedule.step()
    return detector.eval()


@torch.no_grad()
def scores_of(detector: nn.Module, pictures: Any) -> tuple[float, float]:
    """mAP at IoU 0.50, and from 0.50 to 0.95, in per cent."""
    metric = MeanAveragePrecision()
    for images, targets in DataLoader(pictures, 8, collate_fn=in_lists):
        metric.update(detector(images), targets)
    values = metric.compute()
    return 100 * float(values["map_50"]), 100 * float(values["map"])


def gain(better: Sequence[float], base: Sequence[float]) -> str:
    """Mean difference of pairs with equal seeds, and its 95 % interval by Student's t."""
    found = gain_over_seeds(better, base)
    if math.isinf(found.half):
        return f"{found.mean:+.1f}"
    return f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})"


def main() -> None:
    """Prints and writes a row for each start."""
    words = {"steps": 150, "batch": 4, "lr": 1e-3, "seeds": [0, 1, 2]}
    asked = options(__doc__, "folder", "backbone", **words)
    torch.set_num_threads(1)
    train, judged = splits_of(Path(asked.folder))
    things = [kind for boxes in [*train.values(), *judged.values()] for kind, _ in boxes]
    kinds = sorted(set(things))
    pictures = samples(train, kinds)
    starts = {"random": None, "distilled": asked.backbone}
    found: dict[str, list[tuple[float, float]]] = {start: [] for start in starts}
    for seed in asked.seeds:  # outermost: the machine's drift meets both starts alike
        for start, backbone in starts.items():
            detector = trained(asked, seed, backbone, pictures, len(kinds))
            found[start].append(scores_of(detector, samples(judged, kinds)))
            print(start, seed, found[start][-1], flush=True)
    by_start = {start: list(zip(*scores, strict=True)) for start, scores in found.items()}
    rows = []
    for start, metrics in by_start.items():
        cells = [start]
        for values in metrics:
            cells += [f"{statistics.mean(values):.1f}", ", ".join(f"{x:.1f}" for x in values)]
        rows.append(cells)
    gains = map(gain, by_start["distilled"], by_start["random"])
    lines = table(["backbone", "mAP50 %", "each seed", "mAP50-95 %", "each seed"], rows)
    lines += ["", f"distilled against random (95 % interval): {' and '.join(gains)} points."]
    title = f"{asked.folder}: {asked.steps} steps of {asked.batch} pictures, all layers trained, seeds {asked.seeds}"
    write(asked, "detector", title, lines)


if __name__ == "__main__":
    main()

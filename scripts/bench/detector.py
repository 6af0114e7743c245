"""A detector's backbone from pictures without boxes: what it is worth after equal steps.

    python scripts/bench/detector.py --data BCCD_Dataset --teacher dinov2.safetensors --work DIR --write

``--data`` is a folder of pictures with boxes in the layout of Pascal VOC or of YOLO: that of the public repository
Shenggan/BCCD_Dataset (364 pictures of blood cells, three kinds, MIT), or ``ultralytics/dataset`` of
shazaizai/YOLO-for-NEU-DET-dataset (1,800 pictures of steel, six kinds of defects; ``--name NEU-DET``). ``--teacher`` is a
weights file of DINOv2's ViT-S/14. The parts are commands that a user types, then torchvision alone:

1. ``kd-train recipe=detector_backbone`` on the training and validation pictures, without their boxes.
2. ``kd-export to=backbone``, whose ``torchvision.safetensors`` torchvision's own detector loads.
3. FasterRCNN (MobileNetV3-Large, 320 px) from a random and from the distilled backbone: equal steps, equal batches,
   equal heads, all layers trained; one detector for each seed. ``--frozen`` trains the head alone, on the features as
   they are. mAP on the test pictures, which nothing else has seen, by torchmetrics.

The same command resumes: an interrupted distillation goes on from its checkpoint, and a detector whose row is in
``DIR/rows.jsonl`` is not trained again. Calls with other ``--seeds`` or ``--starts`` may share ``DIR`` at the same time,
once the backbone has been exported.

Needs pycocotools, with which torchmetrics computes mAP.
"""

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from boxes import BoxPictures, Sample, boxes_below
from harness import options as harness_options
from harness import write
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models import detection

from kd.progress import bar
from kd.proof.seeds import gain_over_seeds

STUDENT = "mobilenetv3_large_100"
EVAL_BATCH = 8
"""Pictures in a batch that is judged."""


@dataclass(frozen=True)
class Budget:
    """What each detector is trained with."""

    steps: int
    """Of the optimizer."""
    batch: int = 4
    """Pictures in a step."""
    lr: float = 1e-3
    """Highest learning rate of AdamW, by a one-cycle schedule."""
    proposals: int = 64
    """Boxes of a picture in the head's loss."""


def command(name: str, *items: str) -> None:
    """Runs a command of kd in a process of its own."""
    program = f"import sys; from kd.cli import main; sys.exit(main({name!r}, sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", program, *items], check=True)


def distilled_backbone(options: argparse.Namespace) -> Path:
    """``torchvision.safetensors`` of a student that learned from the pictures without their boxes."""
    pictures = options.work / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for file in boxes_below(options.data, "--data").train.files:
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
        f"data.num_workers={options.workers}",
        "seed=0",
        f"runs_dir={options.work}",
        "name=distilled",
    ]


def detector(
    options: argparse.Namespace, seed: int, backbone: Path | None, kinds: int
) -> nn.Module:
    """FasterRCNN at 320 px; the same seed draws the same heads, whatever the backbone."""
    torch.manual_seed(seed)
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=1 + kinds,
        box_batch_size_per_image=options.proposals,
    )
    if backbone is not None:
        model.backbone.body.load_state_dict(load_file(backbone), strict=True)
    return model


def in_lists(samples: Sequence[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Pictures and targets in a list each: torchvision's detectors take lists, because pictures differ in size."""
    pictures, targets = zip(*samples, strict=True)
    return list(pictures), list(targets)


def train_detector(
    detector: nn.Module, pictures: BoxPictures, budget: Budget, seed: int, device: torch.device
) -> float:
    """Trains the weights of a torchvision detector that require gradients.

    Args:
        detector: moved to the device, and left there.
        pictures: at least ``budget.batch``.
        budget: the steps, and what each takes.
        seed: of the pictures' order, and of the proposals in each step.
        device: to train on.

    Returns:
        The mean loss of the last twenty steps.
    """
    detector.to(device).train()
    for part in detector.modules():
        weights_of_part = list(part.parameters())
        if weights_of_part and not any(weights.requires_grad for weights in weights_of_part):
            part.eval()  # norms of frozen parts keep their statistics
    trained = [weights for weights in detector.parameters() if weights.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=budget.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, budget.lr, budget.steps)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        pictures,
        budget.batch,
        shuffle=True,
        collate_fn=in_lists,
        drop_last=True,
        generator=order,
    )
    losses: list[float] = []
    batches = islice(_again_and_again(loader), budget.steps)
    with torch.random.fork_rng():  # torchvision draws the proposals that count
        torch.manual_seed(seed)
        for images, targets in bar(batches, total=budget.steps, label="fine-tuning", unit=" steps"):
            on_device = [image.to(device) for image in images]
            boxes = [{name: value.to(device) for name, value in one.items()} for one in targets]
            terms = detector(on_device, boxes)
            loss = torch.stack(list(terms.values())).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 10.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return statistics.mean(losses[-20:])


def _again_and_again(loader: DataLoader) -> Iterator[Any]:
    """Batches without an end, each pass in another order."""
    while True:
        yield from loader


@torch.no_grad()
def box_scores(
    detector: nn.Module, pictures: BoxPictures, device: torch.device
) -> dict[str, float]:
    """``map50`` and ``map`` (IoU 0.50 to 0.95) in 0..1; ``map50`` of each class too, as ``map50_NAME``.

    A class that has no box in the pictures is among them only if the detector answers it, with -1.

    Args:
        detector: on the device.
        pictures: to judge by.
        device: of the detector.
    """
    metric = MeanAveragePrecision()
    by_class = MeanAveragePrecision(iou_thresholds=[0.5], class_metrics=True)
    detector.eval()
    batches = DataLoader(pictures, EVAL_BATCH, collate_fn=in_lists)
    for images, targets in bar(batches, label="judging", unit=" batches"):
        answers = detector([image.to(device) for image in images])
        boxes = [{name: value.cpu() for name, value in answer.items()} for answer in answers]
        metric.update(boxes, targets)
        by_class.update(boxes, targets)
    values = metric.compute()
    scores = {"map50": float(values["map_50"]), "map": float(values["map"])}
    at_50 = by_class.compute()
    numbers = at_50["classes"].reshape(-1).tolist()
    means = at_50["map_per_class"].reshape(-1).tolist()
    for number, value in zip(numbers, means, strict=True):
        scores[f"map50_{pictures.kinds[number - 1]}"] = value
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
    pictures = boxes_below(options.data, "--data")
    model = detector(options, seed, backbone, len(pictures.kinds))
    if options.frozen:
        model.backbone.body.requires_grad_(False)
    budget = Budget(options.steps, options.batch, options.lr, options.proposals)
    device = torch.device(options.device)
    before = time.process_time()
    loss = train_detector(model, pictures.train, budget, seed, device)
    seconds = time.process_time() - before
    scores = {}
    for name, share in box_scores(model, pictures.judged, device).items():
        scores[name] = 100 * share
    row = key | scores | {"loss": loss, "cpu_s": seconds}
    print(json.dumps(row), flush=True)
    with file.open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    return row


def difference(better: Sequence[float], base: Sequence[float]) -> str:
    """Mean difference of pairs with equal seeds, and its 95 % interval by Student's t."""
    gain = gain_over_seeds(better, base)
    if math.isinf(gain.half):
        return f"{gain.mean:+.1f}"
    return f"{gain.mean:+.1f} ({gain.low:+.1f} to {gain.high:+.1f})"


def table(rows: dict[str, list[dict[str, Any]]], kinds: Sequence[str]) -> list[str]:
    """One line for each start, then the gain over the first start."""
    lines = [
        "| backbone | mAP50 % | each seed | mAP50-95 % | each seed | last loss | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for start, of_start in rows.items():
        values = {}
        for name in ("map50", "map", "loss", "cpu_s"):
            values[name] = statistics.mean(row[name] for row in of_start)
        cells = [start]
        for name in ("map50", "map"):
            each = ", ".join(f"{row[name]:.1f}" for row in of_start)
            cells += [f"{values[name]:.1f}", each]
        cells += [f"{values['loss']:.2f}", f"{values['cpu_s']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"mAP50 % of each class, mean over the seeds ({', '.join(kinds)}):", ""]
    for start, of_start in rows.items():
        means = []
        for kind in kinds:
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
    parser.add_argument("--name", default="BCCD", help="of the pictures")
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
    parser.add_argument("--device", default="cpu", help="where the detectors train")
    parser.add_argument("--workers", type=int, default=0, help="loader processes, distillation")
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
        f"{options.name}: {options.epochs} epochs of distillation at {options.side} px, then {options.steps} steps "
        f"of {options.batch} pictures, {trained} trained, seeds {options.seeds}"
    )
    theme = "detector_frozen" if options.frozen else "detector"
    if options.name != "BCCD":
        theme += f"_{options.name.lower().replace('-', '_')}"
    kinds = boxes_below(options.data, "--data").kinds
    write(theme, options.hardware, options.date, title, table(rows, kinds), options.write)


if __name__ == "__main__":
    main()

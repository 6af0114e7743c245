"""How much augmentation a run can carry: seconds an epoch and utilisation at 1, 4, 8 and 12 times the load.

    python scripts/bench/load_factor.py --hardware h200 --write                     # ResNet18, 50, 152 at 224 px
    OMP_NUM_THREADS=1 python scripts/bench/load_factor.py --models resnet10t --size 64 --count 256 --workers 0

A unit of load is a horizontal flip, a vertical flip and a rotation of each picture. In the
loader's processes it is done picture by picture; on the device for the whole batch at once, with one chance for all.
"""

import argparse
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as tvf

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.data.pictures import decode
from kd.data.transforms import seeded
from kd.optim import OptimSpec, build_optimizer
from scripts.bench.harness import measure, options, spread, write
from scripts.bench.input import drawn


def load(pictures: Tensor, factor: int) -> Tensor:
    """``factor`` units of load: uint8 ``(3, H, W)`` or ``(N, 3, H, W)`` -> the same shape."""
    for _ in range(factor):
        if torch.rand(1) < 0.5:
            pictures = pictures.flip(-1)
        if torch.rand(1) < 0.5:
            pictures = pictures.flip(-2)
        pictures = tvf.rotate(pictures, float(torch.empty(1).uniform_(-30, 30)))
    return pictures


class Loaded(Dataset[Tensor]):
    """Pictures decoded, resized and loaded with work, in the loader's processes."""

    def __init__(self, pictures: list[bytes], size: int, factor: int) -> None:
        self.pictures, self.size, self.factor = pictures, size, factor

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, i: int) -> Tensor:
        with seeded(0, i):
            return load(tvf.resize(decode(self.pictures[i]), [self.size, self.size], antialias=True), self.factor)


class Utilisation(threading.Thread):
    """Samples how busy the GPU is, or this process's cores where there is none, every 100 ms, in per cent."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[float] = []
        self._stop_now = threading.Event()

    def run(self) -> None:
        """Until it is stopped."""
        before, then = time.process_time(), time.perf_counter()
        while not self._stop_now.wait(0.1):
            now, clock = time.process_time(), time.perf_counter()
            share = 100 * (now - before) / (clock - then)
            self.samples.append(torch.cuda.utilization() if torch.cuda.is_available() else min(100.0, share))
            before, then = now, clock

    def percentiles(self) -> str:
        """``p5 / p50 / p95``."""
        self._stop_now.set()
        self.join()
        ordered = sorted(self.samples) or [float("nan")]
        return " / ".join(f"{ordered[int(q * (len(ordered) - 1))]:.0f}" for q in (0.05, 0.5, 0.95))


def epoch(model: Any, optimizer: Any, loader: DataLoader, device: torch.device, on_device: int) -> None:
    """One pass: load on the device where asked, forward, backward, step."""
    for pictures in loader:
        images = load(pictures.to(device, non_blocking=True), on_device).float().div(255)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(images).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()


def watched(busy: dict[str, str], name: str, *arguments: Any) -> None:
    """An epoch with its utilisation, which goes to ``busy``."""
    watch = Utilisation()
    watch.start()
    epoch(*arguments)
    busy[name] = watch.percentiles()


def main() -> None:
    """Models times loads, both engines in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50", "resnet152"])
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 8, 12])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--count", type=int, default=4096, help="pictures an epoch")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    asked = options(parser)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    few = drawn(min(asked.count, 64), 256, 341)
    pictures = [few[i % len(few)] for i in range(asked.count)]
    lines = [
        f"{asked.count} pictures of 341 x 256 an epoch -> {asked.size} px, batch {asked.batch}, {asked.workers} loader "
        f"process(es); {asked.rounds} epochs of each engine in turn. Busy: the {device.type}, p5 / p50 / p95 in %.",
        "",
        "| model | load | engine | seconds an epoch: median (least to most) | busy | torch / device |",
        "|---|---|---|---|---|---|",
    ]
    for name in asked.models:
        model = timm.create_model(name, num_classes=10).to(device).train()
        optimizer = build_optimizer([model], OptimSpec(lr=1e-4))
        for factor in asked.factors:
            arms: dict[str, Any] = {}
            busy: dict[str, str] = {}
            for where, (in_loader, on_device) in {"torch": (factor, 0), "device": (0, factor)}.items():
                loader = DataLoader(
                    Loaded(pictures, asked.size, in_loader), asked.batch, num_workers=asked.workers, drop_last=True,
                    persistent_workers=asked.workers > 0, pin_memory=device.type == "cuda",
                )  # fmt: skip

                arms[where] = partial(watched, busy, where, model, optimizer, loader, device, on_device)
            times = measure(arms, asked.rounds)
            gain = statistics.median(times["torch"]) / statistics.median(times["device"])
            for where, seconds in times.items():
                last = f"{gain:.2f}" if where == "device" else ""
                lines.append(f"| {name} | {factor} | {where} | {spread(seconds, 2)} | {busy[where]} | {last} |")
    write("load_factor", asked.hardware, asked.date, "Seconds an epoch by load of augmentation", lines, asked.write)


if __name__ == "__main__":
    main()

"""Images/s and utilisation of the arithmetic on a GPU: ViT-L/16 -> ViT-S/16, batch sizes, teacher live and cached.

    python scripts/bench/gpu.py --hardware h200 --write
    OMP_NUM_THREADS=1 python scripts/bench/gpu.py --small                # a trial on the CPU, with the small pair

MFU is the counted arithmetic (torch's FlopCounterMode: teacher forward, student forward and backward) over the time and
the peak. Batches are uint8 pictures on the device: this is the step without its input (input.py has the engines).
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.losses import KDLoss
from kd.models import StudentSpec, TeacherSpec, build_model, preprocess_for
from kd.optim import OptimSpec, build_optimizer
from kd.tasks import Classification
from kd.teachers import build_teacher
from scripts.bench.harness import measure, options, spread, write

PEAK = 790e12  # dense bf16 of an H200, measured; the datasheet says 989
CLASSES = 1000


class Pair:
    """Teacher and student on the device, and one training step of theirs."""

    def __init__(self, asked: Any, device: torch.device, mode: str | bool) -> None:
        self.device, self.low = device, torch.bfloat16 if asked.precision == "bf16" else torch.float32
        self.teacher = build_teacher(TeacherSpec(asked.teacher, asked.size, compile=mode), CLASSES).to(device, self.low)
        spec = StudentSpec(asked.student, asked.size, compile=mode)
        self.student = build_model(spec, CLASSES, "model.student").to(device).train()
        spec.compile_in_place(self.student)
        self.input = preprocess_for(self.student, asked.size)
        self.task, self.loss = Classification(), KDLoss(2.0)
        self.optimizer = build_optimizer([self.student], OptimSpec(lr=1e-4))
        self.size = asked.size

    def batch(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures, targets, and answers as a cache would give them."""
        images = torch.randint(256, (count, 3, self.size, self.size), dtype=torch.uint8, device=self.device)
        target = torch.randint(CLASSES, (count,), device=self.device)
        return images, target, torch.randn(count, CLASSES, device=self.device)

    def step(self, images: Tensor, target: Tensor, cached: Tensor | None) -> None:
        """Forwards, loss, backward, optimizer."""
        answers = self.teacher(images) if cached is None else cached
        with torch.autocast(self.device.type, self.low, enabled=self.low != torch.float32):
            logits = self.student(self.input(images))
            loss = self.task.loss(logits, target) + self.loss(logits, answers, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def flops(self, cached: bool) -> float:
        """Of a picture."""
        images, target, answers = self.batch(2)
        with FlopCounterMode(display=False) as counter:
            self.step(images, target, answers if cached else None)
        return counter.get_total_flops() / 2


def many(pair: Pair, count: int, steps: int, cached: bool) -> Callable[[], None]:
    """``steps`` steps of one batch."""
    images, target, answers = pair.batch(count)

    def run() -> None:
        for _ in range(steps):
            pair.step(images, target, answers if cached else None)
        if images.is_cuda:
            torch.cuda.synchronize()

    return run


def top_kernels(run: Callable[[], None], device: torch.device) -> list[str]:
    """The ten operations that take most time on the device."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        run()
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda e: getattr(e, by), reverse=True)
    total = sum(getattr(e, by) for e in events)
    return [f"| `{e.key[:80]}` | {getattr(e, by) / total:.1%} | {e.count} |" for e in events[:10]]


def main() -> None:
    """The sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", default="vit_large_patch16_224")
    parser.add_argument("--student", default="vit_small_patch16_224")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--compile", nargs="+", default=["off", "default"], help="off, default, reduce-overhead")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=["32", "bf16"], default="bf16")
    parser.add_argument("--small", action="store_true", help="ViT-Ti -> ViT-Ti at 64 px, two batch sizes, eager")
    asked = options(parser)
    if asked.small:
        asked.teacher, asked.student, asked.size = "vit_small_patch16_224", "vit_tiny_patch16_224", 64
        asked.batches, asked.compile, asked.steps, asked.rounds = [8, 16], ["off"], 2, 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [
        f"{asked.teacher} -> {asked.student} at {asked.size} px, precision {asked.precision}; {asked.rounds} "
        f"turns of {asked.steps} steps. MFU against {PEAK / 1e12:.0f} TFLOP/s.",
        "",
        "| compile | teacher | batch | images/s: median (least to most) | MFU | memory GB |",
        "|---|---|---|---|---|---|",
    ]
    kernels: list[str] = []
    for mode in asked.compile:
        counted = {cached: Pair(asked, device, False).flops(cached) for cached in (False, True)}
        pair = Pair(asked, device, False if mode == "off" else mode)
        for count in asked.batches:
            _reset(device)
            arms = {name: many(pair, count, asked.steps, name == "cached") for name in ("live", "cached")}
            for name, seconds in measure(arms, asked.rounds).items():
                rates = [count * asked.steps / s for s in seconds]
                mfu = statistics.median(rates) * counted[name == "cached"] / PEAK
                lines.append(f"| {mode} | {name} | {count} | {spread(rates)} | {mfu:.1%} | {_peak_gb(device):.1f} |")
        kernels += [
            "",
            f"Compile {mode}, live, batch {count}: where the time goes.",
            "",
            "| operation | share | calls |",
        ]
        kernels += ["|---|---|---|", *top_kernels(arms["live"], device)]
    write("gpu", asked.hardware, asked.date, "A step on the device", [*lines, *kernels], asked.write)


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_gb(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else float("nan")


if __name__ == "__main__":
    main()

"""A training step of kd-train against a hand-written PyTorch loop of the same work.

    python scripts/bench/overhead.py --set recipe=foodtag_vit --out scripts/bench/overhead_cpu_2026-11-21.md

Both sides use the same teacher, student, batches, precision, optimizer, clipping and schedule. Both run in one
process, in turn (A B A B ...), on batches loaded beforehand, so that only the step is timed; medians and their ratio.
"""

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, Trainer

from kd._parser import KDCLI
from kd.cli import translate
from kd.optim import build_optimizer, build_schedule


class TurnTaking(Callback):
    """Times Lightning's steps, and runs a hand-written step behind each of them."""

    def __init__(self, other: "Handwritten", warmup: int) -> None:
        self.other, self.warmup = other, warmup
        self.kd_ms: list[float] = []
        self.loop_ms: list[float] = []
        self.started = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Starts the clock once; then it runs from the end of the last hand-written step."""
        if not self.started:
            self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Reads the clock, takes the other side's turn, starts the clock anew."""
        now = time.perf_counter()
        loop = self.other.step(batch)
        if batch_idx >= self.warmup:
            self.kd_ms.append(1000 * (now - self.started))
            self.loop_ms.append(loop)
        self.started = time.perf_counter()


class Handwritten:
    """The loop one would write by hand."""

    def __init__(self, module: Any, clip: float, total: int, per_epoch: int) -> None:
        self.student, self.task = copy.deepcopy(module.student), copy.deepcopy(module.task)
        self.preprocess, self.teacher = module.student_input, module.teacher
        self.kd, self.kd_weight = module.distill_losses["kd"].temperature, module.distill_losses["kd"].weight
        self.task_weight, self.clip = module.task_loss_weight, clip
        self.optimizer = build_optimizer([self.student], module.optim_spec)
        self.schedule = build_schedule(self.optimizer, module.optim_spec, total, per_epoch)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One step, in milliseconds."""
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.student(self.preprocess(batch["image"]))
            with torch.no_grad():
                answers = self.teacher.model(self.preprocess_teacher(batch["image"])).float()
            t = self.kd
            kd = (
                t
                * t
                * F.kl_div(
                    F.log_softmax(logits.float() / t, 1),
                    F.log_softmax(answers / t, 1),
                    reduction="batchmean",
                    log_target=True,
                )
            )
            loss = self.task_weight * F.cross_entropy(logits.float(), batch["target"]) + self.kd_weight * kd
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.clip)
        self.optimizer.step()
        self.schedule.step()
        return 1000 * (time.perf_counter() - start)

    def preprocess_teacher(self, images: torch.Tensor) -> torch.Tensor:
        """The teacher's input in its weights' type."""
        return self.teacher.preprocess(images).to(self.teacher.dtype)


class Replay:
    """Batches from memory."""

    def __init__(self, batches: list[Any], steps: int) -> None:
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[i % len(self.batches)] for i in range(self.steps))


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", nargs="+", required=True, help="a kd-train command line")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    items = [*options.set, "trainer.max_epochs=1", f"trainer.limit_train_batches={options.steps}", "preflight=warn"]
    cli = KDCLI(translate([*items, "trainer.limit_val_batches=0", "runs_dir=runs/bench-overhead"]).parser_args())
    loader = cli.datamodule.train_dataloader()
    batches = [batch for batch, _ in zip(loader, range(8), strict=False)]
    cli.datamodule.train_dataloader = lambda: Replay(batches, options.steps)
    other = Handwritten(cli.model, cli.trainer.gradient_clip_val, options.steps, options.steps)
    turns = TurnTaking(other, options.warmup)
    cli.trainer.callbacks.append(turns)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    kd, loop = statistics.median(turns.kd_ms), statistics.median(turns.loop_ms)
    ratios = sorted(a / b for a, b in zip(turns.kd_ms, turns.loop_ms, strict=True))
    spec = cli.model.student_spec
    lines = [
        "# A step of kd-train against a hand-written loop",
        "",
        f"{cli.model.teacher.spec.arch} -> {spec.arch} at {spec.img_size} px, batch {cli.datamodule.batch_size}, "
        f"bf16 autocast, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"Python {platform.python_version()}; {len(turns.kd_ms)} pairs of steps in turn, batches from memory.",
        "",
        "| | median ms |",
        "|---|---|",
        f"| kd-train | {kd:.1f} |",
        f"| hand-written | {loop:.1f} |",
        f"| ratio of the medians | {kd / loop:.3f} |",
        f"| ratio pair by pair: 10 %, median, 90 % | {ratios[len(ratios) // 10]:.3f}, "
        f"{statistics.median(ratios):.3f}, {ratios[-len(ratios) // 10]:.3f} |",
        "",
    ]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()

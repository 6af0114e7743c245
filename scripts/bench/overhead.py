"""What kd-train costs beside a hand-written loop that does the same work: epochs of both in turn, in one process.

The loop takes the run's pictures and copies of its models; resizing, normalising, precision, loss and step are its own.

OMP_NUM_THREADS=1 python scripts/bench/overhead.py foodtag_vit --rounds 10 --write
python scripts/bench/overhead.py grocery_vit --set data.source.root=DIR model.teacher.checkpoint=FILE
"""

import argparse
import copy
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.harness import Turns, options, spread, train, write


class HandWritten:
    """The same step as plain PyTorch: own copies of the models, own optimizer and schedule, own loader."""

    def __init__(self, cli: Any, temperature: float, weights: tuple[float, float]) -> None:
        self.cli, self.temperature, self.weights = cli, temperature, weights

    def build(self) -> None:
        """After the run's own models are on their device."""
        module, trainer = self.cli.module, self.cli.trainer
        self.device = module.device
        self.student = copy.deepcopy(module.student.model).to(self.device).train()
        self.teacher, self.low = (
            module.teacher.model,
            module.teacher.dtype,
        )  # bfloat16 where the run autocasts
        self.inputs = [self._input(x) for x in (module.teacher.prepare, module.student.prepare)]
        decay, none = trainer.optimizers[0].param_groups[:2]
        groups = [{"params": [], "weight_decay": g["weight_decay"]} for g in (decay, none)]
        for own, p in zip(
            self.student.parameters(), module.student.model.parameters(), strict=True
        ):
            groups[int(any(p is q for q in none["params"]))]["params"].append(own)
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        self.loader = self.cli.data.train_dataloader()

    def _input(self, wanted: Any) -> Any:
        """uint8 pictures -> a model's input, in two operations; its constants are on the device already."""
        mean, std = (
            torch.tensor(x, device=self.device).view(1, 3, 1, 1) for x in (wanted.mean, wanted.std)
        )
        scale, shift, size = 1 / (255 * std), -mean / std, tuple(wanted.size)

        def prepare(images: torch.Tensor) -> torch.Tensor:
            pictures = images.float()
            if images.shape[-2:] != size:
                pictures = F.interpolate(pictures, size, mode="bilinear", antialias=True)
            return torch.addcmul(shift, pictures, scale)

        return prepare

    def epoch(self, number: int) -> None:
        """One pass over the training set."""
        if not hasattr(self, "loader"):
            self.build()
        teacher_input, student_input = self.inputs
        self.loader.batch_sampler.set_epoch(number)
        for batch in self.loader:
            images = batch["image"].to(self.device, non_blocking=True)
            target = batch["target"].to(self.device, non_blocking=True)
            with torch.no_grad():
                answers = self.teacher(teacher_input(images).to(self.low)).float()
            with torch.autocast(self.device.type, self.low, enabled=self.low != torch.float32):
                logits = self.student(student_input(images))
            t = self.temperature
            logits = logits.float()
            log_p_s, log_p_t = F.log_softmax(logits / t, 1), F.log_softmax(answers / t, 1)
            kd = t * t * F.kl_div(log_p_s, log_p_t, reduction="batchmean", log_target=True)
            loss = self.weights[0] * F.cross_entropy(logits, target) + self.weights[1] * kd
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


def main() -> None:
    """Runs both, prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--set", nargs="*", default=[])
    asked = options(parser)
    hand: list[HandWritten] = []

    def prepare(cli: Any) -> None:
        objective = cli.module.student.objective
        loss = objective.losses["kd"]
        hand.append(HandWritten(cli, loss.temperature, (objective.task_loss_weight, loss.weight)))

    turns = Turns({"kd-train": lambda module: None}, {"hand-written": lambda n: hand[0].epoch(n)})
    items = [*asked.set, f"trainer.max_epochs={asked.rounds + 1}"]
    cli = train(asked.recipe, items, turns, prepare)
    steps = cli.trainer.num_training_batches
    ms = {name: [1000 * s / steps for s in seconds] for name, seconds in turns.seconds.items()}
    ratios = [a / b for a, b in zip(ms["kd-train"], ms["hand-written"], strict=True)]
    lines = [
        f"{asked.recipe} {' '.join(asked.set)}: batch {cli.data.batch_size}, {steps} steps an epoch, "
        f"{asked.rounds} epochs of each in turn after one of each to warm up. The hand-written loop has the same "
        "pictures, models, precision, loss, clipping, fused AdamW and schedule, and logs nothing.",
        "",
        "| | ms a step: median (least to most) |",
        "|---|---|",
        *(f"| {name} | {spread(values, 2)} |" for name, values in ms.items()),
        f"| ratio, of the turns | **{statistics.median(ratios):.3f}** ({min(ratios):.3f} to {max(ratios):.3f}) |",
    ]
    write(
        "overhead",
        asked.hardware,
        asked.date,
        "kd-train against a hand-written loop",
        lines,
        asked.write,
    )


if __name__ == "__main__":
    main()

"""Counts which classes are mixed up in each validation."""

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor

from kd.callbacks.context import RunContext, validation_logits
from kd.callbacks.hooks import Recording
from kd.report.records import Writer

PAIRS = 20  # that are written down, the most frequent
MOST_CLASSES = 3000  # a matrix of more takes too much memory


class Confusion(Recording):
    """Writes ``records/confusion.jsonl`` on rank 0: after each validation, of each student, a record.

    ``right`` is each class's share of right answers and ``counts`` its pictures, by class id; ``pairs`` the most
    frequent mistakes as ``[class, taken for, how often]``. Of tasks with one label a picture.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts counting, for tasks with one class a picture and at most :data:`MOST_CLASSES` classes."""
        run = RunContext.of(trainer)
        classes = len(run.students.data_info.classes)
        if trainer.sanity_checking or not run.module.task.one_class or classes > MOST_CLASSES:
            return
        for name in run.students.named():
            self._counts[name] = torch.zeros(classes * classes, dtype=torch.long, device=run.device)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, *_: object
    ) -> None:
        """Counts (target, answer) pairs of each student; unknown targets are left out."""
        classes = len(RunContext.of(trainer).students.data_info.classes)
        for name, (logits, target, _numbers) in validation_logits(outputs).items():
            if name in self._counts:
                known = (target >= 0) & (target < classes)
                places = target[known] * classes + logits.argmax(1)[known]
                self._counts[name] += torch.bincount(places, minlength=classes * classes)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sums over the ranks; rank 0 writes what is mixed up most."""
        run = RunContext.of(trainer)
        classes = len(run.students.data_info.classes)
        for name in list(self._counts):
            matrix = trainer.strategy.reduce(self._counts.pop(name), reduce_op="sum").view(
                classes, -1
            )
            if trainer.is_global_zero and run.module.folder is not None and int(matrix.sum()):
                self._write(
                    run,
                    matrix,
                    {"epoch": trainer.current_epoch} | ({"student": name} if name else {}),
                )

    def _write(self, run: RunContext, matrix: Tensor, about: dict[str, Any]) -> None:
        classes = run.students.data_info.classes
        if self._writer is None:
            header = {"of": "confusion", "classes": list(classes)}
            self._writer = Writer(run.folder / "records" / "confusion.jsonl", header)
        counts, right = matrix.sum(1), matrix.diagonal()
        wrong = matrix - torch.diag(right)
        values, places = wrong.flatten().topk(min(PAIRS, wrong.numel()))
        found = zip(places.tolist(), values.tolist(), strict=True)
        pairs = [[place // len(classes), place % len(classes), count] for place, count in found]
        shares = [
            round(r / n, 4) if n else None
            for r, n in zip(right.tolist(), counts.tolist(), strict=True)
        ]
        self._writer.write(
            {
                "kind": "confusion",
                **about,
                "right": shares,
                "counts": counts.tolist(),
                "pairs": [pair for pair in pairs if pair[2]],
            }
        )

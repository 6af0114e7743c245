"""Counts which classes are mixed up in each validation."""

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor

from kd.callbacks.context import RunContext, validation_logits
from kd.callbacks.hooks import Recording
from kd.processes import total_of_tensors
from kd.report.records import Writer

PAIRS = 20  # that are written down, the most frequent
MOST_CLASSES = 3000  # a matrix of more takes too much memory


class Confusion(Recording):
    """Writes ``records/confusion.jsonl`` on rank 0: a record after each epoch's validation.

    ``right`` is each class's share of right answers (None of a class without pictures) and ``counts`` its pictures, by
    class id; ``pairs`` the :data:`PAIRS` most frequent mistakes as ``[class, taken for, how often]``, ids of classes. Of
    tasks with one label a picture and at most :data:`MOST_CLASSES` classes.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        """int64 ``(C * C + 1,)`` of this process, on the device; None outside of a validation that counts."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts counting, for tasks with one class a picture and at most :data:`MOST_CLASSES` classes.

        Not in the validation before the first step.
        """
        run = RunContext.of(trainer)
        classes = len(run.student.data.classes)
        if trainer.sanity_checking or not run.module.task.one_class or classes > MOST_CLASSES:
            return
        # A cell for each pair (target, answer), and a last one for pictures whose target is unknown.
        self._counts = torch.zeros(classes * classes + 1, dtype=torch.long, device=run.device)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, *_: object
    ) -> None:
        """Counts (target, answer) pairs; unknown targets are left out.

        Nothing here waits for the device: neither a boolean mask nor ``bincount``, whose sizes depend on values.
        """
        classes = len(RunContext.of(trainer).student.data.classes)
        seen = validation_logits(outputs)
        if seen is None or self._counts is None:
            return
        logits_NC, target_N = seen["logits"], seen["target"]
        known_N = (target_N >= 0) & (target_N < classes)
        answer_N = logits_NC.argmax(1)
        cell_N = target_N * classes + answer_N
        cell_N = torch.where(known_N, cell_N, classes * classes)
        self._counts.index_add_(0, cell_N, torch.ones_like(cell_N))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sums over the ranks, which all must call it; rank 0 writes what is mixed up most."""
        if self._counts is None:
            return
        run = RunContext.of(trainer)
        classes = len(run.student.data.classes)
        counts = total_of_tensors(trainer.strategy, self._counts)
        self._counts = None
        matrix = counts[:-1].view(classes, classes)
        if trainer.is_global_zero and run.module.folder is not None and int(matrix.sum()):
            self._write(run, matrix, trainer.current_epoch)

    def _write(self, run: RunContext, matrix: Tensor, epoch: int) -> None:
        """Writes a record.

        Args:
            run: that is validated.
            matrix: ``(C, C)``, how often pictures of the class of a row were taken for that of a column.
            epoch: from 0.
        """
        classes = run.student.data.classes
        if self._writer is None:
            header = {"of": "confusion", "classes": list(classes)}
            self._writer = Writer(run.folder / "records" / "confusion.jsonl", header)
        right_C = matrix.diagonal()
        counts = matrix.sum(1).tolist()
        shares: list[float | None] = []
        for right, count in zip(right_C.tolist(), counts, strict=True):
            share = round(right / count, 4) if count else None
            shares.append(share)

        wrong = (matrix - torch.diag(right_C)).flatten()
        most = min(PAIRS, wrong.numel())
        largest, cells = wrong.topk(most)
        pairs: list[list[int]] = []
        for cell, times in zip(cells.tolist(), largest.tolist(), strict=True):
            if times:
                true_id, called_id = divmod(cell, len(classes))
                pairs.append([true_id, called_id, times])
        record = {"right": shares, "counts": counts, "pairs": pairs}
        self._writer.write({"kind": "confusion", "epoch": epoch, **record})

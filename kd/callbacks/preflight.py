"""Looks at the teacher before the first step: a wrong one costs the whole run."""

import math
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor

from kd._bar import bar
from kd.errors import UserError


class Preflight(Callback):
    """Measures the teacher on the validation set, and keeps its answers for the student's agreement.

    A teacher within three standard errors of always naming the most frequent class stops the run.

    Args:
        mode: ``stop``, or ``warn`` to go on with a weak teacher.
    """

    def __init__(self, mode: str = "stop") -> None:
        self.mode = mode
        self.teacher_val: dict[str, float] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Runs the teacher over this process's share of the validation set."""
        if pl_module.teacher is None or trainer.limit_val_batches == 0:
            return
        predictions, counts, per_class = self._measure(trainer, pl_module)
        pl_module.teacher_predictions = predictions.to(pl_module.device)
        totals = torch.cat([counts, per_class]).to(pl_module.device)
        totals = trainer.strategy.reduce(totals, reduce_op="sum").cpu()
        right, in_top5, *classes = (int(n) for n in totals)
        self._judge(trainer, str(pl_module.teacher.spec.arch), right, in_top5, classes)

    @torch.no_grad()
    def _measure(self, trainer: Trainer, pl_module: Any) -> tuple[Tensor, Tensor, Tensor]:
        data = pl_module.trainer.datamodule
        predictions = torch.full((len(data.split("val").targets),), -1, dtype=torch.long)
        counts, per_class = torch.zeros(2), torch.zeros(len(data.source.classes))
        loader = data.val_dataloader()
        limit = trainer.limit_val_batches
        batches = min(len(loader), limit if isinstance(limit, int) else math.ceil(limit * len(loader)))
        total = batches * data.batch_size * trainer.world_size
        shown = bar(label="preflight: teacher on val", total=total, disable=not trainer.is_global_zero)
        for batch, _ in zip(loader, range(batches), strict=False):
            shown.update(len(batch["index"]) * trainer.world_size)
            real = batch["index"] >= 0
            if not real.any():
                continue
            logits = pl_module.teacher(batch["image"][real].to(pl_module.device)).cpu()
            target, top = batch["target"][real], logits.topk(min(5, logits.shape[1]), dim=1).indices
            predictions[batch["index"][real]] = top[:, 0]
            hits = top == target[:, None]
            counts += torch.stack([hits[:, 0].sum(), hits.sum()])
            per_class += torch.bincount(target, minlength=len(per_class))
        shown.close()
        return predictions, counts, per_class

    def _judge(self, trainer: Trainer, arch: str, right: int, in_top5: int, per_class: list[int]) -> None:
        total = sum(per_class)
        self.teacher_val = {"acc1": round(right / total, 6), "acc5": round(in_top5 / total, 6)}
        chance = max(per_class) / total
        weak = right <= total * chance + 3 * math.sqrt(total * chance * (1 - chance))
        if weak and self.mode == "stop":
            raise UserError(
                f"model.teacher: {arch} is right on {right} of {total} validation pictures, no better than guessing "
                "(wrong class order, size or weights?); preflight=warn distils from it all the same"
            )
        if trainer.is_global_zero:
            found = (
                f"preflight: teacher {arch} is right on {right} of {total} validation pictures ({right / total:.1%})"
            )
            print(found + (", no better than guessing" if weak else ""), flush=True)

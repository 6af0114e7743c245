"""Looks at the teacher before the first step: a wrong one costs the whole run."""

import copy
import math
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor

from kd._bar import bar
from kd.errors import UserError
from kd.tasks import Task
from kd.tasks.base import TargetCounts


class Preflight(Callback):
    """Measures the teacher on the validation set, and keeps its answers for the student's agreement.

    A teacher that is no better than a guesser (:meth:`kd.tasks.Task.chance`) stops the run. Of several teachers each is
    measured, and all together.

    Args:
        mode: ``stop``, or ``warn`` to go on with a weak teacher.
    """

    def __init__(self, mode: str = "stop") -> None:
        self.mode = mode
        self.teacher_val: dict[str, float] = {}
        self.members: dict[str, dict[str, float]] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Runs the teacher over this process's share of the validation set."""
        teacher = pl_module.teacher
        if teacher is None or trainer.limit_val_batches == 0:
            return
        if not teacher.has_head:
            if trainer.is_global_zero:
                print(
                    f"preflight: teacher {teacher.arch} has no classifier: its features teach, unmeasured", flush=True
                )
            return
        judges = {name: copy.deepcopy(pl_module.task) for name in {"": None, **teacher.members}}
        for judge in judges.values():
            judge.reset()
        info = pl_module.data_info
        seen = TargetCounts(len(info.classes), info.ignore_index).to(pl_module.device)
        pl_module.keep_teacher_answers(self._measure(trainer, pl_module, judges, seen))
        counts, total = seen.compute()
        found = {name: _rounded(judge.compute()) for name, judge in judges.items()}
        self.teacher_val, self.members = found[""], {name: val for name, val in found.items() if name}
        for name, val in found.items():
            arch = teacher.members[name].arch if name in teacher.members else f"ensemble {teacher.arch}"
            self._judge(trainer, pl_module.task, f"{name} ({arch})" if name else arch, val, counts, int(total))

    @torch.no_grad()
    def _measure(self, trainer: Trainer, pl_module: Any, judges: dict[str, Task], seen: TargetCounts) -> Tensor | None:
        """The teacher's answers by validation index."""
        data, task, answers = pl_module.trainer.datamodule, pl_module.task, None
        loader = data.val_dataloader()
        limit = trainer.limit_val_batches
        batches = min(len(loader), limit if isinstance(limit, int) else math.ceil(limit * len(loader)))
        total = batches * data.batch_size * trainer.world_size
        shown = bar(label="preflight: teacher on val", total=total, disable=not trainer.is_global_zero)
        for batch, _ in zip(loader, range(batches), strict=False):
            shown.update(len(batch["index"]) * trainer.world_size)
            real = batch["index"] >= 0
            if not real.any():
                if pl_module.teacher.is_shared_out:  # the other ranks wait for this one's shards
                    pl_module.teacher(batch["image"].to(pl_module.device))
                continue
            target = batch["target"][real].to(pl_module.device)
            logits = pl_module.teacher.answers(batch["image"][real].to(pl_module.device))
            logits = {name: task.fit(answer, target) for name, answer in logits.items()}
            for name, judge in judges.items():
                judge.update(logits[name], target, None)
            seen.update(target)
            answer = task.decide(logits[""]).cpu()
            if answers is None:
                answers = torch.zeros(len(data.split("val").targets), *answer.shape[1:], dtype=answer.dtype)
            answers[batch["index"][real]] = answer
        shown.close()
        return answers

    def _judge(
        self, trainer: Trainer, task: Task, name: str, val: dict[str, float], counts: Tensor, total: int
    ) -> None:
        value = val[task.primary]
        weak = value <= task.chance(counts.cpu(), total)
        if task.primary == "acc1":
            found = f"is right on {round(value * total)} of {total} validation pictures"
        else:
            found = f"reaches {task.primary} {value:.1%} on the validation set"
        if weak and self.mode == "stop":
            raise UserError(
                f"model.teacher: {name} {found}, no better than guessing "
                "(wrong class order, size or weights?); preflight=warn distils from it all the same"
            )
        if trainer.is_global_zero:
            share = f" ({value:.1%})" if task.primary == "acc1" else ""
            print(f"preflight: teacher {name} {found}{share}{', no better than guessing' if weak else ''}", flush=True)


def _rounded(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {name: round(float(value), 6) for name, value in metrics.items()}

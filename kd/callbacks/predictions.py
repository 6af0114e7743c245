"""The models' predictions, drawn beside the picture and the true label."""

from functools import partial
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from kd.callbacks.context import RunContext
from kd.models.preprocess import evaluating
from kd.storage.writing import write_whole
from kd.tasks import Task
from kd.teachers.answer import ALL, Wanted

PICTURES = 8
"""How many are drawn at most, from the first process's first validation batch."""


class Predictions(Callback):
    """Writes ``predictions/<index>.png`` for the first validation pictures: picture, truth, each model's prediction."""

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the files on rank 0; all ranks run the models, which may be sharded.

        The student answers by the weights of the last step (its average, where it has one), not by those of the best
        epoch that is exported. A teacher without a classifier is left out.
        """
        run = RunContext.of(trainer)
        data = run.data
        task = run.module.task
        batch = next(iter(data.eval_dataloader("val")))
        images = batch["image"][:PICTURES].to(run.device)
        targets = batch["target"][:PICTURES]
        numbers = batch["index"][:PICTURES]
        columns: dict[str, Tensor] = {"truth": targets}
        with evaluating(run.student.final):
            columns["student"] = _decided(task, run.student.logits(images), targets)
        teacher = run.module.teacher
        taught: dict[str, Any] = {}
        if teacher is not None:
            taught = teacher.answer({"image": images, "index": numbers}, Wanted()).logits
        if ALL in taught:
            columns["teacher"] = _decided(task, taught[ALL], targets)
        if not trainer.is_global_zero:
            return
        folder = run.folder / "predictions"
        classes = run.student.data.classes
        for i, number in enumerate(numbers.tolist()):
            answers = {}
            for name, column in columns.items():
                answers[name] = column[i].cpu()
            pixels_HW3 = images[i].permute(1, 2, 0).cpu().numpy()
            drawn = task.drawn(pixels_HW3, answers, classes)
            save = partial(drawn.save, format="PNG")
            write_whole(folder / f"{number:04d}.png", save)


def _decided(task: Task, logits: Tensor, targets: Tensor) -> Tensor:
    """The task's decisions, on the host, from logits ``(N, C, ...)`` brought to the size of ``targets``."""
    return task.decide(task.fit(logits.cpu().float(), targets))

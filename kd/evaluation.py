"""Accuracy of finished models."""

import copy
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from kd._bar import bar
from kd.data.batch import Batch
from kd.models import Prepare
from kd.models.own import logits_of
from kd.tasks import Task
from kd.teachers import Teacher


class Listener(Protocol):
    """Takes in every batch's logits (:class:`kd.tasks.fidelity.Fidelity`)."""

    def update(self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor) -> None:
        """A batch: logits of both, at the target's size; targets; the pictures' numbers ``(N,)``."""


@torch.inference_mode()
def evaluate(
    student: nn.Module,
    prepare: Prepare,
    batches: Iterable[Batch],
    task: Task,
    teacher: Teacher | None = None,
    device: torch.device | None = None,
    fidelity: Listener | None = None,
) -> dict[str, dict[str, float]]:
    """Runs a student (and its teacher) in float32 over batches.

    Args:
        student: the model, moved to ``device``.
        prepare: its input.
        batches: uint8 batches, see :data:`kd.data.datamodule.Batch`.
        task: what the labels mean, built for the data's classes.
        teacher: its teacher.
        device: where to compute; default: the CPU.
        fidelity: takes in every batch's logits.

    Returns:
        The task's metrics, ``{"student": {"acc1", ..., "agreement"}, "teacher": {...}}``, each in 0..1.
    """
    device = device or torch.device("cpu")
    student = student.to(device).eval()
    tasks = {"student": task.to(device)}
    if teacher is not None:
        teacher.to(device)
        tasks["teacher"] = copy.deepcopy(task)
    for batch in bar(batches, label="evaluating", unit=" batches"):
        real = batch["index"] >= 0
        images, target = batch["image"][real].to(device), batch["target"][real].to(device)
        answer = taught = None
        if teacher is not None:
            taught = task.fit(teacher(images), target)
            answer = task.decide(taught)
            tasks["teacher"].update(taught, target, None)
        logits = task.fit(logits_of(student(prepare(images))), target)
        tasks["student"].update(logits, target, answer)
        if fidelity is not None:
            fidelity.update(logits, taught, target, batch["index"][real])
    return {name: {k: float(v) for k, v in found.compute().items()} for name, found in tasks.items()}

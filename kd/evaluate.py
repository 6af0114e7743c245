"""Accuracy of finished models."""

from collections.abc import Iterable

import torch
from torch import nn

from kd._bar import bar
from kd.data.datamodule import Batch
from kd.models import Preprocess
from kd.tasks import Classification
from kd.teacher import Teacher


@torch.inference_mode()
def evaluate(
    student: nn.Module,
    student_input: Preprocess,
    batches: Iterable[Batch],
    num_classes: int,
    teacher: Teacher | None = None,
    device: torch.device | None = None,
) -> dict[str, dict[str, float]]:
    """Runs a student (and its teacher) in float32 over batches.

    Args:
        student: the model, moved to ``device``.
        student_input: its preprocessing.
        batches: uint8 batches, see :data:`kd.data.datamodule.Batch`.
        num_classes: C.
        teacher: its teacher.
        device: where to compute; default: the CPU.

    Returns:
        ``{"student": {"acc1", "acc5", "agreement"}, "teacher": {...}}``, each in 0..1.
    """
    device = device or torch.device("cpu")
    student = student.to(device).eval()
    tasks = {"student": Classification().to(device)}
    if teacher is not None:
        teacher.to(device)
        tasks["teacher"] = Classification().to(device)
    for task in tasks.values():
        task.build(num_classes)
        task.to(device)
    for batch in bar(batches, label="evaluating", unit=" batches"):
        real = batch["index"] >= 0
        images, target = batch["image"][real].to(device), batch["target"][real].to(device)
        prediction = None
        if teacher is not None:
            logits = teacher(images)
            prediction = logits.argmax(1)
            tasks["teacher"].update(logits, target, None)
        tasks["student"].update(student(student_input(images)), target, prediction)
    return {name: {k: float(v) for k, v in task.compute().items()} for name, task in tasks.items()}

"""Every export against the student in torch, on real validation pictures: nothing ships unseen."""

import copy
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from kd.data.batch import Batch
from kd.progress import bar
from kd.ship.export.base import Limits, Runtime
from kd.ship.export.manifest import Manifest
from kd.tasks import Features, Task

REPEATS = 15  # Batches of one picture that the two latencies are medians of


@torch.inference_mode()
def compare(
    student: nn.Module, runtime: Runtime, manifest: Manifest, batches: Iterable[Batch], task: Task
) -> dict[str, Any]:
    """Runs both on the same pictures.

    Args:
        student: :class:`kd.ship.export.prepared.Prepared` in float32 on the CPU.
        runtime: the export.
        manifest: of the export.
        batches: validation's.
        task: built for the classes.

    Returns:
        ``pictures``; ``max_difference`` and ``mean_difference`` of the logits; ``agreement`` in 0..1, the share of what
        :meth:`kd.tasks.Task.same` calls the same; ``metric`` (its name), ``student`` and ``export`` (its values, absent
        for features); ``student_ms`` and ``export_ms``, medians at a batch of 1.
    """
    task = Features() if manifest.task == "features" else task
    tasks = {"student": task, "export": copy.deepcopy(task)}
    worst, total, numbers, same, asked, pictures = 0.0, 0.0, 0, 0, 0, 0
    one: torch.Tensor | None = None
    for batch in bar(batches, label="comparing with the student", unit=" batches"):
        real = batch["index"] >= 0
        images, target = batch["image"][real], batch["target"][real]
        given = images.permute(0, 2, 3, 1).contiguous() if manifest.layout == "nhwc" else images.contiguous()
        one = given[:1] if one is None else one
        expected, exported = student(given), torch.from_numpy(np.array(runtime(given.numpy())))
        difference = (expected - exported).abs()
        worst, total, numbers = (
            max(worst, difference.max().item()),
            total + difference.sum().item(),
            numbers + difference.numel(),
        )
        pictures += len(given)
        answers = {"student": task.fit(expected, target), "export": task.fit(exported, target)}
        agreed = task.same(*answers.values())
        same, asked = same + int(agreed.sum()), asked + agreed.numel()
        for name, logits in answers.items() if task.labels else ():
            tasks[name].update(logits, target, None)
    assert one is not None
    found: dict[str, Any] = {
        "pictures": pictures, "max_difference": worst, "mean_difference": total / numbers, "agreement": same / asked,
    }  # fmt: skip
    if task.labels:
        found["metric"] = task.primary
        found |= {name: float(judge.compute()[task.primary]) for name, judge in tasks.items()}
    return found | _latency(student, runtime, one)


def _latency(student: nn.Module, runtime: Runtime, one: torch.Tensor) -> dict[str, float]:
    """Interleaved: what else the machine does hits both alike."""
    took: dict[str, list[float]] = {"student_ms": [], "export_ms": []}
    for _ in range(REPEATS):
        for name, call in (("student_ms", lambda: student(one)), ("export_ms", lambda: runtime(one.numpy()))):
            start = time.perf_counter()
            call()
            took[name].append(1000 * (time.perf_counter() - start))
    return {name: round(median(values[1:]), 3) for name, values in took.items()}


def failure(found: dict[str, Any], int8: bool, limits: Limits) -> str:
    """What an export has lost too much of, in words; empty where it may ship."""
    if int8 and "metric" in found:
        lost = found["student"] - found["export"]
        if lost > limits.drop:
            return (
                f"{found['metric']} falls from {found['student']:.2%} to {found['export']:.2%}, "
                f"by more than {100 * limits.drop:g} points (max_drop)"
            )
        return ""
    if found["agreement"] < limits.agreement:
        return (
            f"it agrees with the student on {found['agreement']:.3%} of {found['pictures']} pictures, "
            f"fewer than {limits.agreement:.3%} (min_agreement)"
        )
    return ""


def size_mb(path: Path) -> float:
    """Of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return round(sum(file.stat().st_size for file in files) / 1e6, 3)

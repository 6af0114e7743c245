"""What a step costs, measured before training, and what follows from it."""

import copy
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kd.cached import cached_share, check_cacheable
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import cache_dir
from kd.errors import UserError
from kd.teacher import Teacher

WORTH = 1.1  # a predicted gain below this is within what the prediction can be wrong by
DISK_SHARE = 0.5  # of the free disk, at most


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    """Median time of a call in milliseconds, after one that warms up."""
    call()
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class StepTimes:
    """Parts of a training step, in milliseconds.

    Attributes:
        teacher_ms: the teacher's forward.
        student_ms: the student's forward and backward.
        loading_ms: a batch's way from the disk, by all loader processes together.
        overlapped: whether loading happens meanwhile (there are loader processes).
    """

    teacher_ms: float
    student_ms: float
    loading_ms: float
    overlapped: bool

    def step_ms(self, teacher: bool) -> float:
        """A step with or without the teacher's forward.

        >>> StepTimes(60, 40, 50, overlapped=True).step_ms(teacher=False)
        50
        """
        compute = self.student_ms + (self.teacher_ms if teacher else 0)
        return max(compute, self.loading_ms) if self.overlapped else compute + self.loading_ms

    def gain(self, epochs: int, views: int, filled: float = 0.0) -> float:
        """How many times as fast a run is with a cache, of which a share ``filled`` is there already.

        >>> round(StepTimes(60, 40, 0, overlapped=True).gain(epochs=8, views=2), 2)
        1.82
        """
        live, cached = self.step_ms(True), self.step_ms(False)
        computed = min(epochs, views) * (1 - filled)
        return epochs * live / (computed * live + (epochs - computed) * cached)


def step_times(module: Any, teacher: Teacher, data: DistillationDataModule) -> StepTimes:
    """Times the parts of a step on a batch of the training set; leaves the student as it is."""
    device = module.trainer.strategy.root_device
    start = time.perf_counter()
    pictures = data.sample_pictures(min(data.batch_size, 32))
    loading_ms = 1000 * (time.perf_counter() - start) * data.batch_size / len(pictures) / max(1, data.num_workers)
    images = pictures.repeat(-(-data.batch_size // len(pictures)), 1, 1, 1)[: data.batch_size].to(device)
    student = copy.deepcopy(module.student).to(device)

    def learn() -> None:
        with module.trainer.precision_plugin.forward_context():
            loss: Tensor = student(module.student_input(images)).float().square().mean()
        loss.backward()

    times = StepTimes(
        teacher_ms=median_ms(lambda: teacher(images), device),
        student_ms=median_ms(learn, device),
        loading_ms=loading_ms,
        overlapped=data.num_workers > 0,
    )
    module._student_taps.pop()
    return times


def cache_pays(
    module: Any, teacher: Teacher, losses: Mapping[str, Any], data: DistillationDataModule
) -> tuple[bool, str]:
    """Whether a cache of the teacher's answers is worth its disk, and why, in one line."""
    try:
        check_cacheable(teacher, losses, data)
    except UserError as error:
        return False, f"off: {error}"
    epochs, views = _epochs(module.trainer, data), teacher.spec.cache_views
    share, size = cached_share(teacher, losses, data)
    if epochs <= views and share < WORTH - 1:
        return False, f"off: {epochs} epoch(s) of {views} views (model.teacher.cache_views): no view comes again"
    folder = Path(teacher.spec.cache_dir).expanduser() if teacher.spec.cache_dir else cache_dir()
    free = shutil.disk_usage(next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())).free
    disk = f"{size / 1e6:,.1f} MB of {free / 1e6:,.0f} MB free disk"
    if size * (1 - share) > DISK_SHARE * free:
        return False, f"off: it would take {disk}"
    times = step_times(module, teacher, data)
    gain = times.gain(epochs, views, share)
    found = f"teacher {times.teacher_ms:.0f}, student {times.student_ms:.0f}, loading {times.loading_ms:.0f} ms a step"
    said = f"{epochs} epochs of {views} views, {share:.0%} cached already, would be {gain:.2f} times as fast; {disk}"
    return gain >= WORTH, f"{'on' if gain >= WORTH else 'off'}: {found}; {said}"


def _epochs(trainer: Any, data: DistillationDataModule) -> int:
    """Epochs of the run, whichever of its limits comes first."""
    per_epoch = max(1, data.info.train // (data.batch_size * trainer.world_size))
    if isinstance(trainer.limit_train_batches, int):
        per_epoch = min(per_epoch, trainer.limit_train_batches)
    limits = []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs)
    if trainer.max_steps >= 0:
        limits.append(-(-trainer.max_steps * trainer.accumulate_grad_batches // per_epoch))
    return min(limits, default=1)

"""What a step costs, measured before training, and what follows from it."""

import copy
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor

from kd.cached import cached_share, check_cacheable
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import cache_dir
from kd.errors import UserError
from kd.memory import HEAD_ROOM, Memory, available_bytes, cores

WORTH = 1.1  # a predicted gain below this is within what the prediction can be wrong by
NEAR = 1.05  # fewer loader processes are taken where a step is within this of the fastest
TRIAL_S = 1.0  # measured for each number of loader processes, at least 4 steps
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
        loading_ms: a batch's way from the disk, by one process.
        num_workers: loader processes; with none, loading and computing take turns.
    """

    teacher_ms: float
    student_ms: float
    loading_ms: float
    num_workers: int

    def step_ms(self, teacher: bool) -> float:
        """A step with or without the teacher's forward.

        >>> StepTimes(60, 40, 100, num_workers=2).step_ms(teacher=False)
        50.0
        """
        compute = self.student_ms + (self.teacher_ms if teacher else 0)
        return max(compute, self.loading_ms / self.num_workers) if self.num_workers else compute + self.loading_ms

    def gain(self, epochs: int, views: int, filled: float = 0.0) -> float:
        """How many times as fast a run is with a cache, of which a share ``filled`` is there already.

        >>> round(StepTimes(60, 40, 0, num_workers=1).gain(epochs=8, views=2), 2)
        1.82
        """
        live, cached = self.step_ms(True), self.step_ms(False)
        computed = min(epochs, views) * (1 - filled)
        return epochs * live / (computed * live + (epochs - computed) * cached)


def step_times(module: Any, data: DistillationDataModule) -> StepTimes:
    """Times the parts of a step on a batch of the training set; leaves the student as it is."""
    device = module.trainer.strategy.root_device
    start = time.perf_counter()
    pictures = data.sample_pictures(min(data.batch_size, 32))
    loading_ms = 1000 * (time.perf_counter() - start) * data.batch_size / len(pictures)
    images = pictures.repeat(-(-data.batch_size // len(pictures)), 1, 1, 1)[: data.batch_size].to(device)
    student, teacher = copy.deepcopy(module.student).to(device), module.teacher

    def learn() -> None:
        with module.trainer.precision_plugin.forward_context():
            learn_from(student(module.student_input(images))).backward()

    student_ms = median_ms(learn, device)
    teacher_ms = median_ms(lambda: teacher(images), device) if teacher else 0.0
    return StepTimes(teacher_ms, student_ms, loading_ms, data.num_workers)


def tune_batch_size(module: Any, data: DistillationDataModule) -> str:
    """Sets ``data.batch_size`` to the largest that fits, and says so."""
    trainer, device = module.trainer, module.trainer.strategy.root_device
    memory = Memory(module)
    available = available_bytes(device, trainer.num_devices)
    size = min(memory.fits(available), data.epoch_length // trainer.world_size)
    while device.type == "cuda" and not _fits(module, data, size, device):
        size = max(1, int(0.8 * size))
    data.batch_size = size
    return (
        f"batch size: {size} a process takes {memory.total(size) / 1e6:,.0f} MB of {available / 1e6:,.0f} MB free; "
        f"at most {1 - HEAD_ROOM:.0%} of them, and the training set"
    )


def _fits(module: Any, data: DistillationDataModule, size: int, device: torch.device) -> bool:
    """Whether a step of teacher and student with ``size`` pictures goes through on the GPU."""
    student = copy.deepcopy(module.student).to(device)
    try:
        images = torch.zeros(size, 3, *data.size, dtype=torch.uint8, device=device)
        if module.teacher is not None:
            module.teacher(images)
        with module.trainer.precision_plugin.forward_context():
            learn_from(student(module.student_input(images))).backward()
        return True
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        del student
        torch.cuda.empty_cache()


def learn_from(output: Any) -> Tensor:
    """Any loss of a model's output (some give two in training): what its backward costs does not depend on which."""
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([x.float().square().mean() for x in outputs]).sum()


def tune_num_workers(module: Any, data: DistillationDataModule) -> str:
    """Sets ``data.num_workers`` to the fewest that make a step fastest, and says so; all ranks must call it together.

    Tries 0, 1, 2, ... on the run's own training batches, with teacher and student working, on all ranks at once: what
    the processes take from each other is in the times. Ends after two tries that gain nothing.
    """
    devices = module.trainer.num_devices
    most = max(min(1, cores() - 1), cores() // devices - 1)
    learn = _learner(module, data)
    with torch.random.fork_rng(devices=[] if module.trainer.strategy.root_device.type == "cpu" else None):
        ms = [_trial_ms(module, data, 0, 4, learn)]
        steps = min(20, max(4, round(1000 * TRIAL_S / ms[0])))
        while len(ms) <= most and min(ms[-2:]) * NEAR <= min(ms[:-2], default=math.inf):
            ms.append(_trial_ms(module, data, len(ms), steps, learn))
    data.num_workers = next(n for n, found in enumerate(ms) if found <= NEAR * min(ms))
    times = ", ".join(f"{found:.0f} ms with {n}" for n, found in enumerate(ms))
    together = f", {devices} processes at once" if devices > 1 else ""
    return f"loader processes: {data.num_workers} (a step takes {times}{together}; at most {most} fit the cores)"


def _learner(module: Any, data: DistillationDataModule) -> Callable[[Any], None]:
    """A step on a batch, of a copy of the student: the run's own stays as it is."""
    device = module.trainer.strategy.root_device
    student, teacher = copy.deepcopy(module.student).to(device), module.teacher
    cached = teacher is not None and any(t.spec.cache in ("on", "only") for t in teacher.members.values())

    def learn(batch: Any) -> None:
        batch = data.on_after_batch_transfer(move_data_to_device(batch, device), 0)
        if teacher is not None and not cached:
            teacher(batch["image"])
        with module.trainer.precision_plugin.forward_context():
            learn_from(student(module.student_input(batch["image"]))).backward()

    return learn


def _trial_ms(
    module: Any, data: DistillationDataModule, num_workers: int, steps: int, learn: Callable[[Any], None]
) -> float:
    """Mean ms of a step with so many loader processes, of the slowest rank.

    What the loaders have prepared during their start is used up before the clock starts.
    """
    strategy = module.trainer.strategy
    ahead = 2 * num_workers + 1
    data.num_workers = num_workers
    batches = iter(data.trial_loader(ahead + steps))
    for _ in range(ahead):
        learn(next(batches))
    _synchronize(strategy.root_device)
    strategy.barrier()
    start = time.perf_counter()
    for batch in batches:
        learn(batch)
    _synchronize(strategy.root_device)
    spent = torch.tensor(1000 * (time.perf_counter() - start) / steps, device=strategy.root_device)
    return float(strategy.reduce(spent, reduce_op="max"))


def cache_pays(module: Any, teacher: Any, losses: Mapping[str, Any], data: DistillationDataModule) -> tuple[bool, str]:
    """Whether a cache of the teacher's answers is worth its disk, and why, in one line."""
    try:
        check_cacheable(teacher, losses, data, module.teacher_features)
    except UserError as error:
        return False, f"off: {error}"
    epochs, views = _epochs(module.trainer, data), teacher.spec.cache_views
    share, size = cached_share(teacher, losses, data, module.teacher_features)
    if epochs <= views and share < WORTH - 1:
        return False, f"off: {epochs} epoch(s) of {views} views (model.teacher.cache_views): no view comes again"
    folder = Path(teacher.spec.cache_dir).expanduser() if teacher.spec.cache_dir else cache_dir()
    free = shutil.disk_usage(next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())).free
    disk = f"{size / 1e6:,.1f} MB of {free / 1e6:,.0f} MB free disk"
    if size * (1 - share) > DISK_SHARE * free:
        return False, f"off: it would take {disk}"
    times = step_times(module, data)
    gain = times.gain(epochs, views, share)
    found = f"teacher {times.teacher_ms:.0f}, student {times.student_ms:.0f}, loading {times.loading_ms:.0f} ms a step"
    said = f"{epochs} epochs of {views} views, {share:.0%} cached already, would be {gain:.2f} times as fast; {disk}"
    return gain >= WORTH, f"{'on' if gain >= WORTH else 'off'}: {found}; {said}"


def _epochs(trainer: Any, data: DistillationDataModule) -> int:
    """Epochs of the run, whichever of its limits comes first."""
    per_epoch = max(1, data.epoch_length // (data.batch_size * trainer.world_size))
    limit = trainer.limit_train_batches
    per_epoch = min(per_epoch, limit) if isinstance(limit, int) else max(1, int(per_epoch * limit))
    limits = []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs)
    if trainer.max_steps >= 0:
        limits.append(-(-trainer.max_steps * trainer.accumulate_grad_batches // per_epoch))
    return min(limits, default=1)

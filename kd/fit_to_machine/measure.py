"""What a step costs, measured before training, and what follows from it."""

import copy
import math
import statistics
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning import Trainer
from torch import Tensor

from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.fit_to_machine.memory import HEAD_ROOM, AttachedModule, Memory, available_bytes
from kd.machine import cache_dir, cores
from kd.processes import largest
from kd.teachers import RunTeacher
from kd.teachers.answer_store import free_bytes
from kd.teachers.cache_layout import Layout
from kd.teachers.open_cache import DISK_SHARE, KEPT, cached_share, check_cacheable, pixels_fit

WORTH = 1.1  # a predicted gain below this is within what the prediction can be wrong by
NEAR = 1.05  # fewer loader processes are taken where a step is within this of the fastest
TRIAL_S = 1.0  # measured for each number of loader processes, at least 4 steps
TRIED_ROOM = (
    0.1  # of the memory, where a batch was tried: for fragmentation, and pictures that differ
)


def median_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Median of three calls in milliseconds, after one that warms up; waits for the device."""
    call()
    return 1000 * statistics.median(
        timeit.repeat(call, timer=partial(_clock, device), number=1, repeat=3)
    )


def _clock(device: torch.device) -> float:
    """Seconds, once the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class StepCost:
    """Parts of a training step, in milliseconds."""

    teacher_ms: float
    """The teacher's forward pass."""
    student_ms: float
    """The student's forward and backward pass."""
    loading_ms: float
    """From disk to batch, by one process."""
    num_workers: int
    """Loader processes; with 0, loading and computing take turns."""

    def step_ms(self, teacher: bool) -> float:
        """A step with or without the teacher's forward."""
        compute = self.student_ms + (self.teacher_ms if teacher else 0)
        return (
            max(compute, self.loading_ms / self.num_workers)
            if self.num_workers
            else compute + self.loading_ms
        )

    def gain(self, epochs: int, views: int, filled: float = 0.0) -> float:
        """How many times as fast a run is with a cache, of which a share ``filled`` is there already."""
        live, cached = self.step_ms(True), self.step_ms(False)
        computed = min(epochs, views) * (1 - filled)
        return epochs * live / (computed * live + (epochs - computed) * cached)


def step_cost(run: AttachedModule, data: DistillationDataModule) -> StepCost:
    """Times the parts of a step on a batch of the training set; leaves the students as they are."""
    device = run.trainer.strategy.root_device
    start = time.perf_counter()
    pictures = data.sample_pictures(min(data.batch_size, 32))
    loading_ms = 1000 * (time.perf_counter() - start) * data.batch_size / len(pictures)
    images = pictures.repeat(-(-data.batch_size // len(pictures)), 1, 1, 1)[: data.batch_size].to(
        device
    )
    learn = _copies(run, device)
    student_ms = median_ms(lambda: learn(images), device)
    teacher = run.teacher
    teacher_ms = median_ms(lambda: teacher(images), device) if teacher is not None else 0.0
    return StepCost(teacher_ms, student_ms, loading_ms, data.num_workers)


def _copies(run: AttachedModule, device: torch.device) -> Callable[[Tensor], None]:
    """A forward and backward of copies of all students on pictures."""
    copies = [(s.prepare, copy.deepcopy(s.model).to(device)) for s in run.students.named().values()]

    def learn(images: Tensor) -> None:
        for prepare, model in copies:
            with run.trainer.precision_plugin.forward_context():
                learn_from(model(prepare(images))).backward()

    return learn


def largest_batch_size(run: AttachedModule, data: DistillationDataModule) -> tuple[int, str]:
    """The largest batch of a process that fits into memory, and one line that says why."""
    trainer, device = run.trainer, run.trainer.strategy.root_device
    memory = Memory(run)
    available = available_bytes(device, trainer.num_devices)
    most = data.epoch_length // trainer.world_size
    size = counted = min(memory.fits(available), most)
    if device.type == "cuda":
        size = tried_size(
            counted, most, memory, available, lambda tried: _peak_bytes(run, data, tried, device)
        )
    grown = f"; {size - counted} more than counted, as trials have shown" if size > counted else ""
    more = int(memory.saved / memory.per_picture)
    sharded = (
        f"; {more} more fit as {memory.shards} processes share the state"
        if memory.shards > 1 and more
        else ""
    )
    return size, (
        f"batch size: {size} a process takes {memory.total(size) / 1e6:,.0f} MB of {available / 1e6:,.0f} MB free; "
        f"at most {1 - (TRIED_ROOM if grown else HEAD_ROOM):.0%} of them, and the training set{grown}{sharded}"
    )


def tried_size(
    size: int, most: int, memory: Memory, available: float, peak: Callable[[int], float | None]
) -> int:
    """The largest batch that went through: what a picture takes is read of two trials, instead of counted.

    Args:
        size: as counted; made smaller until it goes through.
        most: pictures.
        memory: what else there is.
        available: bytes.
        peak: bytes that a step with so many pictures took at most; ``None``: more than there are.
    """
    whole = peak(size)
    while whole is None and size > 1:
        size = max(1, int(0.8 * size))
        whole = peak(size)
    half = peak(size // 2) if size > 1 else None
    if whole is None or half is None or whole <= half:
        return size
    larger = min(most, memory.fits(available, (whole - half) / (size - size // 2), TRIED_ROOM))
    return larger if larger > size and peak(larger) is not None else size


def _peak_bytes(
    run: AttachedModule, data: DistillationDataModule, size: int, device: torch.device
) -> float | None:
    """What a step of teacher and students with ``size`` pictures takes of the GPU; ``None``: it does not fit."""
    try:
        torch.cuda.reset_peak_memory_stats(device)
        images = torch.zeros(size, 3, *data.size, dtype=torch.uint8, device=device)
        if run.teacher is not None:
            run.teacher(images)
        _copies(run, device)(images)
        return torch.cuda.max_memory_allocated(device)
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def learn_from(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Any loss of a model's output (some give two in training): what its backward costs does not depend on which."""
    return torch.stack(
        [x.float().square().mean() for x in (output if isinstance(output, tuple) else (output,))]
    ).sum()


def fastest_num_workers(run: AttachedModule, data: DistillationDataModule) -> tuple[int, str]:
    """The fewest loader processes that make a step fastest, and a message; all ranks call it together."""
    devices = run.trainer.num_devices
    most = max(min(1, cores() - 1), cores() // devices - 1)
    learn = _learner(run, data)
    with torch.random.fork_rng(
        devices=[] if run.trainer.strategy.root_device.type == "cpu" else None
    ):
        ms = [_trial_ms(run, data, 0, 4, learn)]
        steps = min(20, max(4, round(1000 * TRIAL_S / ms[0])))
        while len(ms) <= most and min(ms[-2:]) * NEAR <= min(ms[:-2], default=math.inf):
            ms.append(_trial_ms(run, data, len(ms), steps, learn))
    best = next(n for n, found in enumerate(ms) if found <= NEAR * min(ms))
    times = ", ".join(f"{found:.0f} ms with {n}" for n, found in enumerate(ms))
    together = f", {devices} processes at once" if devices > 1 else ""
    return (
        best,
        f"loader processes: {best} (a step takes {times}{together}; at most {most} fit the cores)",
    )


def _learner(run: AttachedModule, data: DistillationDataModule) -> Callable[[Any], None]:
    """A step on a batch, of copies of the students: the run's own stay as they are."""
    device, teacher = run.trainer.strategy.root_device, run.teacher
    copies = _copies(run, device)
    cached = teacher is not None and bool(teacher.cache_modes & {"on", "only"})

    def learn(batch: Batch) -> None:
        batch = data.on_after_batch_transfer(move_data_to_device(batch, device), 0)
        if teacher is not None and not cached:
            teacher(batch["image"])
        copies(batch["image"])

    return learn


def _trial_ms(
    run: AttachedModule,
    data: DistillationDataModule,
    num_workers: int,
    steps: int,
    learn: Callable[[Any], None],
) -> float:
    strategy = run.trainer.strategy
    ahead = 2 * num_workers + 1
    data.num_workers = num_workers
    batches = iter(data.trial_loader(ahead + steps))
    for _ in range(ahead):
        learn(next(batches))
    _clock(strategy.root_device)
    strategy.barrier()
    start = time.perf_counter()
    for batch in batches:
        learn(batch)
    spent_ms = 1000 * (_clock(strategy.root_device) - start) / steps
    return largest(strategy, spent_ms)


def cache_pays(
    run: AttachedModule, teacher: RunTeacher, data: DistillationDataModule
) -> tuple[bool, str]:
    """Whether a cache of the teacher's answers is worth its disk, and why, in one line."""
    wanted = run.students.wanted
    try:
        check_cacheable(teacher, data, wanted)
    except UserError as error:
        return False, f"off: {error}"
    first = next(iter(teacher.members.values()))
    epochs, views = _epochs(run.trainer, data), first.spec.cache_views
    share, size = cached_share(teacher, data, wanted)
    if epochs <= views and share < WORTH - 1:
        return (
            False,
            f"off: {epochs} epoch(s) of {views} views (model.teacher.cache_views): no view comes again",
        )
    free = free_bytes(
        Path(first.spec.cache_dir).expanduser() if first.spec.cache_dir else cache_dir()
    )
    disk = f"{size / 1e6:,.1f} MB of {free / 1e6:,.0f} MB free disk"
    if size * (1 - share) > DISK_SHARE * free:
        return False, f"off: it would take {disk}"
    times = step_cost(run, data)
    gain = times.gain(epochs, views, share)
    found = f"teacher {times.teacher_ms:.0f}, student {times.student_ms:.0f}, loading {times.loading_ms:.0f} ms a step"
    gained = f"{epochs} epochs of {views} views, {share:.0%} cached already, would be {gain:.2f} times as fast; {disk}"
    return gain >= WORTH, f"{'on' if gain >= WORTH else 'off'}: {found}; {gained}"


def pixels_pay(
    run: AttachedModule, teacher: RunTeacher, data: DistillationDataModule
) -> tuple[bool, str]:
    """Whether pixels of views are worth their disk beside cached answers, and why, in one line."""
    wanting = next(
        member for member in teacher.members.values() if member.spec.cache_pixels == "auto"
    )
    fits, room = pixels_fit(wanting, Layout(data))
    if not fits or room == KEPT:
        return fits, f"{'on' if fits else 'off'}: {room}"
    epochs, views = _epochs(run.trainer, data), wanting.spec.cache_views
    if epochs <= views:
        return (
            False,
            f"off: {epochs} epoch(s) of {views} views (model.teacher.cache_views): no view comes again",
        )
    times = step_cost(run, data)
    workers = (
        0 if run.trainer.strategy.root_device.type == "cpu" else times.num_workers
    )  # which share its cores
    gain = replace(times, num_workers=workers).step_ms(teacher=False) / times.student_ms
    found = f"student {times.student_ms:.0f}, loading {times.loading_ms:.0f} ms a step with {data.num_workers} workers"
    return gain >= WORTH, f"{'on' if gain >= WORTH else 'off'}: {found}; {room}"


def _epochs(trainer: Trainer, data: DistillationDataModule) -> int:
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

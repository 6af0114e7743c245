"""What a step costs, measured before training, and what follows from it."""

import copy
import math
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning import Trainer
from torch import Tensor

from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.distill.casts import CastTogether
from kd.distill.student import Student
from kd.errors import UserError
from kd.fit_to_machine.memory import HEAD_ROOM, AttachedModule, Memory, available_bytes
from kd.machine import cache_dir, cores
from kd.models.compiled import compile_in_place
from kd.processes import cores_of_rank, in_each, largest, of_all_processes
from kd.teachers import RunTeacher
from kd.teachers.answer_store import free_bytes
from kd.teachers.open_cache import DISK_SHARE, cached_share, check_cacheable

WORTH = 1.1  # a predicted gain below this is within what the prediction can be wrong by
DECODED = 32  # pictures, at most, that a measured batch is made of
NEAR = 1.05  # what compiling must gain; and fewer loader processes are taken where a step is within this of the fastest
# seconds that a number of loader processes is timed, by the step without any, but in 4 to 20 steps (0 processes: in 4)
TRIAL_S = 1.0


def median_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Median of three calls of ``call`` in milliseconds, after one that warms up; waits for a CUDA device."""
    call()
    seconds = timeit.repeat(call, timer=partial(clock, device), number=1, repeat=3)
    return 1000 * statistics.median(seconds)


def clock(device: torch.device) -> float:
    """Seconds on a clock without a date, read once a CUDA device has done what was queued: two readings bound its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class StepCost:
    """Parts of a training step, in milliseconds."""

    teacher_ms: float
    """The teacher's forward pass."""
    student_ms: float
    """The forward and backward passes of the student."""
    loading_ms: float
    """From disk to batch, as :func:`step_cost` loads it, if one process makes all batches."""
    num_workers: int
    """Loader processes; with 0, loading and computing take turns."""

    def step_ms(self, teacher: bool) -> float:
        """Estimated ms of a step: computing and loading side by side, or one after the other without workers.

        Args:
            teacher: whether the teacher's forward is part of it.

        >>> StepCost(60, 40, 100, num_workers=2).step_ms(teacher=False), StepCost(90, 10, 100, 0).step_ms(teacher=True)
        (50.0, 200)
        """
        compute = self.student_ms
        if teacher:
            compute += self.teacher_ms
        if self.num_workers == 0:
            return compute + self.loading_ms
        return max(compute, self.loading_ms / self.num_workers)

    def gain(self, epochs: int, views: int, filled: float = 0.0) -> float:
        """How many times as fast a run is with a cache of the teacher's answers as without one: 1 is no gain.

        The teacher runs live in the first ``views`` epochs, which fill the cache, and in no later one.

        Args:
            epochs: of the run.
            views: of each picture, one an epoch, after which they repeat.
            filled: share of the answers that is in the cache already, in 0..1.

        >>> round(StepCost(90, 10, 0, 1).gain(epochs=10**6, views=1), 3)  # Amdahl's law
        10.0
        >>> StepCost(90, 10, 100, 1).gain(epochs=100, views=1)  # loading is the limit
        1.0
        >>> round(StepCost(60, 40, 0, 1).gain(epochs=8, views=2), 2), StepCost(90, 10, 0, 1).gain(4, views=4, filled=1.0)
        (1.82, 10.0)
        """
        live_ms = self.step_ms(teacher=True)
        cached_ms = self.step_ms(teacher=False)
        live_epochs = min(epochs, views) * (1 - filled)
        cached_epochs = epochs - live_epochs
        without_cache_ms = epochs * live_ms
        with_cache_ms = live_epochs * live_ms + cached_epochs * cached_ms
        return without_cache_ms / with_cache_ms


def step_cost(run: AttachedModule, data: DistillationDataModule) -> StepCost:
    """Times the parts of a step, in ms, on a batch of the training set; leaves the student as it is.

    Loading is timed on 32 pictures at most, which this process decodes as validation shows them (no augmentation), and
    scaled to the batch. Compute is timed on a whole batch, which repeats these pictures, in this process alone; the
    optimizer's step is left out. A teacher of stored answers, or several of which one is of these, counts as 0 ms.

    Args:
        run: the module, attached to its trainer.
        data: of the run; its batch size is set already.
    """
    device = run.trainer.strategy.root_device
    batch_size = data.batch_size

    start = time.perf_counter()
    images = a_batch(data).to(device)
    seconds = time.perf_counter() - start
    loading_ms = 1000 * seconds * batch_size / min(batch_size, DECODED)

    learn = learner(run, device)
    student_ms = median_ms(lambda: learn(images), device)
    teacher = run.teacher
    teacher_ms = 0.0
    if teacher is not None and not teacher.stored:
        teacher_ms = median_ms(lambda: teacher(images), device)
    return StepCost(teacher_ms, student_ms, loading_ms, data.num_workers)


def a_batch(data: DistillationDataModule) -> Tensor:
    """A batch of training pictures, uint8 ``(N, 3, H, W)`` on the host: :data:`DECODED` at most, repeated."""
    pictures = data.sample_pictures(min(data.batch_size, DECODED))
    repeats = math.ceil(data.batch_size / len(pictures))
    return pictures.repeat(repeats, 1, 1, 1)[: data.batch_size]


def learner(
    run: AttachedModule, device: torch.device, mode: str | bool = False
) -> Callable[[Tensor], None]:
    """A function that costs what learning costs: forward and backward of a copy of the student.

    The run's own student gets no gradients, and its BatchNorm averages stay. The copy lives as long as the function.
    Dropout in it draws from torch's generators.

    Args:
        run: the module, attached to its trainer.
        device: of the copy.
        mode: of ``torch.compile``, that the copy is compiled in; false: it is not.

    Returns:
        Takes pictures ``(N, 3, H, W)``, uint8, on ``device``; returns nothing.
    """
    student = run.student
    model = copy.deepcopy(student.model).to(device)
    compile_in_place(model, mode)

    casts = CastTogether(model)

    def learn(images: Tensor) -> None:
        """Forward in the run's precision and backward of the copy."""
        pictures = student.inputs(images)
        with run.trainer.precision_plugin.forward_context():
            with casts(pictures):
                output = model(pictures)
            _loss_of(student, output).backward()
        model.zero_grad()  # CUDA graphs write the next gradients into the same memory

    return learn


def largest_batch_size(run: AttachedModule, data: DistillationDataModule) -> tuple[int, str]:
    """The largest batch of a process that fits into memory, in pictures, and one line that says why.

    Called by the first process alone, so nothing in it may be a collective. The size is counted (:class:`Memory`) and, on a
    GPU, then tried: one that does not go through is cut by a fifth until it does, or is 1.

    Args:
        run: the module, attached to its trainer.
        data: its training pictures, divided by the processes, are the most.
    """
    device = run.trainer.strategy.root_device
    memory = Memory(run)
    available = available_bytes(device, run.trainer.num_devices)
    most = max(1, data.epoch_length // run.trainer.world_size)
    counted = min(memory.fits(available), most)
    size = counted
    if device.type == "cuda":
        while size > 1 and not _goes_through(run, data, device, size):
            size = max(1, int(0.8 * size))
    fewer = ""
    if size < counted:
        fewer = f"; {counted - size} fewer than counted, as trials have shown"
    taken = memory.total(size) / 1e6
    free = available / 1e6
    return size, (
        f"batch size: {size} a process takes {taken:,.0f} MB of {free:,.0f} MB free; "
        f"at most {1 - HEAD_ROOM:.0%} of them, and the training set{fewer}"
    )


def _goes_through(
    run: AttachedModule, data: DistillationDataModule, device: torch.device, size: int
) -> bool:
    """Whether the GPU's memory has room for a step of teacher and student, the optimizer's part left out.

    What is there already counts too, such as the run's own models: the student's part is done by a copy of it.

    Args:
        run: the module, attached to its trainer.
        data: gives the pictures' height and width.
        device: a GPU.
        size: black pictures of the step.
    """
    try:
        images = torch.zeros(size, 3, *data.size, dtype=torch.uint8, device=device)
        if run.teacher is not None and not run.teacher.stored:
            run.teacher(images)
        learner(run, device)(images)
        return True
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()


def _loss_of(student: Student, output: object) -> Tensor:
    """A stand-in for the losses, a scalar: what the backward pass costs hardly depends on which loss it is.

    Args:
        student: says what in the output is its answer.
        output: of the student's model in training; of one with two heads a tuple of both answers.
    """
    answers = [output]
    if student.has_two_heads and isinstance(output, tuple):
        answers = list(output)
    losses = [student.output_in(answer).float().square().mean() for answer in answers]
    return torch.stack(losses).sum()


def fastest_num_workers(run: AttachedModule, data: DistillationDataModule) -> tuple[int, str]:
    """The fewest loader processes of a rank with which a step is within :data:`NEAR` of the fastest, and a message; all
    ranks must call it together.

    It tries 0, 1, 2, ... under the real step. It ends when two more processes have not made the step faster by :data:`NEAR`,
    or at the most that the cores allow: a rank's share of them (:func:`kd.processes.cores_of_rank`) less one, but 1 at least
    on a machine of two cores or more; of all ranks the smallest counts. All ranks find the same number, as each trial's time
    is the slowest rank's. torch's random generators are as before afterwards.

    Args:
        run: the module, attached to its trainer.
        data: whose loaders are tried; its ``num_workers`` is then the number that was tried last.
    """
    devices = run.trainer.num_devices
    most_here = max(min(1, cores() - 1), cores_of_rank() - 1)
    most = min(of_all_processes(most_here))  # machines may differ, and all make each trial together
    learn = _step_learner(run, data)
    on_cpu = run.trainer.strategy.root_device.type == "cpu"
    step_ms: list[float] = []  # by the number of loader processes, from 0
    with torch.random.fork_rng(devices=[] if on_cpu else None):
        first_ms = _trial_ms(run, data, num_workers=0, steps=4, learn=learn)
        step_ms.append(first_ms)
        steps_in_time = round(1000 * TRIAL_S / first_ms)
        steps = min(20, max(4, steps_in_time))
        while len(step_ms) <= most:
            before = min(step_ms[:-2], default=math.inf)
            last_two = min(step_ms[-2:])
            if last_two * NEAR > before:  # no longer faster
                break
            count = len(step_ms)
            next_ms = _trial_ms(run, data, num_workers=count, steps=steps, learn=learn)
            step_ms.append(next_ms)
    enough = NEAR * min(step_ms)
    fewest = next(n for n, ms in enumerate(step_ms) if ms <= enough)
    times = ", ".join(f"{ms:.0f} ms with {n}" for n, ms in enumerate(step_ms))
    if devices > 1:
        times += f", {devices} processes at once"
    why = f"loader processes: {fewest} (a step takes {times}; at most {most} fit the cores)"
    return fewest, why


def _step_learner(run: AttachedModule, data: DistillationDataModule) -> Callable[[Any], None]:
    """A function that costs what a step on a batch costs, the optimizer's part left out; the run's own student stays as
    it is.

    It takes a batch of the training loader, on the host. The teacher runs unless its answers, or those of one of several,
    are read from a cache or come from elsewhere; with ``cache=auto``, which is decided later, it runs. A copy of the
    student runs forwards, and backwards from a stand-in for the loss.
    """
    device = run.trainer.strategy.root_device
    learn_on_copy = learner(run, device)
    teacher = run.teacher
    if teacher is not None and (teacher.stored or teacher.cache_modes & {"on", "only"}):
        teacher = None  # its answers are read

    def learn(batch: Batch) -> None:
        """One batch: moved, changed, answered by the teacher, and learnt by a copy of the student."""
        batch = data.on_after_batch_transfer(move_data_to_device(batch, device), 0)
        if teacher is not None:
            teacher(batch["image"])
        learn_on_copy(batch["image"])

    return learn


def _trial_ms(
    run: AttachedModule,
    data: DistillationDataModule,
    num_workers: int,
    steps: int,
    learn: Callable[[Any], None],
) -> float:
    """Milliseconds of a step on the slowest rank, with batches that the loader did not have ready at the start.

    Every rank must call it: they wait for each other before the timing and exchange their times after it.

    Args:
        run: the module, attached to its trainer.
        data: its ``num_workers`` is set to ``num_workers``, and stays so.
        num_workers: loader processes to try.
        steps: that are timed.
        learn: does a step on a batch.

    Raises:
        UserError, RunError: as :func:`kd.processes.in_each`, such as for a picture that can't be read.
    """
    strategy = run.trainer.strategy
    device = strategy.root_device
    ahead = 2 * num_workers + 1  # batches that torch's loader prepares, and the one that is learnt
    data.num_workers = num_workers

    def begun() -> Iterator[Any]:
        """Learns the batches that the loader had ready at the start; returns an iterator over the others."""
        batches = iter(data.trial_loader(ahead + steps))
        for _ in range(ahead):
            learn(next(batches))
        clock(device)
        return batches

    def timed() -> float:
        """Milliseconds of a step on this process."""
        start = time.perf_counter()
        for batch in batches:
            learn(batch)
        return 1000 * (clock(device) - start) / steps

    # in_each: where one process can't read a picture, all end with its error
    batches = in_each(begun)
    strategy.barrier()
    return largest(strategy, in_each(timed))


def cache_pays(
    run: AttachedModule, teacher: RunTeacher, data: DistillationDataModule
) -> tuple[bool, str]:
    """Whether a cache of the teacher's answers is worth its disk, and one line that says why.

    It is worth it where the run becomes :data:`WORTH` times as fast, and what is still to be written takes no more than
    :data:`kd.teachers.open_cache.DISK_SHARE` of the free disk. Nothing is timed, and the result is False, where a cache
    can't give what the losses or the data need, where the disk lacks room, or where no view comes again and less than a
    tenth of the answers is cached already. Rank 0 alone calls this.

    Args:
        run: the module, attached to its trainer.
        teacher: the live one, all of whose members have ``cache=auto``; the first one's ``cache_views`` and
            ``cache_dir`` count.
        data: pictures and views; batch size and loader processes are set.

    Raises:
        UserError: the folder ``model.teacher.cache_dir`` holds a cache of something else.
    """
    wanted = run.student.objective.wanted
    try:
        check_cacheable(teacher, data, wanted)
    except UserError as error:
        return False, f"off: {error}"
    spec = next(iter(teacher.members.values())).spec
    epochs = _epochs(run.trainer, data)
    views = spec.cache_views
    share, size = cached_share(teacher, data, wanted)
    if epochs <= views and share < WORTH - 1:
        of_views = f"{views} views (model.teacher.cache_views)"
        return False, f"off: {epochs} epoch(s) of {of_views}: no view comes again"
    if spec.cache_dir:
        folder = Path(spec.cache_dir).expanduser()
    else:
        folder = cache_dir()
    free = free_bytes(folder)
    missing = size * (1 - share)
    disk = f"{missing / 1e6:,.1f} MB of {free / 1e6:,.0f} MB free disk"
    if missing > DISK_SHARE * free:
        return False, f"off: it would take {disk}"
    cost = step_cost(run, data)
    gain = cost.gain(epochs, views, share)
    pays = gain >= WORTH
    return pays, (
        f"{'on' if pays else 'off'}: teacher {cost.teacher_ms:.0f}, student {cost.student_ms:.0f}, "
        f"loading {cost.loading_ms:.0f} ms a step; {epochs} epochs of {views} views, "
        f"{share:.0%} cached already, would be {gain:.2f} times as fast; {disk}"
    )


def _batches_per_epoch(trainer: Trainer, data: DistillationDataModule) -> int:
    """Batches of an epoch, at least 1.

    Before training: Lightning has not counted the loader's batches yet. ``trainer.limit_train_batches`` is a number of
    batches (int) or a share of the epoch (float).
    """
    per_epoch = max(1, data.epoch_length // (data.batch_size * trainer.world_size))
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(per_epoch, limit)
    return max(1, int(per_epoch * limit))


def _epochs(trainer: Trainer, data: DistillationDataModule) -> int:
    """Epochs of the run, by its epochs or its optimizer steps, whichever ends first; 1 where nothing bounds it."""
    limits = []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs)
    if trainer.max_steps >= 0:
        batches = trainer.max_steps * trainer.accumulate_grad_batches
        limits.append(math.ceil(batches / _batches_per_epoch(trainer, data)))
    return min(limits, default=1)


def batches_of(trainer: Trainer, data: DistillationDataModule) -> int:
    """Batches that a process learns in the run; of one epoch where nothing bounds it."""
    batches = _epochs(trainer, data) * _batches_per_epoch(trainer, data)
    if trainer.max_steps >= 0:
        batches = min(batches, trainer.max_steps * trainer.accumulate_grad_batches)
    return batches

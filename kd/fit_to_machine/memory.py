"""What a training step keeps in memory, part by part, and how many pictures fit."""

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import psutil
import torch
from pytorch_lightning import Trainer
from torch import Tensor, nn

from kd.distill.sharding import Sharding
from kd.distill.student import Student
from kd.teachers import RunTeacher

# of the memory, for what the count does not see: temporary buffers, fragmentation, the loader's batches
HEAD_ROOM = 0.2


class AttachedModule(Protocol):
    """A :class:`kd.DistillationModule` attached to its trainer, as far as it is measured."""

    @property
    def teacher(self) -> RunTeacher | None:
        """The run's."""

    @property
    def trainer(self) -> Trainer:
        """The trainer that will run it."""

    @property
    def student(self) -> Student:
        """The model that is trained, with its losses."""


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of all tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors)


def saved_bytes(model: nn.Module, images: Tensor, context: AbstractContextManager[object]) -> int:
    """Bytes that a forward of ``model`` keeps for its backward, the parameters aside; tensors of one storage count once.

    The model's state may change (BatchNorm's averages).

    Args:
        model: on the device of ``images``.
        images: the model's float input ``(N, 3, H, W)``, resized and normalised.
        context: the autocast of training; entered here.
    """
    of_parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}  # bytes by address

    def pack(tensor: Tensor) -> Tensor:
        """Notes the storage of a tensor that is kept for the backward pass, once; parameters do not count."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        output = model.forward(images)  # not compiled; alive until here: no address is used twice
    del output
    return sum(saved.values())


class Memory:
    """Bytes of a training step's parts in one process, from two forwards of a few pictures without ``compile``.

    All is measured when it is made; later changes of the models do not count. Dropout in the forwards draws from torch's
    generators.

    Args:
        run: attached to its trainer.

    Attributes:
        teacher: bytes of its weights, all of them wherever ``placement`` puts them; 0 without any.
        student: bytes of the student's weights in this process, its moving average (``ema_decay``) left out.
        gradients: bytes of the gradients in this process, those of the losses' own weights among them.
        optimizer: bytes of its state in this process, taken as two numbers for each trained one (Adam's).
        shards: over how many processes the optimizer's state lies; 1: it is whole in each.
        per_picture: bytes that the student's forward of one picture keeps for the backward pass.
        per_step: bytes that a forward keeps whatever the number of pictures, such as weights that autocast has cast.
    """

    def __init__(self, run: AttachedModule) -> None:
        """Measures the parts in bytes; two and four pictures go through copies of the student.

        Args:
            run: the module, attached to its trainer.
        """
        self.teacher = 0
        if run.teacher:
            weights = run.teacher.model.state_dict()
            self.teacher = size_of(weights.values())
        self.student = size_of(run.student.model.state_dict().values())
        self.gradients = size_of(p for p in run.student.parameters() if p.requires_grad)
        # Adam's two moments; the summary has the real one at the end
        self.optimizer = 2 * self.gradients
        self.shards, shards_weights = _shards(run)
        self.optimizer //= self.shards
        if shards_weights:
            self.student //= self.shards
            self.gradients //= self.shards
        of_two = _activations(run, 2)
        of_four = _activations(run, 4)
        self.per_picture = (of_four - of_two) / 2
        # a forward of n pictures keeps per_step + n * per_picture; per_step: the weights as autocast casts them
        self.per_step = max(0.0, of_two - 2 * self.per_picture)

    def total(self, batch_size: int) -> float:
        """Bytes that a step of this process takes with ``batch_size`` pictures of its own."""
        fixed = self.teacher + self.student + self.gradients + self.optimizer + self.per_step
        return fixed + batch_size * self.per_picture

    def fits(self, available: float) -> int:
        """The largest batch of this process that leaves :data:`HEAD_ROOM` of ``available`` bytes free, in pictures.

        Above 8 it is rounded down to a multiple of 8; it is at least 1, even where that does not fit.

        Args:
            available: bytes that the step may take, from :func:`available_bytes`.
        """
        room = (1 - HEAD_ROOM) * available - self.total(0)
        most = int(room / self.per_picture)
        return max(1, most - most % 8 if most > 8 else most)

    def report(self, batch_size: int, optimizer_bytes: int) -> dict[str, float]:
        """MiB (2**20 bytes) of this process by part, rounded to a tenth, for ``summary.json``.

        The keys are ``teacher``, ``student``, ``gradients``, ``optimizer`` and ``activations``.

        Args:
            batch_size: pictures of a step of this process.
            optimizer_bytes: what the optimizer's state really takes, measured after training; it replaces the estimate.
        """
        parts = {
            "teacher": self.teacher,
            "student": self.student,
            "gradients": self.gradients,
            "optimizer": optimizer_bytes,
            "activations": self.per_step + batch_size * self.per_picture,
        }
        return {name: round(size / 2**20, 1) for name, size in parts.items()}


def _shards(run: AttachedModule) -> tuple[int, bool]:
    """Over how many processes the optimizer's state lies (1: each has all of it), and whether weights and gradients do
    too (FSDP; not so DeepSpeed at any stage).
    """
    strategy = run.trainer.strategy
    if isinstance(strategy, Sharding):
        return run.trainer.world_size, strategy.shards_weights
    if run.student.optim.zero:
        return run.trainer.world_size, False
    return 1, False


def _activations(run: AttachedModule, count: int) -> int:
    """Bytes that the student's forward of ``count`` pictures keeps for its backward, measured on a copy."""
    student = run.student
    device = run.trainer.strategy.root_device
    model = copy.deepcopy(student.model).to(device)  # a forward moves BatchNorm's averages
    height, width = student.prepare.size
    pictures = torch.zeros(count, 3, height, width, dtype=torch.uint8, device=device)
    images = student.inputs(pictures)
    autocast = run.trainer.precision_plugin.forward_context()
    return saved_bytes(model, images, autocast)


def available_bytes(device: torch.device, local_processes: int) -> int:
    """Bytes that this process may still take: of the GPU, or its share of the machine's memory within the cgroup's
    limit (v2).

    On a GPU what torch's allocator holds in this process counts as free: weights that are there already are part of
    :meth:`Memory.total`.

    Args:
        device: of the process.
        local_processes: that share this machine's memory in equal parts; not read on a GPU, which one process has alone.
    """
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    free = psutil.virtual_memory().available
    cgroup = Path("/sys/fs/cgroup")
    limit_file = cgroup / "memory.max"
    if limit_file.is_file():
        limit = limit_file.read_text().strip()
        if limit.isdecimal():
            used = int((cgroup / "memory.current").read_text())
            free = min(free, int(limit) - used)
    return free // local_processes

"""What a distillation loss is: a weight, and a forward over the student's and the teacher's tensors."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from kd.config.kinds import Range
from kd.losses.numerics import both

Shape = tuple[int, ...]


def check_range(name: str, value: float | None, allowed: str) -> None:
    """Raises a ValueError unless a constructor's argument is within ``allowed``, such as ``>= 0 and < 1``, or None.

    :mod:`kd.run.keys` finds a setting's range by reading this call from the text of the loss's ``__init__``: under this
    bare name, with three positional arguments, name and range as plain string literals.
    """
    problem = Range(allowed).refuses(value)
    if problem:
        raise ValueError(f"{name} {problem}, got {value}")


def check_maps(loss: nn.Module, *shapes: Shape) -> None:
    """Checks that features are maps.

    Args:
        loss: named in the message.
        shapes: of features, the batch included.

    Raises:
        ValueError: one that is not ``(N, C, H, W)``.
    """
    for shape in shapes:
        if len(shape) != 4:
            name = type(loss).__name__
            raise ValueError(
                f"{name} compares maps, got {shape[1:]} a sample (of a ViT: patch tokens)"
            )


class Float32(nn.Module):
    """A part of a loss whose tensors stay in float32 where a run is in half precision throughout (``bf16-true``)."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves tensors as ``fn`` does, but keeps their dtype where it would become 16 bits (``module.half()``).

        torch calls it, under this name, for each ``to``, ``cuda`` and ``half`` of a module around it.
        """

        def move(tensor: Tensor) -> Tensor:
            """One tensor, moved by ``fn`` to its device; in its old dtype where the new one has 16 bits."""
            moved = fn(tensor)
            if moved.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(moved.device)
            return moved

        return super()._apply(move, recurse)


class KnownOnHost(nn.Module):
    """A part of a loss that keeps a buffer's value on the host, as reading one waits for the device; None: unread."""

    known: int | None = None

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        """Loads as any module, then forgets the host's copy: the buffer has another value now. torch calls it."""
        super()._load_from_state_dict(*args, **kwargs)
        self.known = None


class DistillLoss(nn.Module):
    """Base of all distillation losses. A loss takes tensors, never a model or a layer's name.

    Its parameters (projections) are trained, sharded and checkpointed with the run, and never part of the exported
    student.

    Args:
        weight: factor of this loss in the total, >= 0. With 0 the loss is not computed.

    Attributes:
        needs_class_ids: not defined for the mixed targets of mixup and cutmix, nor without a label.
        needs_labels: needs one label a picture; mixed targets may do.
        equal_on_all_ranks: buffers that every process updates alike, so that DDP need not broadcast them each step.
        least_batch: the fewest pictures, of all processes where it gathers them, that it learns anything from.
        needs_index: ``forward`` also takes ``index``, the samples' numbers ``(N,)``.
        epoch: where training is, in epochs, from 0; may be fractional.
        max_epochs: where it will end.
    """

    needs_class_ids = False
    needs_labels = False
    needs_index = False
    least_batch = 1
    equal_on_all_ranks: tuple[str, ...] = ()
    epoch = 0.0
    max_epochs = 1

    def __init__(self, weight: float = 1.0) -> None:
        """Checks the weight: finite and >= 0."""
        super().__init__()
        check_range("weight", weight, ">= 0")
        if math.isinf(weight):
            raise ValueError(f"weight must be finite, got {weight}")
        self.weight = weight

    def bind(self, num_classes: int, num_samples: int, ignore_index: int | None = None) -> None:
        """Passes the data's facts to the loss, once, before ``build``.

        Args:
            num_classes: classes of the data.
            num_samples: training pictures, with and without a label; 0 where it is not known.
            ignore_index: target of pixels that take no part (dense tasks).

        Raises:
            ValueError: data that the loss is not defined for.
        """

    def counted(self, target: Tensor) -> Tensor:
        """How many pictures, or pixels, of a batch's targets the loss is a mean over: int64, a scalar."""
        return torch.full((), len(target), dtype=torch.int64, device=target.device)

    def warmed_up(self, epochs: int) -> float:
        """A factor of the loss: ``1 / epochs`` in the first epoch, as much more in each next one, 1 from the last of these
        ``epochs`` on; 1 where they are 0.
        """
        if not epochs:
            return 1.0
        return min((int(self.epoch) + 1) / epochs, 1.0)


@dataclass
class TopKLogits:
    """The k largest logits of each answer, and the mass of all others as one number a temperature."""

    values: Tensor
    """``(N, k)`` float32, relative to the largest (which is 0), falling."""
    indices: Tensor
    """``(N, k)`` their classes."""
    tails: dict[float, Tensor]
    """Temperature ``T`` -> ``(N,)``: ``log sum exp(z_c / T)`` over the other classes, with the same reference."""


class LogitLoss(DistillLoss):
    """A loss over both models' logits, ``(N, C)``: ``forward(student_logits, teacher_logits, target)`` -> scalar.

    Args:
        temperature: that both models' logits are divided by, > 0, where there is one.

    Attributes:
        for_numbers: defined for models whose answers are numbers (a regression), and for nothing else.
        for_maps: defined for logit maps ``(N, C, H, W)`` with ignored pixels, and for nothing else.
        exclusive: treats classes as if they excluded each other: refused where a picture may have several labels.
        least_classes: the fewest classes that it is defined for.
    """

    for_maps = for_numbers = False
    exclusive = False
    least_classes = 1

    def __init__(self, weight: float = 1.0, temperature: float = 1.0) -> None:
        """Checks the arguments, which are the class's."""
        super().__init__(weight)
        check_range("temperature", temperature, "> 0")
        self.temperature = temperature

    def bind(self, num_classes: int, num_samples: int, ignore_index: int | None = None) -> None:
        """Prepares for the data, before training.

        Args:
            num_classes: C.
            num_samples: of the training set, where a loss keeps something for each.
            ignore_index: target of pixels without a label.

        Raises:
            ValueError: fewer classes than :attr:`least_classes`.
        """
        if num_classes < self.least_classes:
            needs = f"{type(self).__name__} needs >= {self.least_classes} classes"
            raise ValueError(f"{needs}, the data has {num_classes}; KDLoss takes two")

    def scaled(self, student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Both logits over the temperature, as of :func:`kd.losses.numerics.both`."""
        student, teacher = both(student_logits, teacher_logits, "logits")
        return student / self.temperature, teacher / self.temperature

    def softened(self, teacher_logits: Tensor) -> Tensor:
        """The teacher's logits ``(N, C, ...)`` in the form whose softmax over C is compared with the student's."""
        return teacher_logits / self.temperature


def equal_on_all_ranks(module: nn.Module) -> list[str]:
    """The names, below ``module``, of the losses' buffers that DDP need not broadcast."""
    names = []
    for path, loss in module.named_modules():
        if isinstance(loss, DistillLoss):
            names += [f"{path}.{name}" for name in loss.equal_on_all_ranks]
    return names


class FeatureLoss(DistillLoss):
    """A loss over one feature tensor of each model: ``forward(student_features, teacher_features, target)``.

    Features are maps ``(N, C, H, W)`` (patch tokens too, on their grid), tokens ``(N, L, D)`` or vectors ``(N, D)``.
    Which layers they come from is the module's affair (``model.taps.<name>``). ``build`` is called once, with the
    shapes that those layers give, before the optimizer is made: a loss with a projection makes it there. A loss that
    needs no labels defines :meth:`compare` alone.

    Attributes:
        default_tap: the layer of both models where none is named; ``prelogits`` is the classifier's input.
        over_maps: defined for maps, and for nothing else.
    """

    default_tap: str | None = None
    over_maps = False

    def build(self, student_shape: Shape, teacher_shape: Shape) -> None:
        """Makes the parameters that depend on the two feature shapes (batch axis included)."""
        if self.over_maps:
            check_maps(self, student_shape, teacher_shape)

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """The loss of two features, a scalar, or of each picture, ``(N,)``, whose mean is the loss."""
        raise NotImplementedError

    def forward(self, student_features: Tensor, teacher_features: Tensor, target: Tensor) -> Tensor:
        """The mean of :meth:`compare`, a scalar; ``target`` is unused."""
        return self.compare(student_features, teacher_features).mean()


class LayersLoss(DistillLoss):
    """A loss over the features of several layers at once: ``forward([student ...], [teacher ...], target)``."""

    over_maps = False  # as of a :class:`FeatureLoss`

    def build(self, student_shapes: list[Shape], teacher_shapes: list[Shape]) -> None:
        """Makes the parameters that depend on the layers' shapes.

        Args:
            student_shapes: of each layer, batch axis included: ``(N, C, H, W)``, tokens ``(N, L, D)`` or ``(N, D)``.
            teacher_shapes: of the teacher's layers, as many.

        Raises:
            ValueError: unequal numbers of layers, or no maps where maps are needed.
        """
        if len(student_shapes) != len(teacher_shapes):
            counts = (
                f"{len(student_shapes)} of the student and {len(teacher_shapes)} of the teacher"
            )
            raise ValueError(f"layers are compared in pairs, got {counts}")
        if self.over_maps:
            check_maps(self, *student_shapes, *teacher_shapes)


class EachLayer(LayersLoss):
    """One feature loss for several pairs of layers: a copy with parameters of its own for each; the mean of all.

    Args:
        loss: the loss of one pair; its weight is taken over.
    """

    def __init__(self, loss: FeatureLoss) -> None:
        """Wraps a loss over one layer, to which :meth:`bind` has passed the data's facts; :meth:`build` makes the copies."""
        super().__init__(loss.weight)
        self.losses = nn.ModuleList([loss])
        self.needs_index = loss.needs_index
        self.needs_labels = loss.needs_labels
        self.least_batch = loss.least_batch
        self.gather = getattr(loss, "gather", False)

    def build(self, student_shapes: list[Shape], teacher_shapes: list[Shape]) -> None:
        """Copies the loss for each pair of layers and builds each copy; shapes as of :meth:`LayersLoss.build`.

        Raises:
            ValueError: another number of layers on each side, or a pair that does not fit.
        """
        super().build(student_shapes, teacher_shapes)
        original = self.losses[0]
        copies = []
        for student_shape, teacher_shape in zip(student_shapes, teacher_shapes, strict=True):
            loss = copy.deepcopy(original)
            loss.build(student_shape, teacher_shape)  # type: ignore[operator]
            copies.append(loss)
        self.losses = nn.ModuleList(copies)

    def forward(
        self, student: list[Tensor], teacher: list[Tensor], target: Tensor, **extra: Tensor
    ) -> Tensor:
        """The mean of the pairs' losses, a scalar.

        Args:
            student: its features of each layer, in the order in which the losses were built.
            teacher: its features, likewise.
            target: the batch's targets.
            extra: what a loss needs beside, such as the pictures' ``index``.
        """
        values = []
        for loss, student_features, teacher_features in zip(
            self.losses, student, teacher, strict=True
        ):
            values.append(loss(student_features, teacher_features, target, **extra))
        return sum(values[1:], values[0]) / len(values)


def class_name(loss: nn.Module) -> str:
    """The class of a loss as its settings name it; of an :class:`EachLayer` that of the loss inside it."""
    if isinstance(loss, EachLayer):
        loss = loss.losses[0]
    return type(loss).__name__

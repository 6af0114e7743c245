"""What a distillation loss is: a weight, and a forward over the student's and the teacher's tensors."""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar, dataclass_transform

import torch
from torch import Tensor, nn

from kd.config.kinds import Range, read
from kd.losses.numerics import both

Shape = tuple[int, ...]


Positive = Annotated[float, Range("> 0")]
NotNegative = Annotated[float, Range(">= 0")]
InnerShare = Annotated[float, Range("> 0 and < 1")]
Count = Annotated[int, Range("> 0")]
Epochs = Annotated[int, Range(">= 0")]
"""Types of arguments: a constructor refuses a number outside of its type's range."""

Class = TypeVar("Class", bound=type)


@dataclass_transform()
def with_arguments(loss: Class) -> Class:
    """Gives a loss a constructor: the fields annotated in its own class are the arguments, in order, with their defaults.

    The base's ``__init__`` is not called: ``weight`` must be one of the fields, and ``temperature`` where it is an argument.
    Without it a loss of one's own writes ``__init__`` itself, and calls its base's.
    """
    made: Any = dataclass(eq=False, repr=False)(loss)
    for name, default in list(vars(made).items()):
        if default is None and name in made.__dataclass_fields__:
            delattr(made, name)  # else it would hide a module of that name
    set_fields = made.__init__

    @functools.wraps(set_fields)
    def __init__(self: nn.Module, *args: object, **kwargs: object) -> None:
        nn.Module.__init__(self)  # before a field holds a module
        set_fields(self, *args, **kwargs)

    made.__init__ = __init__
    return made


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
        gather: compares the batches of all processes instead of each process's own.
        least_batch: the fewest pictures, of all processes where it gathers them, that it learns anything from.
        needs_index: ``forward`` also takes ``index``, the samples' numbers ``(N,)``.
        epoch: where training is, in epochs, from 0; may be fractional.
        max_epochs: where it will end.
    """

    needs_class_ids = False
    needs_labels = False
    needs_index = False
    gather = False
    least_batch = 1
    equal_on_all_ranks: tuple[str, ...] = ()
    epoch = 0.0
    max_epochs = 1

    def __init__(self, weight: NotNegative = 1.0) -> None:
        super().__init__()
        self.weight = weight
        self.__post_init__()

    def __post_init__(self) -> None:
        """Checks the arguments by the ranges of their types, and that the weight is finite and >= 0.

        Raises:
            ValueError: the first one outside of its range.
        """
        kinds = {**inspect.get_annotations(type(self).__init__), "weight": NotNegative}
        for name, annotation in kinds.items():
            value = getattr(self, name, None)
            for limit in read(annotation).limits:
                problem = limit.refuses(value)
                if problem:
                    raise ValueError(f"{name} {problem}, got {value}")
        if math.isinf(self.weight):
            raise ValueError(f"weight must be finite, got {self.weight}")

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
        """The loss's factor in a linear warm-up over ``epochs`` epochs: ``1 / epochs`` in the first, 1 from the last of them
        on. Always 1 without a warm-up (0), and in evaluation: validations of all epochs are compared.
        """
        if not epochs or not self.training:
            return 1.0
        return min((int(self.epoch) + 1) / epochs, 1.0)


@dataclass
class TopKLogits:
    """The k largest logits of each answer, and the log of the mass of all others, one number a temperature."""

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

    temperature: Positive = 1.0

    def __init__(self, weight: NotNegative = 1.0, temperature: Positive = 1.0) -> None:
        self.temperature = temperature
        super().__init__(weight)

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
    """A loss over features of both models: ``forward(student_features, teacher_features, target)`` -> scalar.

    It takes a tensor of each model, or lists of them, one entry a layer. Features are maps ``(N, C, H, W)`` (patch tokens
    too, on their grid), tokens ``(N, L, D)`` or vectors ``(N, D)``. ``model.taps.<name>`` says which layers they come from.

    A loss defines :meth:`compare`, or :meth:`pair` where it reads the target, and :meth:`build` where it has parameters,
    of one layer. Several layers are compared in pairs, each by a copy of the loss with parameters of its own; the loss is
    their mean. A loss with ``joint`` compares all layers together: its ``build`` and ``forward`` take lists.

    Attributes:
        default_tap: the layer of both models where none is named; ``prelogits`` is the classifier's input.
        over_maps: defined for maps, and for nothing else.
        joint: compares several layers together.
    """

    default_tap: str | None = None
    over_maps = False
    joint = False

    def build(self, student_shape: Any, teacher_shape: Any) -> None:
        """Makes the parameters that depend on the two feature shapes (batch axis included); ``joint``: on lists of them."""

    def compare(self, student_features: Tensor, teacher_features: Tensor) -> Tensor:
        """The loss of two features, a scalar, or of each picture, ``(N,)``, whose mean is the loss."""
        raise NotImplementedError

    def pair(
        self, student_features: Tensor, teacher_features: Tensor, target: Tensor, **extra: Tensor
    ) -> Tensor:
        """The loss of one layer's features: the mean of :meth:`compare`, a scalar.

        ``target`` is the batch's; ``extra`` what a loss needs beside, such as the pictures' ``index``.
        """
        return self.compare(student_features, teacher_features).mean()

    def forward(self, student: Any, teacher: Any, target: Tensor, **extra: Tensor) -> Tensor:
        """:meth:`pair` of two features, or the mean over lists of them, in the order in which they were built: a scalar. The
        teacher's side gets no gradient.
        """
        if isinstance(student, Tensor):
            return self.pair(student, teacher.detach(), target, **extra)
        values = []
        for loss, of_student, of_teacher in zip(self.pairs, student, teacher, strict=True):
            values.append(loss.pair(of_student, of_teacher.detach(), target, **extra))
        first, *others = values
        if not others:
            return first
        total = sum(others, first)
        return total / len(values)

    def build_layers(
        self, student_shapes: Sequence[Shape], teacher_shapes: Sequence[Shape]
    ) -> None:
        """Builds the loss for lists of layers, one entry a layer: once, before the optimizer is made.

        Args:
            student_shapes: of each layer, batch axis included: ``(N, C, H, W)``, tokens ``(N, L, D)`` or ``(N, D)``.
            teacher_shapes: of the teacher's layers, as many.

        Raises:
            ValueError: unequal numbers of layers, or shapes that the loss does not compare.
        """
        if len(student_shapes) != len(teacher_shapes):
            counts = (
                f"{len(student_shapes)} of the student and {len(teacher_shapes)} of the teacher"
            )
            raise ValueError(f"layers are compared in pairs, got {counts}")
        for shape in (*student_shapes, *teacher_shapes):
            if self.over_maps and len(shape) != 4:
                raise ValueError(
                    f"{type(self).__name__} compares maps, got {shape[1:]} a sample (of a ViT: patch tokens)"
                )
        if self.joint:
            self.build(student_shapes, teacher_shapes)
            return
        copies = [copy.deepcopy(self) for _ in student_shapes[1:]]
        if copies:
            self.others = nn.ModuleList(copies)
        for loss, *shapes in zip(self.pairs, student_shapes, teacher_shapes, strict=True):
            loss.build(*shapes)

    @property
    def pairs(self) -> list["FeatureLoss"]:
        """The loss of each pair of layers: itself, and its copies for the others."""
        others: Any = getattr(self, "others", ())
        return [self, *others]

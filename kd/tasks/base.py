"""What a task is: its loss on the labels, its metrics, and what a guesser would reach."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, distributed, nn
from torchmetrics import Metric

from kd.errors import UserError
from kd.losses import LogitLoss
from kd.proof.certificate import Measure
from kd.proof.luck import FEWEST_PICTURES
from kd.tasks.features import starting_classifier
from kd.tasks.fidelity import KINDS, Fidelity
from kd.tasks.fidelity_numbers import NumbersFidelity
from kd.tasks.weights import ClassWeights, weights_of


class KeepsDtype(nn.Module):
    """A module whose tensors move between devices and never change their type.

    A run in half precision throughout (``trainer.precision=bf16-true``) casts all that it trains: sums over a
    validation set, class weights and the scales of targets would be rounded to eight bits.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the tensors here, with ``recurse`` also in all children, by ``fn`` (of ``.to``, ``.half``, ``.cuda`` and the
        like), without its cast.
        """

        return super()._apply(_of_the_same_type(fn), recurse)


def _of_the_same_type(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn``, which moves or casts a tensor, without the cast."""

    def move(tensor: Tensor) -> Tensor:
        """One tensor, moved by ``fn`` to its device, in its own dtype."""
        result = fn(tensor)
        if result.dtype == tensor.dtype:
            return result
        return tensor.to(result.device)

    return move


class FirstClassifier(NamedTuple):
    """The first weights of a classifier, fitted to features."""

    weight: Tensor
    """``(C, D)``; of numbers in the targets' units."""
    bias: Tensor
    """``(C,)``."""
    score: str
    """How good it is on pictures left out one by one, in words."""


class Task(KeepsDtype):
    """Base of all tasks. What depends on the kind of target is here, but for the data (:mod:`kd.data.targets`).

    Args:
        num_classes: classes of the data; default: as the data says.
        ignore_index: value of targets that take no part; default: as the data says.
    """

    kind = "one label a picture"  # what a picture must be labelled with, as kd.data.targets.Targets names it
    # an answer is a class ("classification"), several ("multilabel"), one for each pixel ("segmentation"), "features", or
    # "numbers", one under the name of each class
    answers = "numbers"
    dense = False  # the models have a classifier for every pixel
    labels = True  # it learns from targets at all
    one_class = False  # each picture has one class, which an answer names or not
    in_rows = False  # the answer to a picture fits a row of a table
    link = ""  # what makes probabilities of its logits, "softmax" or "sigmoid"; "": they are numbers or features
    no_class_id = ""  # why a picture of its data has no single class id, for losses that need one
    primary = "acc1"  # the metric that describes a model best
    secondary: tuple[str, ...] = ()  # further metrics of every validation
    certified: Measure | None = None  # the measure that a certificate is about
    class_weights: ClassWeights = (
        None  # how much a picture, or pixel, of each class counts in the loss
    )

    def __init__(self, num_classes: int | None = None, ignore_index: int | None = None) -> None:
        """Checks the number of classes C; ``ignore_index`` is the label that does not count. None: the data decides.

        Raises:
            ValueError: fewer classes than one.
        """
        super().__init__()
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"num_classes must be >= 1, got {num_classes}")
        self.num_classes = num_classes or 0
        self.ignore_index = ignore_index

    def settle(self, num_classes: int, ignore_index: int | None = None) -> None:
        """Takes over what the data says, and makes the metrics; called before the student is built.

        A second call for the same data makes new metrics.

        Args:
            num_classes: C of the data.
            ignore_index: the label that does not count; None: all do.

        Raises:
            ValueError: the task was made for other data, or settled for them before.
        """
        if self.num_classes not in (0, num_classes):
            raise ValueError(
                f"num_classes must be the data's {num_classes}, got {self.num_classes}"
            )
        if self.ignore_index is not None and self.ignore_index != ignore_index:
            raise ValueError(
                f"ignore_index must be the data's {ignore_index}, got {self.ignore_index}"
            )
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.build(num_classes, ignore_index)

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        """Makes the metrics for ``num_classes`` classes; by default none (a student of features alone has none yet here)."""

    def scale(self, means: Sequence[float], deviations: Sequence[float]) -> None:
        """Receives mean and standard deviation of the training targets, where these are numbers."""

    def name_metrics(self, classes: Sequence[str]) -> None:
        """Receives the names of classes or numbers, where metrics bear them."""

    def weigh(self, classes: Sequence[str], counts: Sequence[int] | None) -> None:
        """Receives the classes' names, and how many training pictures each has, ``(C,)``; None: not known.

        Called once, when the student is built. A task with ``class_weights`` makes the weights of its loss here, ``(C,)``,
        float32, None where all count alike; others do nothing.

        Raises:
            UserError: weights that are not these classes', or ``auto`` without counts.
        """
        if self.class_weights is not None:
            self.weights = weights_of(self.class_weights, classes, counts)

    @property
    def monitored(self) -> str:
        """The metric that chooses the best epoch, unless the settings name another."""
        return self.primary

    def metric_names(self, teacher: bool) -> list[str]:
        """Names of the metrics of every validation, with or without a teacher that has a classifier.

        They alone may choose the best epoch. :meth:`compute` may give more, such as the IoU of each class. By default
        :attr:`primary`, :attr:`secondary` and, with a teacher, ``agreement``.
        """
        return [self.primary, *self.secondary, *(["agreement"] if teacher else [])]

    def fit(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits ``(N, C, ...)`` at the target's height and width, where targets have them; else as they are."""
        return logits

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits ``(N, C, ...)`` that :meth:`fit` has fitted, and targets -> the loss on the labels, a scalar."""
        raise NotImplementedError

    def counted(self, target: Tensor) -> Tensor:
        """How many pictures, pixels or numbers of the targets :meth:`loss` is the mean over: int64, a scalar."""
        return torch.full((), len(target), dtype=torch.int64, device=target.device)

    def decide(self, logits: Tensor) -> Tensor:
        """Logits ``(N, C, ...)`` -> the model's answer, as :meth:`update` takes a teacher's: class ids ``(N, ...)``."""
        return logits.argmax(1)

    def same(self, logits: Tensor, others: Tensor) -> Tensor:
        """Which of two models' answers are the same, bool of any shape."""
        return self.decide(logits) == self.decide(others)

    def compared(self, answer: Tensor) -> Tensor:
        """Answers, or targets, in the form that losses of numbers (``for_numbers``) compare; of the same shape."""
        return answer

    def learns_from(self, kind: str) -> bool:
        """Whether a source whose pictures are labelled with ``kind`` has its targets."""
        return kind == self.kind

    def label_weight(self, weight: float) -> float:
        """The weight of :meth:`loss`, where ``weight`` is given: 0 without such a loss."""
        return weight

    def note_on_labels(self, there: bool) -> str:
        """A line about the training labels, printed as the run begins; "" where nothing is unusual.

        Args:
            there: whether labels are trained on; False where the unlabelled pictures alone are (``data.unlabeled`` without
                ``data.unlabeled_ratio``), or there are no labels.
        """
        beside = "beside labelled ones: data.unlabeled_ratio"
        keys = ["model.task_loss_weight"]
        keys += [f"model.task.{name}" for name in self.settings_of_the_loss]
        unused = ", ".join(keys)
        note = f"training on the unlabelled pictures alone: no task loss ({beside}); {unused}: without effect"
        return "" if there else note

    @property
    def settings_of_the_loss(self) -> list[str]:
        """Names of the given arguments that :meth:`loss` alone reads; without that loss a note says that they do nothing."""
        return [] if self.class_weights is None else ["class_weights"]

    def check_targets(self, target: object, pictures: int, training: bool) -> None:
        """Refuses targets of a user's loader in a form that the task does not have; one on a GPU by its shape alone.

        Args:
            target: of a batch.
            pictures: N of the batch.
            training: whether the batch is of training; metrics take less.

        Raises:
            UserError: names the form that is expected, and what was given.
        """
        wanted = self.wanted_targets(training)
        if not wanted:
            return
        given = type(target).__name__
        if isinstance(target, Tensor):
            if self.takes(target, pictures, training):
                return
            given = _described(target)
        split = "validation"
        if training:
            split = "training"
        raise UserError(f"{split} targets: must be {wanted}; got {given} for {pictures} pictures")

    def wanted_targets(self, training: bool) -> str:
        """The form of targets in words; "" where they are not read."""
        return ""

    def takes(self, target: Tensor, pictures: int, training: bool) -> bool:
        """Whether targets have that form; values are read on the CPU alone, as a GPU would have to be waited for."""
        return True

    def refuses(self, loss: LogitLoss) -> str:
        """Why a loss over logits is not defined for this task, to stand after the loss's name; "" where it is defined."""
        if loss.for_numbers:
            return "is defined for numbers alone (model.task=Regression)"
        return "is defined for masks alone (model.task=Segmentation)" if loss.for_maps else ""

    def first_classifier(self, features: Tensor, targets: Tensor) -> FirstClassifier | None:
        """A linear classifier fitted to the features of pre-trained weights; None: it starts at random.

        By default a ridge regression of one-hot labels, and None where targets are no class ids.

        Args:
            features: of M labelled pictures, ``(M, D)``.
            targets: theirs, as the data's batches have them: class ids ``(M,)``, or ``(M, C)``, NaN where missing.
        """
        if targets.ndim != 1:
            return None
        weight, bias, accuracy = starting_classifier(features, targets, self.num_classes)
        return FirstClassifier(weight, bias, f"accuracy {accuracy:.1%}")

    def entropy(self, logits: Tensor) -> Tensor | None:
        """Mean entropy of ``(N, C, ...)`` logits, over its maximum: 0 one-hot, 1 uniform; None where they have none.

        By default that of their softmax, where :attr:`link` names it.
        """
        return relative_entropy(logits.log_softmax(1)) if self.link == "softmax" else None

    def fidelity(self, classes: int) -> Fidelity | NumbersFidelity | None:
        """Compares a student with its teacher, batch by batch; None where that is not defined."""
        return Fidelity(self.answers, classes) if self.answers in KINDS else None  # type: ignore[arg-type]

    def rows(self, answer: Tensor, classes: Sequence[str]) -> dict[str, list[str]]:
        """Logits, or targets, of N pictures as columns of a table.

        Returns:
            N cells of text for each column; its key is what the column's name ends with (``""``: nothing).
            The column ``""`` of a target and of an answer are compared as text to say who is right
            (:class:`kd.module.evaluation.Answers`), so both must spell a class alike.
        """
        raise NotImplementedError

    def outcome(self, answer: Tensor, target: Tensor) -> Tensor:
        """What a certificate counts of each picture, float32 ``(N, ...)`` (:class:`kd.proof.certificate.Outcomes`).

        Args:
            answer: logits of the model, at the target's size.
            target: as the task's data has it.
        """
        raise NotImplementedError

    def judged(self, value: float, total: int) -> str:
        """What a value of the main metric on ``total`` targets means, in words that follow a model's name."""
        return f"reaches {self.primary} {value:.1%} on the validation set"

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds a batch to the metrics.

        Args:
            logits: of the student, ``(N, C, ...)``.
            target: labels as the task's data has them.
            teacher_answer: the teacher's :meth:`decide` on the same pictures; None without a teacher.
        """
        raise NotImplementedError

    @property
    def _metrics(self) -> dict[str, Any]:
        """The metrics among its modules, by the name of their attribute."""
        metrics = {}
        for name, child in self.named_children():
            if isinstance(child, Metric):
                metrics[name] = child
        return metrics

    def compute(self) -> dict[str, Tensor]:
        """The metrics by name, over all batches (and processes) since the last reset; all processes call it.

        Of classes scalars in 0..1; of numbers errors in their units, and R2. A metric that no process has updated is left
        out, such as ``agreement`` without a teacher.
        """
        values = {}
        with warnings.catch_warnings():
            # A process without a batch computes too: the other processes' batches count.
            warnings.filterwarnings("ignore", message=".*before the ``update`` method.*")
            for name, metric in self._metrics.items():
                if updated_anywhere(metric):
                    values[name] = metric.compute()
        return values

    def reset(self) -> None:
        """Sets all metrics back to no pictures."""
        for metric in self._metrics.values():
            metric.reset()

    def chance(self, counts: Tensor, total: int) -> float:
        """What a guesser may reach in the primary metric by luck; a model at or below it is no better. Below 1.

        The preflight judges a teacher by it.

        Args:
            counts: how often each class is the target, ``(C,)``: of one class a picture in the whole validation split,
                else among the targets that the model has seen.
            total: number of targets that the model has seen: pictures, of masks pixels with a class.
        """
        raise NotImplementedError

    def shows_bad_teacher(self, value: float, counts: Tensor, pictures: int) -> bool:
        """Whether so many pictures are enough to call a teacher no better than guessing; if not, that stays open.

        By default it is a matter of ``pictures`` alone (:data:`kd.proof.luck.FEWEST_PICTURES`).

        Args:
            value: of the primary metric, that the teacher has reached on them: at or below :meth:`chance`.
            counts: how often each class is the target, ``(C,)``.
            pictures: that the teacher has seen.
        """
        return pictures >= FEWEST_PICTURES


def _described(target: Tensor) -> str:
    """Dtype and shape of targets in words, and the range of their values where they are in the host's memory."""
    dtype = str(target.dtype).removeprefix("torch.")
    words = f"{dtype} {tuple(target.shape)}"
    if target.numel() and target.device.type == "cpu":
        words += f" with values from {target.min():g} to {target.max():g}"
    return words


def within(values: Tensor, low: float, high: float) -> bool:
    """Whether all values are from ``low`` to ``high``, or NaN; True of those on a GPU, which are not read."""
    if values.device.type != "cpu" or not values.numel():
        return True
    if not values.is_floating_point():
        values = values.long()  # a uint8 is never below -1
    return not bool(((values < low) | (values > high)).any())


def relative_entropy(log_p: Tensor) -> Tensor:
    """The mean entropy ``-sum_k p log p`` of log-probabilities ``(N, K, ...)`` over its maximum, ``log K``."""
    entropy = -(log_p.exp() * log_p).sum(1).mean()
    return entropy / math.log(max(2, log_p.shape[1]))


def updated_anywhere(metric: Metric) -> bool:
    """Whether any process has given the metric a batch; all processes must call it.

    With few pictures some processes have none, and yet all must compute: the metric is summed over them.
    """
    if not distributed.is_initialized():
        return metric.update_called
    flag = torch.tensor(int(metric.update_called), device=metric.device)
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)
    return bool(flag)


def occurrences(ids: Tensor, known: Tensor, count: int) -> Tensor:
    """How often each id occurs, without waiting for a GPU.

    Args:
        ids: int64 ``(M,)``, from 0 to ``count`` - 1 where known.
        known: bool ``(M,)``: the ids that count.
        count: how many ids there are, C.

    Returns:
        int64 ``(C,)``.
    """
    numbers = torch.zeros(count, dtype=torch.int64, device=ids.device)
    return numbers.scatter_add_(0, torch.where(known, ids, 0), known.long())


class ExactMetric(Metric):
    """Base of kd's metrics: their sums move between devices and never change their type, see :class:`KeepsDtype`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Self:
        """Moves the sums by ``fn`` (of ``.to``, ``.half``, ``.cuda`` and the like), without its cast.

        ``exclude_state``: names of sums that are left where they are.
        """

        return super()._apply(_of_the_same_type(fn), exclude_state)  # type: ignore[return-value]

    def set_dtype(self, dst_type: str | torch.dtype) -> Self:
        """Leaves the type as it is."""
        return self


class TargetCounts(ExactMetric):
    """How often each class is the target, over all batches and processes."""

    counts: Tensor
    """Targets of each class, ``(C,)``."""
    total: Tensor
    """Targets in all: ids that count, or the pictures of rows of labels or numbers, also those of NaN."""

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        """Begins without targets; ``counts`` ``(C,)`` and ``total`` are added up over processes."""
        super().__init__()
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.add_state("counts", torch.zeros(num_classes), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, target: Tensor) -> None:
        """Adds a batch: integer ids of any shape, or labels ``(N, C)`` of 0 and 1 as floating point.

        ``ignore_index``, and ids that are not in 0..C-1, are left out. Of labels the N pictures are the targets, and NaN
        counts as 0; of a regression's numbers the counts mean nothing.
        """
        if target.is_floating_point():
            self.counts += (target.nan_to_num() != 0).sum(0)
            self.total += len(target)
            return
        ids = target.flatten().long()
        known = (ids >= 0) & (ids < self.num_classes) & (ids != self.ignore_index)
        self.counts += occurrences(ids, known, self.num_classes)
        self.total += known.sum()

    def compute(self) -> tuple[Tensor, Tensor]:
        """Counts ``(C,)`` of the targets by class, and the number of targets."""
        return self.counts, self.total

    def of_all_batches(self) -> tuple[Tensor, Tensor]:
        """Counts ``(C,)`` and the number of targets; of a single class too, whose count torchmetrics makes a scalar."""
        counts, total = self.compute()
        return counts.reshape(-1), total

"""What a student learns: the task's loss on the labels and named distillation losses, each with a weight."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kd.data.batch import Batch
from kd.data.info import DataInfo
from kd.distill.feature_taps import FeatureTaps, Read
from kd.distill.fitting import check_listeners, check_loss, check_task
from kd.errors import UserError, no_such_loss
from kd.losses import DistillLoss, FeatureLoss, LayersLoss, LogitLoss, SimKDLoss
from kd.losses.base import TopKLogits, class_name
from kd.losses.ranks import in_parallel, share_of_the_step, without_gather
from kd.models import TapSpec
from kd.models.taps import Taps
from kd.tasks import Task
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Answer, Wanted


@dataclass
class Terms:
    """The losses of one batch."""

    total: Tensor
    """The weighted sum, a scalar with a gradient."""
    named: dict[str, Tensor]
    """Each term unweighted (``task_loss``, ``<name>_loss``) and ``loss``, the total; scalars without gradients."""


class Objective(nn.Module):
    """``task_loss_weight * task_loss + sum(loss.weight * loss)``; see :class:`kd.distill.step.Distillation`.

    Args:
        task: what the labels mean.
        losses: distillation losses by name, each with its weight.
        task_loss_weight: weight of the task's own loss, >= 0; 0 for tasks without one.
        taps: the layers that a feature loss of the same name reads.
        teacher_of: the one of several teachers that a loss of that name reads; default: the mean of all, over logits alone:
            of several teachers a loss over features must name one.

    Raises:
        ValueError: a negative weight.
        UserError: nothing to learn from, or a loss with a reserved name; taps for a loss that does not exist are refused
            by :meth:`bind`.
    """

    def __init__(
        self,
        task: Task,
        losses: Mapping[str, DistillLoss] | None = None,
        task_loss_weight: float = 1.0,
        taps: Mapping[str, TapSpec] | None = None,
        teacher_of: Mapping[str, str] | None = None,
    ) -> None:
        """Checks weights and names; the arguments are the class's.

        Parameters of losses are built later, in :meth:`bind`.

        Raises:
            ValueError: a number is out of its range.
            UserError: all weights are 0, or a loss's name is reserved.
        """
        super().__init__()
        if not task_loss_weight >= 0:
            raise ValueError(f"task_loss_weight must be >= 0, got {task_loss_weight}")
        task_loss_weight = task.label_weight(task_loss_weight)
        if task_loss_weight == 0 and not any(loss.weight for loss in (losses or {}).values()):
            raise UserError(
                "model.task_loss_weight: all loss weights are 0, there is nothing to learn from"
            )
        for name in losses or {}:
            if name == "task" or hasattr(nn.ModuleDict(), name):
                raise UserError(
                    f"model.distill_losses.{name}: the name '{name}' is reserved; give another name"
                )
        self.losses = nn.ModuleDict(dict(losses or {}))
        self.task = task
        self.task_loss_weight = task_loss_weight
        self.feature_taps = FeatureTaps(taps or {}, teacher_of or {})
        self._teacher_of = dict(teacher_of or {})
        # Whether a batch may hold pictures without a label: then processes have unequal numbers of labels.
        self.lacks_labels = True
        # Of losses over features, by name: see RunTeacher.feature_weight.
        self._factors: dict[str, float] = {}

    def check_targets(self, batch: Batch) -> None:
        """Refuses training targets that the losses read in a form that the task does not have (UserError)."""
        losses = self.active.values()
        if self.task_loss_weight or any(x.needs_labels or x.needs_class_ids for x in losses):
            self.task.check_targets(batch["target"], len(batch["image"]), training=True)

    # -- building ----------------------------------------------------------------------------------------------------
    def bind(
        self,
        data: DataInfo,
        teacher: RunTeacher | None,
        student: nn.Module,
        taps: Taps,
        trial: Callable[[], Any],
    ) -> None:
        """Passes the data's facts to each loss, builds those over features, refuses what is not defined.

        Called once, by the student that is built around it. A loss over one layer whose tap names several is replaced
        by a loss for each pair of layers.

        Args:
            data: classes and sizes.
            teacher: the run's teacher, or None.
            student: the student's model.
            taps: on the student's model; layers are added.
            trial: runs the student on two black pictures.

        Raises:
            UserError: losses, models and data that do not fit each other.
        """
        check_task(self.task, data)
        self.lacks_labels = data.lacks_labels
        check_listeners(self._teacher_of, self.losses, teacher)
        if teacher is not None:
            teacher.expect(self.task)
        self.task.name_metrics(data.classes)
        self.task.weigh(data.classes, data.counts)
        if data.scales is not None:
            self.task.scale(*zip(*data.scales, strict=True))
        over_features: dict[str, FeatureLoss | LayersLoss] = {}
        for name, loss in self.losses.items():
            self._bind_loss(name, loss, data, teacher)  # type: ignore[arg-type]
            if isinstance(loss, FeatureLoss | LayersLoss):
                over_features[name] = loss
        with self._says_how_to_do_without(over_features):
            self.feature_taps.complete(over_features)
        if teacher is None:
            reading = [name for name in self.losses if name in over_features or name in self.active]
            if reading:
                raise UserError(
                    f"model.teacher: {', '.join(reading)} read its answers, but no teacher is given"
                )
            return
        for name, feature_loss in over_features.items():
            with self._says_how_to_do_without(over_features):
                self.losses[name] = self.feature_taps.build(
                    name, feature_loss, teacher, student, taps, trial
                )
            self._factors[name] = teacher.feature_weight(self._teacher_of.get(name, ALL))

    @contextmanager
    def _says_how_to_do_without(self, over_features: Container[str]) -> Iterator[None]:
        """Adds to a mistake in a loss over features the settings that leave all of them out, where other losses remain.

        Args:
            over_features: names of the losses over features.
        """
        try:
            yield
        except UserError as error:
            others = []
            for name, loss in self.losses.items():
                if name not in over_features:
                    others.append(f"{name}: {class_path(type(loss))}")
            if not others:
                raise
            losses = ", ".join(others)
            raise UserError(
                f"{error}; without losses over features: model.taps=null model.distill_losses='{{{losses}}}'"
            ) from error

    def _bind_loss(
        self, name: str, loss: DistillLoss, data: DataInfo, teacher: RunTeacher | None
    ) -> None:
        """Passes the data's facts to one loss, ``name`` in the settings; raises a UserError where it is not defined for them
        or for the run's teacher.
        """
        key = f"model.distill_losses.{name}"
        if type(loss) is DistillLoss:  # only a weight was given
            raise no_such_loss(name, self.losses)
        check_loss(key, loss, self.task, data, teacher)
        try:
            loss.bind(len(data.classes), data.train, data.ignore_index)
        except ValueError as error:
            raise UserError(f"{key}: {error}") from error

    # -- what it is --------------------------------------------------------------------------------------------------
    @property
    def active(self) -> dict[str, DistillLoss]:
        """The distillation losses with a weight other than 0, by name."""
        return {name: loss for name, loss in self.losses.items() if loss.weight}  # type: ignore[misc]

    @property
    def wanted(self) -> Wanted:
        """What the active losses read of the teacher: losses over logits by teacher, and the layers of its models with their
        shapes for two pictures. False as a condition where they read nothing.
        """
        losses_by_teacher: dict[str, tuple[LogitLoss, ...]] = {}
        for name, loss in self.active.items():
            if not isinstance(loss, LogitLoss):
                continue
            member = self._teacher_of.get(name, ALL)
            losses = losses_by_teacher.get(member, ())
            losses_by_teacher[member] = (*losses, loss)
        layers = self.feature_taps.shapes(self.active)
        return Wanted(losses_by_teacher, layers)

    @property
    def trains_logits(self) -> bool:
        """Whether an active distillation loss reads the student's logits."""
        return any(isinstance(loss, LogitLoss) for loss in self.active.values())

    def softened(self, teacher: Tensor) -> Tensor:
        """The teacher's logits ``(N, C)`` or ``(N, C, H, W)`` as the first active loss over logits compares them.

        Without such a loss they are returned unchanged.
        """
        for loss in self.active.values():
            if isinstance(loss, LogitLoss):
                return loss.softened(teacher)
        return teacher

    @property
    def takeover(self) -> tuple[SimKDLoss, str] | None:
        """SimKD: the active loss that puts a teacher's classifier in place of the student's, and that teacher's name; None
        without such a loss.
        """
        for name, loss in self.active.items():
            if isinstance(loss, SimKDLoss):
                return loss, self._teacher_of.get(name, ALL)
        return None

    @property
    def layers_of_student(self) -> dict[str, tuple[list[str], str]]:
        """What each active loss over features reads, by its name: paths of the student's layers, and which tokens
        (``patch``, ``class``, ``all``).
        """
        return self.feature_taps.layers_of_student(self.active)

    def set_epoch(self, epoch: float, max_epochs: int) -> None:
        """Sets where training is; schedules of weights and temperatures read it.

        Args:
            epoch: from 0, with a fraction inside the epoch where there is one.
            max_epochs: planned.
        """
        for loss in self.losses.modules():
            if isinstance(loss, DistillLoss):
                loss.epoch = float(epoch)
                loss.max_epochs = max_epochs

    # -- a step ------------------------------------------------------------------------------------------------------
    def forward(
        self, logits: Tensor, distilled: Tensor, features: Read, answer: Answer, batch: Batch
    ) -> Terms:
        """The losses of one batch, weighted and summed: ``total = sum_i weight_i * loss_i``.

        Where labels may be missing, a training step of several batches or processes multiplies each ``loss_i`` in the sum
        by its share of the step's targets (:meth:`_shares`).

        Args:
            logits: the student's, for the task, ``(N, C, ...)``.
            distilled: those that distillation reads, likewise; the same, but for a student with two heads.
            features: gives the student's features, by layers and form of tokens; each feature loss calls it.
            answer: the teacher's to the same pictures.
            batch: with ``target``, ``index`` where a loss needs it, and ``window`` where gradients are accumulated over
                batches with missing labels; see :class:`kd.data.batch.Batch`.
        """
        target = batch["target"]
        logits = self.task.fit(logits, target)
        distilled = self.task.fit(distilled, target)

        # Each term's value and weight, by name.
        values: dict[str, Tensor] = {}
        weights: dict[str, float] = {}
        for name, loss in self.active.items():
            weights[name] = self.weight_of(name)
            values[name] = self._term(name, loss, distilled, features, answer, batch)
        if self.task_loss_weight:
            weights["task"] = self.task_loss_weight
            values["task"] = self.task.loss(logits, target)

        # Their weighted sum.
        total = logits.new_zeros((), dtype=torch.float32)
        shares = self._shares(target, list(values), batch.get("window"))
        for (name, value), share in zip(values.items(), shares, strict=True):
            if share is not None:
                value = value * share
            total = total + weights[name] * value

        named = {f"{name}_loss": value.detach() for name, value in values.items()}
        named["loss"] = total.detach()
        return Terms(total, named)

    def _shares(
        self, target: Tensor, terms: list[str], window: Sequence[Tensor] | None
    ) -> Sequence[Tensor | None]:
        """By what each term is multiplied, so that it is a mean over all targets of the optimizer step; None: by nothing.

        In training on data that may lack labels and in several processes all must call it (an all-reduce).

        Args:
            target: of this batch, ``(N, ...)``.
            terms: names of the terms, ``task`` among them.
            window: targets of all batches of the step on this process; None: this batch alone is read.

        Returns:
            A scalar, or None, for each of ``terms``.
        """
        batch_is_the_step = window is None and not in_parallel()
        may_differ = self.lacks_labels and self.training
        if batch_is_the_step or not may_differ:
            return [None] * len(terms)
        # of each term
        counts = []
        window_counts = []
        for name in terms:
            source: Any = self.task if name == "task" else self.losses[name]
            counts.append(source.counted(target))
            if window is not None:
                in_each_batch = torch.stack([source.counted(other) for other in window])
                window_counts.append(in_each_batch.sum())
        if window is None:
            return list(share_of_the_step(torch.stack(counts)))
        return list(share_of_the_step(torch.stack(counts), torch.stack(window_counts), len(window)))

    def weight_of(self, name: str) -> float:
        """The factor of a distillation loss in the total: its own weight; of a loss over features times its teacher's factor
        (:meth:`RunTeacher.feature_weight`).
        """
        return self.losses[name].weight * self._factors.get(name, 1.0)  # type: ignore[operator, return-value]

    @torch.no_grad()
    def held_out(self, features: Read, answer: Answer) -> dict[str, Tensor]:
        """The losses over features of a validation batch, each process by itself.

        Args:
            features: gives the student's, by layers and form of tokens.
            answer: the teacher's features of the same pictures.

        Returns:
            Scalars: ``<name>_loss`` of :attr:`measurable`, unweighted, and ``feature_loss``, their weighted sum.
        """
        losses: dict[str, Tensor] = {}
        weighted_sum = torch.zeros(())
        with without_gather():
            for name in self.measurable:
                student, teacher = self._compared(name, features, answer)
                first = student
                if isinstance(student, list):
                    first = student[0]
                no_target = first.new_zeros(len(first))
                loss = self.losses[name](student, teacher, no_target)
                losses[f"{name}_loss"] = loss
                weighted_sum = weighted_sum + self.weight_of(name) * loss
        losses["feature_loss"] = weighted_sum
        return losses

    @property
    def measurable(self) -> list[str]:
        """Names of the active losses over features that held-out pictures have: not of those that remember training
        pictures.
        """
        return [
            name
            for name, loss in self.active.items()
            if name in self.feature_taps and not loss.needs_index
        ]

    def _compared(self, name: str, features: Read, answer: Answer) -> tuple[Any, Any]:
        """What a loss over features compares: the features of one layer of each model, or lists of them (a loss over several
        layers).

        Args:
            name: of the loss.
            features: gives the student's, by layers and form of tokens.
            answer: holds the teacher's.
        """
        student, teacher = self.feature_taps.read(name, features, answer)
        if isinstance(self.losses[name], LayersLoss):
            return student, teacher
        return student[0], teacher[0]

    def _term(
        self,
        name: str,
        loss: DistillLoss,
        logits: Tensor,
        features: Read,
        answer: Answer,
        batch: Batch,
    ) -> Tensor:
        """One distillation loss of a batch, unweighted: a scalar.

        Args:
            name: of the loss.
            loss: reads logits or features.
            logits: the student's, ``(N, C, ...)``.
            features: gives the student's, by layers and form of tokens.
            answer: the teacher's logits and features.
            batch: targets, and the pictures' numbers where the loss needs them; without these a UserError.
        """
        target = batch["target"]
        extra = {}
        if loss.needs_index:
            if "index" not in batch:
                raise UserError(
                    f"{class_name(loss)} needs the samples' numbers: give batches with an 'index'"
                )
            extra["index"] = batch["index"]
        if not isinstance(loss, LogitLoss):
            student_features, teacher_features = self._compared(name, features, answer)
            return loss(student_features, teacher_features, target, **extra)

        teacher_logits = answer.logits[self._teacher_of.get(name, ALL)]
        if isinstance(teacher_logits, TopKLogits):
            return loss.forward_topk(logits, teacher_logits, target)  # type: ignore[operator]
        if logits.ndim > 2:  # maps: at the target's size
            teacher_logits = self.task.fit(teacher_logits, target)
        compared = self.task.compared
        return loss(compared(logits), compared(teacher_logits), compared(target), **extra)


def class_path(kind: type) -> str:
    """The name by which settings find a class: for kd's own its name alone, else with its module.

    >>> class_path(LogitLoss)
    'LogitLoss'
    """
    if kind.__module__.startswith("kd."):
        return kind.__name__
    return f"{kind.__module__}.{kind.__name__}"

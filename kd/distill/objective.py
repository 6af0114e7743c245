"""What a student learns: the task's loss on the labels and named distillation losses, each with a weight."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kd.data.batch import Batch
from kd.data.info import DataInfo
from kd.distill.fitting import among, check_listeners, check_loss, check_task
from kd.errors import UserError, no_such_loss
from kd.losses import (
    DistillLoss,
    EachLayer,
    FeatureLoss,
    FeatureRegression,
    LayersLoss,
    LogitLoss,
    SimKDLoss,
)
from kd.losses.base import TopKLogits, class_name
from kd.losses.ranks import in_parallel, share_of_the_step, without_gather
from kd.models import TapSpec
from kd.models.taps import Taps, tap_shapes
from kd.tasks import Task
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Answer, Layer, Wanted

Read = Callable[[list[str], str], list[Tensor]]
"""Gives the student's features, one tensor for each path, by the layers' paths and the form of tokens (``patch``,
``class``, ``all``): maps ``(N, C, H, W)``, tokens ``(N, L, D)`` or vectors ``(N, D)`` (:meth:`kd.models.taps.Taps.read`).
"""


@dataclass
class Terms:
    """The losses of one batch."""

    total: Tensor
    """The weighted sum, a scalar with a gradient."""
    named: dict[str, Tensor]
    """Each term unweighted (``task_loss``, ``<name>_loss``) and ``loss``, the total; scalars without gradients."""

    @property
    def loss(self) -> Tensor:
        """The same as :attr:`total`."""
        return self.total


class LayersOfLoss(NamedTuple):
    """The layers that one loss reads."""

    student: list[str]
    """Their paths in the student."""
    tokens: str
    """The form in which they are read: ``patch``, ``class`` or ``all`` tokens; maps have none."""
    teacher: list[Layer]
    """The teacher's, each as (name of the teacher, path, form of tokens)."""
    teacher_shapes: list[tuple[int, ...]]
    """Of the teacher's layers, for two pictures."""


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
        """Checks weights and names; the arguments are the class's. :meth:`bind` builds the losses' parameters."""
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
        self._taps = dict(taps or {})
        self._teacher_of = dict(teacher_of or {})
        self._layers: dict[str, LayersOfLoss] = {}
        """Of each loss over features, by its name, once it is built."""
        self._factors: dict[str, float] = {}
        """Of losses over features, by name: see :meth:`RunTeacher.feature_weight`."""
        self.lacks_labels = True
        """Whether a batch may hold pictures without a label: then processes have unequal numbers of labels."""

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
        self._complete_taps(over_features)
        if teacher is None:
            reading = [name for name in self.losses if name in over_features or name in self.active]
            if reading:
                raise UserError(
                    f"model.teacher: {', '.join(reading)} read its answers, but no teacher is given"
                )
            return
        for name, feature_loss in over_features.items():
            self.losses[name] = self._built(name, feature_loss, teacher, student, taps, trial)
            self._factors[name] = teacher.feature_weight(self._teacher_of.get(name, ALL))

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

    def _complete_taps(self, losses: Mapping[str, DistillLoss]) -> None:
        """Gives each loss over features without a tap the layer that it names itself (``default_tap``), in both models;
        raises a UserError for a tap without a loss, and for a loss without a layer.
        """
        for name in self._taps:
            if name not in losses:
                raise UserError(
                    f"model.taps.{name}: feature loss '{name}' not found{among(losses)}"
                )
        for name, loss in losses.items():
            default = getattr(loss, "default_tap", None)
            if name not in self._taps and default is None:
                raise UserError(
                    f"model.taps.{name}: the loss {name} needs layers (student, teacher)"
                )
            self._taps.setdefault(name, TapSpec(default or "", default or ""))

    def _built(
        self,
        name: str,
        loss: FeatureLoss | LayersLoss,
        teacher: RunTeacher,
        student: nn.Module,
        taps: Taps,
        trial: Callable[[], Any],
    ) -> DistillLoss:
        """Finds a loss's layers in both models, and builds it for the shapes that these give.

        Returns:
            The loss; of a loss over one layer that has several, an :class:`EachLayer` with a copy for each pair of layers.

        Raises:
            UserError: layers that do not exist or that the loss can't compare, or several teachers of which it names none.
        """
        spec = self._taps[name]
        member = self._teacher_of.get(name, ALL)
        if member not in teacher.members:
            raise UserError(
                f"model.teacher_of.{name}: a feature loss reads one teacher, name it"
                f"{among(teacher.members)}"
            )
        key = f"model.taps.{name}"
        taps.add(spec.student, trial, f"{key}.student")
        shapes = tap_shapes(student, taps, spec.student, spec.tokens, trial)
        paths, teacher_shapes = teacher.members[member].listen(
            spec.teacher, spec.tokens, f"{key}.teacher"
        )
        teacher_layers: list[Layer] = [(member, path, spec.tokens) for path in paths]
        self._layers[name] = LayersOfLoss(
            taps.paths(spec.student), spec.tokens, teacher_layers, teacher_shapes
        )
        built: Any = loss
        try:
            if isinstance(loss, FeatureLoss) and len(shapes) == len(teacher_shapes) == 1:
                built.build(shapes[0], teacher_shapes[0])
                return loss
            if isinstance(loss, FeatureLoss):
                built = EachLayer(loss)
            built.build(shapes, teacher_shapes)
            return built
        except ValueError as error:
            raise UserError(f"{key}: {error}") from error

    # -- what it is --------------------------------------------------------------------------------------------------
    @property
    def active(self) -> dict[str, DistillLoss]:
        """The distillation losses with a weight other than 0, by name."""
        return {name: loss for name, loss in self.losses.items() if loss.weight}  # type: ignore[misc]

    @property
    def layers(self) -> dict[str, LayersOfLoss]:
        """The layers that the active losses over features read, by the loss's name."""
        return {name: layers for name, layers in self._layers.items() if self.losses[name].weight}

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
        shapes: dict[Layer, tuple[int, ...]] = {}
        for layers in self.layers.values():
            shapes.update(zip(layers.teacher, layers.teacher_shapes, strict=True))
        return Wanted(losses_by_teacher, shapes)

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

    def regressions(
        self, features: Read, answer: Answer
    ) -> Iterator[tuple[FeatureRegression, Tensor, Tensor]]:
        """The active losses that regress a layer, each with what student and teacher gave there for a batch.

        Args:
            features: gives the student's, by layers and form of tokens.
            answer: of the teacher to the same pictures.

        Yields:
            The loss of one layer (of a loss over several layers one after another), the student's features there, and
            the teacher's.
        """
        for name in self.layers:
            loss: Any = self.losses[name]
            of_each_layer = [loss]
            if isinstance(loss, EachLayer):
                of_each_layer = list(loss.losses)
            if isinstance(of_each_layer[0], FeatureRegression):
                student, teacher = self._features(name, features, answer)
                yield from zip(of_each_layer, student, teacher, strict=True)

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
        by its share of the step's targets (:meth:`_by_share`).

        Args:
            logits: the student's, for the task, ``(N, C, ...)``.
            distilled: those that distillation reads, likewise; the same, but for a student with two heads.
            features: gives the student's features; each feature loss calls it.
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
            if isinstance(loss, LogitLoss):
                values[name] = self._of_logits(name, loss, distilled, answer, batch)
            else:
                values[name] = self._of_features(name, features, answer, batch)
        if self.task_loss_weight:
            weights["task"] = self.task_loss_weight
            values["task"] = self.task.loss(logits, target)

        # Their weighted sum.
        total = logits.new_zeros((), dtype=torch.float32)
        counted: dict[str, Tensor] = values
        window = batch.get("window")
        if self.lacks_labels and self.training and (window is not None or in_parallel()):
            counted = self._by_share(values, target, window)
        for name, value in counted.items():
            total = total + weights[name] * value

        named = {f"{name}_loss": value.detach() for name, value in values.items()}
        named["loss"] = total.detach()
        return Terms(total, named)

    def _of_logits(
        self, name: str, loss: LogitLoss, logits: Tensor, answer: Answer, batch: Batch
    ) -> Tensor:
        """One loss over logits of a batch, unweighted: a scalar.

        Args:
            name: of the loss.
            loss: of that name.
            logits: the student's, ``(N, C, ...)``.
            answer: holds the teacher's.
            batch: targets, and the pictures' numbers where the loss needs them.
        """
        target = batch["target"]
        teacher_logits = answer.logits[self._teacher_of.get(name, ALL)]
        if isinstance(teacher_logits, TopKLogits):
            return loss.forward_topk(logits, teacher_logits, target)  # type: ignore[operator]
        if logits.ndim > 2:  # maps: at the target's size
            teacher_logits = self.task.fit(teacher_logits, target)
        compared = self.task.compared
        compared_logits = compared(logits), compared(teacher_logits), compared(target)
        extra = {}
        if loss.needs_index:
            extra = self._index(loss, batch)
        return loss(*compared_logits, **extra)

    def _of_features(self, name: str, features: Read, answer: Answer, batch: Batch) -> Tensor:
        """One loss over features of a batch, unweighted: a scalar.

        Args:
            name: of the loss.
            features: gives the student's.
            answer: holds the teacher's.
            batch: targets, and the pictures' numbers where the loss needs them.

        Raises:
            UserError: the loss fails: it names the loss, the layers and their shapes.
        """
        loss: Any = self.losses[name]
        student, teacher = self._features(name, features, answer)
        given: tuple[Any, Any] = (student, teacher)
        if not isinstance(loss, LayersLoss):
            given = student[0], teacher[0]
        extra = {}
        if loss.needs_index:
            extra = self._index(loss, batch)
        try:
            return loss(*given, batch["target"], **extra)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError) as error:
            if type(loss).__module__.startswith("kd."):
                raise
            layers = self._layers[name]
            students = ", ".join(layers.student)
            teachers = ", ".join(path for _, path, _ in layers.teacher)
            shapes = ", ".join(str(tuple(x.shape)) for x in (*student, *teacher))
            raise UserError(
                f"model.distill_losses.{name}: {class_name(loss)} over the student's {students} and the teacher's "
                f"{teachers}, of the shapes {shapes}: {error}"
            ) from error

    def _features(
        self, name: str, features: Read, answer: Answer
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What a loss over features compares: the student's and the teacher's features, paired layer by layer."""
        layers = self._layers[name]
        teacher = [answer.features[layer] for layer in layers.teacher]
        return features(layers.student, layers.tokens), teacher

    @staticmethod
    def _index(loss: DistillLoss, batch: Batch) -> dict[str, Tensor]:
        """The pictures' numbers, which a loss needs, by the argument's name."""
        if "index" not in batch:
            raise UserError(
                f"{class_name(loss)} needs the samples' numbers: give batches with an 'index'"
            )
        return {"index": batch["index"]}

    def _by_share(
        self, values: Mapping[str, Tensor], target: Tensor, window: Sequence[Tensor] | None
    ) -> dict[str, Tensor]:
        """Each term times its share, so that it is a mean over all targets of the optimizer step.

        In several processes all must call it (an all-reduce).

        Args:
            values: the terms by name, ``task`` among them.
            target: of this batch, ``(N, ...)``.
            window: targets of all batches of the step on this process; None: this batch alone is read.
        """
        counts = []
        window_counts = []
        for name in values:
            source: Any = self.task if name == "task" else self.losses[name]
            counts.append(source.counted(target))
            if window is not None:
                in_each_batch = torch.stack([source.counted(other) for other in window])
                window_counts.append(in_each_batch.sum())
        if window is None:
            shares = share_of_the_step(torch.stack(counts))
        else:
            of_window = torch.stack(window_counts)
            shares = share_of_the_step(torch.stack(counts), of_window, len(window))
        shared = {}
        for (name, value), share in zip(values.items(), shares, strict=True):
            shared[name] = value * share
        return shared

    def weight_of(self, name: str) -> float:
        """The factor of a distillation loss in the total: its own weight; of a loss over features times its teacher's factor
        (:meth:`RunTeacher.feature_weight`).
        """
        return self.losses[name].weight * self._factors.get(name, 1.0)  # type: ignore[operator, return-value]

    @property
    def measurable(self) -> list[str]:
        """Names of the active losses over features that held-out pictures have: not of those that remember training
        pictures.
        """
        return [name for name in self.layers if not self.losses[name].needs_index]

    @torch.no_grad()
    def held_out(self, features: Read, answer: Answer, count: int) -> dict[str, Tensor]:
        """The losses over features of a validation batch, each process by itself.

        Args:
            features: gives the student's, by layers and form of tokens.
            answer: the teacher's features of the same pictures.
            count: of the pictures.

        Returns:
            Scalars: ``<name>_loss`` of :attr:`measurable`, unweighted, and ``feature_loss``, their weighted sum.
        """
        losses: dict[str, Tensor] = {}
        weighted_sum = torch.zeros(())
        with without_gather():
            for name in self.measurable:
                no_target: Batch = {"target": torch.zeros(count)}
                loss = self._of_features(name, features, answer, no_target)
                losses[f"{name}_loss"] = loss
                weighted_sum = weighted_sum + self.weight_of(name) * loss
        losses["feature_loss"] = weighted_sum
        return losses

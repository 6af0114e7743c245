"""What a student learns: the task's loss on the labels and named distillation losses, each with a weight."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kd.data.batch import Batch
from kd.data.info import DataInfo
from kd.distill.fitting import check_fit
from kd.errors import UserError, among
from kd.losses import DistillLoss, FeatureLoss, LogitLoss, SimKDLoss
from kd.losses.base import TopKLogits
from kd.losses.ranks import without_gather
from kd.models import TapSpec
from kd.models.taps import Taps
from kd.tasks import Task
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Answer, Layer, Wanted


class LayersOfLoss(NamedTuple):
    """The layers that one loss reads."""

    student: list[str]
    """Their paths in the student."""
    tokens: str
    """The form in which they are read: ``patch``, ``class`` or ``all`` tokens; maps have none."""
    teacher: list[Layer]
    """The teacher's, each as (name of the teacher, path, form of tokens)."""


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
        """Checks weights and names, and freezes losses of weight 0; arguments and errors as of the class.

        :meth:`bind` builds the losses' parameters.
        """
        super().__init__()
        if not task_loss_weight >= 0:
            raise ValueError(f"task_loss_weight must be >= 0, got {task_loss_weight}")
        task_loss_weight = task.label_weight(task_loss_weight)
        losses = losses or {}
        if task_loss_weight == 0 and not any(loss.weight for loss in losses.values()):
            raise UserError(
                "model.task_loss_weight: all loss weights are 0, there is nothing to learn from"
            )
        for name in losses:
            if name == "task" or hasattr(nn.ModuleDict(), name):
                raise UserError(
                    f"model.distill_losses.{name}: the name '{name}' is reserved; give another name"
                )
            if not losses[name].weight:
                losses[name].requires_grad_(False)  # DDP would wait for its gradients
        self.losses = nn.ModuleDict(losses)
        self.task = task
        self.task_loss_weight = task_loss_weight
        self.lacks_labels = True
        """Whether a batch may hold pictures without a label: then processes have unequal numbers of labels."""
        self._taps = dict(taps or {})
        self._teacher_of = dict(teacher_of or {})
        self.layers: dict[str, LayersOfLoss] = {}
        """The layers that the active losses over features read, by the loss's name."""
        self.wanted = Wanted({}, {})
        """What the active losses read of the teacher: losses over logits by teacher, and the layers of its models with
        their shapes for two pictures. False as a condition where they read nothing.
        """

    # -- building ----------------------------------------------------------------------------------------------------
    def bind(self, data: DataInfo, teacher: RunTeacher | None, taps: Taps) -> None:
        """Passes the data's facts to task and losses, builds losses over features, refuses what is not defined. A loss of
        weight 0 is not built.

        Sets :attr:`layers`, :attr:`wanted` and :attr:`lacks_labels`. Called once, by the student that is built around it.

        Args:
            data: classes and sizes.
            teacher: the run's teacher, or None.
            taps: on the student's model; layers are added.

        Raises:
            UserError: losses, models and data that do not fit each other.
        """
        self.taps = taps
        losses: Any = dict(self.losses)
        check_fit(self.task, losses, self._teacher_of, data, teacher)
        self.lacks_labels = data.lacks_labels
        self.task.name_metrics(data.classes)
        self.task.weigh(data.classes, data.counts)
        if data.scales is not None:
            self.task.scale(*zip(*data.scales, strict=True))
        for name, loss in self.active.items():
            try:
                loss.bind(len(data.classes), data.train, data.ignore_index)
            except ValueError as error:
                raise UserError(f"model.distill_losses.{name}: {error}") from error

        over_features = [name for name, loss in losses.items() if isinstance(loss, FeatureLoss)]
        for name in self._taps:
            if name not in over_features:
                raise UserError(
                    f"model.taps.{name}: feature loss '{name}' not found{among(over_features)}"
                )
        if teacher is None:
            if losses:
                raise UserError(
                    f"model.teacher: {', '.join(losses)} read its answers, but no teacher is given"
                )
            return
        teacher.expect(self.task)  # which decides whether its outputs may be probabilities
        logits: dict[str, list[LogitLoss]] = {}
        shapes: dict[Layer, tuple[int, ...]] = {}
        for name, loss in self.active.items():
            if isinstance(loss, FeatureLoss):
                shapes |= self._build(name, loss, teacher)
            elif isinstance(loss, LogitLoss):
                logits.setdefault(self._teacher_of.get(name, ALL), []).append(loss)
        self.wanted = Wanted(logits, shapes)

    def _build(
        self, name: str, loss: FeatureLoss, teacher: RunTeacher
    ) -> dict[Layer, tuple[int, ...]]:
        """Finds a loss's layers in both models, keeps them in :attr:`layers`, and builds the loss for their shapes. SimKD
        also gets a copy of the teacher's classifier.

        Returns:
            The shapes of the teacher's layers, for two pictures.

        Raises:
            UserError: no layers, or layers that do not exist or that the loss can't compare; several teachers of which it
                names none; or a teacher that gives its answers alone, no layers.
        """
        key = f"model.taps.{name}"
        spec = self._taps.get(name)
        if spec is None:  # a loss may name a layer itself
            if loss.default_tap is None:
                raise UserError(f"{key}: the loss {name} needs layers (student, teacher)")
            spec = TapSpec(loss.default_tap, loss.default_tap)
        member = self._teacher_of.get(name, ALL)
        if member not in teacher.members:
            raise UserError(
                f"model.teacher_of.{name}: a feature loss reads one teacher, name it"
                f"{among(teacher.members)}"
            )
        source = teacher.members[member]
        if source.closed:
            raise UserError(
                f"{source.key}: {source.arch} {source.closed}; {name} reads layers: "
                "'model.distill_losses={kd: KDLoss}' model.taps={} learns from its answers alone"
            )
        paths, shapes = self.taps.paths_and_shapes(spec.student, spec.tokens, f"{key}.student")
        teacher_paths, teacher_shapes = source.taps.paths_and_shapes(
            spec.teacher, spec.tokens, f"{key}.teacher"
        )
        layers: list[Layer] = [(member, path, spec.tokens) for path in teacher_paths]
        self.layers[name] = LayersOfLoss(paths, spec.tokens, layers)
        try:
            loss.build_layers(shapes, teacher_shapes)
        except ValueError as error:
            raise UserError(f"{key}: {error}") from error
        if isinstance(loss, SimKDLoss):
            weight, bias = source.classifier()
            loss.classifier = (
                weight.detach().clone(),
                bias.detach().clone(),
            )  # as loaded, in float32
        return dict(zip(layers, teacher_shapes, strict=True))

    # -- what it is --------------------------------------------------------------------------------------------------
    @property
    def active(self) -> dict[str, DistillLoss]:
        """The distillation losses with a weight other than 0, by name."""
        return {name: loss for name, loss in self.losses.items() if loss.weight}  # type: ignore[misc]

    @property
    def trains_logits(self) -> bool:
        """Whether an active distillation loss reads the student's logits."""
        return any(isinstance(loss, LogitLoss) for loss in self.active.values())

    @property
    def takeover(self) -> SimKDLoss | None:
        """SimKD: the active loss that puts a teacher's classifier in place of the student's; None without one."""
        losses = self.active.values()
        return next((loss for loss in losses if isinstance(loss, SimKDLoss)), None)

    @property
    def measurable(self) -> list[str]:
        """Names of the active losses over features that can be computed on held-out pictures: not of those that remember
        training pictures.
        """
        return [name for name in self.layers if not self.losses[name].needs_index]

    def softened(self, teacher: Tensor) -> Tensor:
        """The teacher's logits ``(N, C)`` or ``(N, C, H, W)`` as the first active loss over logits compares them.

        Without such a loss they are returned unchanged.
        """
        for loss in self.active.values():
            if isinstance(loss, LogitLoss):
                return loss.softened(teacher)
        return teacher

    def set_epoch(self, epoch: float, max_epochs: int) -> None:
        """Sets where training is: a loss's warm-up (``DKDLoss``) and temperature (``KDLoss``) follow it. The LightningModule
        calls it before each step; a loop of one's own must call it where a loss changes over the epochs.

        Args:
            epoch: from 0.
            max_epochs: planned.
        """
        for loss in self.losses.modules():
            if isinstance(loss, DistillLoss):
                loss.epoch = float(epoch)
                loss.max_epochs = max_epochs

    # -- of a batch --------------------------------------------------------------------------------------------------
    def check_targets(self, batch: Batch) -> None:
        """Raises a UserError for training targets in another form than the task's, where any loss reads targets."""
        losses = self.active.values()
        if self.task_loss_weight or any(x.needs_labels or x.needs_class_ids for x in losses):
            self.task.check_targets(batch["target"], len(batch["image"]), training=True)

    def value(
        self,
        name: str,
        logits: Tensor | None,
        caught: dict[str, Tensor],
        answer: Answer,
        batch: Batch,
    ) -> Tensor:
        """One distillation loss of a batch, unweighted: a scalar.

        Args:
            name: of the loss.
            logits: the student's, of maps at the target's size; None where no loss reads them.
            caught: what the student's layers gave (:class:`kd.models.taps.Taps`).
            answer: the teacher's.
            batch: with ``target``, and ``index`` where the loss needs the pictures' numbers.

        Raises:
            UserError: a user's own loss over features fails: the message names the loss, the layers and their shapes.
        """
        loss: Any = self.losses[name]
        target = batch["target"]
        extra = {}
        if loss.needs_index:
            extra["index"] = batch.get("index")
        if isinstance(loss, FeatureLoss):
            pair = self.features(name, caught, answer)
            try:
                return loss(*pair, target, **extra)
            except (ValueError, RuntimeError) as error:
                is_own = not type(loss).__module__.startswith("kd.")
                if is_own and not isinstance(error, torch.OutOfMemoryError):
                    raise self._named_error(name, pair, error) from error
                raise
        assert logits is not None
        teacher_logits = answer.logits[self._teacher_of.get(name, ALL)]
        if isinstance(teacher_logits, TopKLogits):
            return loss.forward_topk(logits, teacher_logits, target)
        if logits.ndim > 2:  # maps: at the target's size
            teacher_logits = self.task.fit(teacher_logits, target)
        if loss.for_numbers:  # in standard deviations of the training targets
            standardized = self.task.compared
            logits = standardized(logits)
            teacher_logits = standardized(teacher_logits)
            target = standardized(target)
        return loss(logits, teacher_logits, target, **extra)

    def features(
        self, name: str, caught: dict[str, Tensor], answer: Answer
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What a loss over features compares: the student's and the teacher's features, one entry a layer.

        Each is a map ``(N, C, H, W)``, tokens ``(N, L, D)`` or a vector ``(N, D)``. Arguments as of :meth:`value`.
        """
        layers = self.layers[name]
        student = self.taps.read(caught, layers.student, layers.tokens)
        return student, [answer.features[layer] for layer in layers.teacher]

    def _named_error(
        self, name: str, pair: tuple[list[Tensor], list[Tensor]], error: Exception
    ) -> UserError:
        """The ``error`` that a user's loss over features raised for a ``pair`` of features, as a UserError that also names
        the loss, its layers and their shapes.
        """
        layers = self.layers[name]
        of_teacher = [path for _, path, _ in layers.teacher]
        paths = [*layers.student, *of_teacher]
        of_student, teachers = pair
        features = [*of_student, *teachers]
        shapes = [tuple(x.shape) for x in features]
        read = [f"{path} {shape}" for path, shape in zip(paths, shapes, strict=True)]
        kind = type(self.losses[name]).__name__
        return UserError(
            f"model.distill_losses.{name}: {kind} over {', '.join(read)}, the student's layers first: {error}"
        )

    def weighted(self, values: Mapping[str, Tensor]) -> Tensor:
        """The sum of terms by name (``task`` for the task's own), each times its weight: a scalar."""
        total = torch.zeros(())
        for name, value in values.items():
            weight: Any = self.task_loss_weight if name == "task" else self.losses[name].weight
            total = total + weight * value
        return total

    @torch.no_grad()
    def held_out(self, caught: dict[str, Tensor], answer: Answer, count: int) -> dict[str, Tensor]:
        """The losses over features of a validation batch, which validate a student without a classifier; each process by
        itself. They read no labels: the target is a stand-in.

        Args:
            caught: what the student's layers gave.
            answer: the teacher's features of the same pictures.
            count: of the pictures.

        Returns:
            Scalars: ``<name>_loss`` of :attr:`measurable`, unweighted, and ``feature_loss``, their weighted sum.
        """
        batch: Batch = {"target": torch.zeros(count)}
        values = {}
        with without_gather():
            for name in self.measurable:
                values[name] = self.value(name, None, caught, answer, batch)
        losses = {f"{name}_loss": value for name, value in values.items()}
        return {**losses, "feature_loss": self.weighted(values)}

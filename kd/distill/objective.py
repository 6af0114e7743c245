"""What a student learns: the task's loss on the labels and named distillation losses, each with a weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kd.data.batch import DataInfo
from kd.distill.fitting import among, check_dropping, check_listeners, check_loss, check_task
from kd.errors import UserError
from kd.losses import DistillLoss, EachLayer, FeatureLoss, LayersLoss, LogitLoss, SimKDLoss
from kd.losses.functional import teacher_shares
from kd.losses.ranks import alone
from kd.losses.topk import TopKLogits
from kd.models.taps import Taps, TapSpec, tap_shapes
from kd.tasks import Task
from kd.teachers.answer import ALL, Answer, Layer, Wanted


@dataclass
class Terms:
    """What one batch cost.

    Attributes:
        total: the weighted sum, a scalar with a gradient.
        named: each term unweighted (``task_loss``, ``<name>_loss``) and ``loss``, the total; without gradients.
    """

    total: Tensor
    named: dict[str, Tensor]


class Objective(nn.Module):
    """``task_loss_weight * task_loss + sum(loss.weight * loss)``.

    Args:
        task: what the labels mean.
        losses: distillation losses by name, each with its weight.
        task_loss_weight: weight of the task's own loss, >= 0.
        taps: the layers that a feature loss of the same name looks at.
        teacher_of: the one of several teachers that a loss of that name listens to; default: the mean of all.
        teacher_drop: the chance in [0, 1] that a picture does without any teacher but the one with the largest loss
            (:func:`kd.losses.functional.teacher_shares`).

    Raises:
        ValueError: a negative weight, or no chance.
        UserError: nothing to learn from, or taps for a loss that is not there.
    """

    def __init__(
        self,
        task: Task,
        losses: Mapping[str, DistillLoss] | None = None,
        task_loss_weight: float = 1.0,
        taps: Mapping[str, TapSpec] | None = None,
        teacher_of: Mapping[str, str] | None = None,
        teacher_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 <= teacher_drop <= 1:
            raise ValueError(f"teacher_drop must be >= 0 and <= 1, got {teacher_drop}")
        if not task_loss_weight >= 0:
            raise ValueError(f"task_loss_weight must be >= 0, got {task_loss_weight}")
        if task_loss_weight == 0 and not any(loss.weight for loss in (losses or {}).values()):
            raise UserError("model.task_loss_weight: all loss weights are 0, there is nothing to learn from")
        for name in losses or {}:
            if name == "task" or hasattr(nn.ModuleDict(), name):
                raise UserError(f"model.distill_losses.{name}: the name '{name}' is taken, give the loss another")
        self.losses = nn.ModuleDict(dict(losses or {}))
        self.task = task
        self.task_loss_weight = task_loss_weight
        self.teacher_drop = teacher_drop
        self._taps, self._teacher_of = dict(taps or {}), dict(teacher_of or {})
        self._factors: dict[str, float] = {}  # of headless teachers, which have no mean, each one's weight
        self._looks: dict[str, tuple[list[str], list[Layer]]] = {}  # loss -> the student's layers, the teacher's
        self._shapes: dict[str, dict[Layer, tuple[int, ...]]] = {}

    # -- building ----------------------------------------------------------------------------------------------------

    def bind(self, data: DataInfo, teacher: Any, student: nn.Module, taps: Taps, trial: Callable[[], Any]) -> None:
        """Tells each loss of the data, and builds those over features; refuses what is not defined.

        Args:
            data: classes and sizes.
            teacher: the teacher (:class:`kd.teachers.Teacher`), or None.
            student: the student's model.
            taps: on the student's model; layers are added.
            trial: a small forward of the student.

        Raises:
            UserError: losses, models and data that do not fit each other.
        """
        self._check(data, teacher)
        self.task.weigh(data.classes, data.counts)
        for name, loss in self.losses.items():
            self._bind_loss(name, loss, data, teacher)  # type: ignore[arg-type]
        over_features = [n for n, loss in self.losses.items() if isinstance(loss, (FeatureLoss, LayersLoss))]
        self._complete_taps(over_features)
        for name in over_features:
            taps.add(self._taps[name].student)
            self._build(name, self._member(name, teacher), student, taps, trial)
            if not teacher.has_head and len(teacher.members) > 1:
                self._factors[name] = self._member(name, teacher).weight

    def _check(self, data: DataInfo, teacher: Any) -> None:
        check_task(self.task, data)
        check_listeners(self._teacher_of, self.losses, teacher)
        if self.teacher_drop:
            check_dropping(self.active, self._teacher_of)

    def _bind_loss(self, name: str, loss: DistillLoss, data: DataInfo, teacher: Any) -> None:
        key = f"model.distill_losses.{name}"
        if type(loss) is DistillLoss:  # only a weight was given
            others = among(other for other in self.losses if other != name)
            raise UserError(f"{key}: there is no loss '{name}'{others}; to add one: {key}=KDLoss")
        check_loss(key, loss, self.task, data, teacher)
        try:
            loss.bind(len(data.classes), data.train, data.ignore_index)
        except ValueError as error:
            raise UserError(f"{key}: {error}") from error

    def _complete_taps(self, over_features: list[str]) -> None:
        for name in self._taps:
            if name not in over_features:
                raise UserError(f"model.taps.{name}: there is no feature loss '{name}'{among(over_features)}")
        for name in over_features:
            default = getattr(self.losses[name], "default_tap", None)
            if name not in self._taps and default is None:
                raise UserError(f"model.taps.{name}: the loss {name} needs the layers to look at (student, teacher)")
            self._taps.setdefault(name, TapSpec(default or "", default or ""))

    def _member(self, name: str, teacher: Any) -> Any:
        member = self._teacher_of.get(name, ALL)
        if member not in teacher.members:
            raise UserError(f"model.teacher_of.{name}: a feature loss looks at one teacher, say which"
                            f"{among(teacher.members)}")  # fmt: skip
        return teacher.members[member]

    def _build(self, name: str, teacher: Any, student: nn.Module, taps: Taps, trial: Callable[[], Any]) -> None:
        spec, member = self._taps[name], self._teacher_of.get(name, ALL)
        student_shapes = tap_shapes(student, taps, spec.student, spec.tokens, trial)
        layers, teacher_shapes = teacher.listen(spec.teacher, spec.tokens)
        self._looks[name] = (taps.paths(spec.student), [(member, layer, spec.tokens) for layer in layers])
        self._shapes[name] = dict(zip(self._looks[name][1], teacher_shapes, strict=True))
        loss: Any = self.losses[name]
        try:
            if isinstance(loss, LayersLoss):
                loss.build(student_shapes, teacher_shapes)
            elif len(student_shapes) == len(teacher_shapes) == 1:
                loss.build(student_shapes[0], teacher_shapes[0])
            else:
                each = EachLayer(loss)
                each.build(student_shapes, teacher_shapes)
                self.losses[name] = each
        except ValueError as error:
            raise UserError(f"model.taps.{name}: {error}") from error

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def active(self) -> dict[str, DistillLoss]:
        """The distillation losses with a weight."""
        return {name: loss for name, loss in self.losses.items() if loss.weight}  # type: ignore[misc]

    @property
    def wanted(self) -> Wanted:
        """What the active losses look at of the teacher."""
        shapes = {k: s for name in self.active for k, s in self._shapes.get(name, {}).items()}
        return Wanted(any(isinstance(loss, LogitLoss) for loss in self.active.values()), shapes)

    @property
    def trains_logits(self) -> bool:
        """Whether a distillation loss looks at the student's logits."""
        return any(isinstance(loss, LogitLoss) for loss in self.active.values())

    @property
    def taken_classifier(self) -> SimKDLoss | None:
        """SimKD: the loss that puts the teacher's classifier in place of the student's."""
        return next((loss for loss in self.losses.values() if isinstance(loss, SimKDLoss)), None)

    @property
    def lender(self) -> str:
        """SimKD: the teacher whose classifier is taken over."""
        name = next(n for n, loss in self.losses.items() if loss is self.taken_classifier)
        return self._teacher_of.get(name, ALL)

    @property
    def layers_of_student(self) -> dict[str, tuple[list[str], str]]:
        """What each active loss over features looks at: the student's layers and their form."""
        return {name: (self._looks[name][0], self._taps[name].tokens) for name in self.active if name in self._looks}

    def set_epoch(self, epoch: float, max_epochs: int) -> None:
        """Tells the losses where training is: warm-ups and moving temperatures follow it."""
        for loss in self.losses.modules():
            if isinstance(loss, DistillLoss):
                loss.epoch, loss.max_epochs = float(epoch), max_epochs

    # -- a step ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        logits: Tensor,
        distilled: Tensor,
        features: Callable[[list[str], str], list[Tensor]],
        answer: Answer,
        target: Tensor,
        index: Tensor | None = None,
    ) -> Terms:
        """The losses of one batch.

        Args:
            logits: the student's, for the task.
            distilled: those that distillation looks at (the same, but for a student with two heads).
            features: gives the student's, by layers and form.
            answer: the teacher's.
            target: see :class:`kd.data.batch.Batch`.
            index: the samples' numbers.
        """
        if self.teacher_drop and self.training:
            return self._with_dropping(features, answer)
        logits, distilled = self.task.fit(logits, target), self.task.fit(distilled, target)
        terms = {
            name: (self.weight_of(name), self._term(name, loss, distilled, features, answer, target, index))
            for name, loss in self.active.items()
        }
        if self.task_loss_weight:
            terms["task"] = (self.task_loss_weight, self.task.loss(logits, target))
        total = logits.new_zeros((), dtype=torch.float32)
        for weight, value in terms.values():
            total = total + weight * value
        named = {f"{name}_loss": value.detach() for name, (_, value) in terms.items()} | {"loss": total.detach()}
        return Terms(total, named)

    def weight_of(self, name: str) -> float:
        """The factor of a distillation loss in the total."""
        return self.losses[name].weight * self._factors.get(name, 1.0)  # type: ignore[operator, return-value]

    def _with_dropping(self, features: Callable[[list[str], str], list[Tensor]], answer: Answer) -> Terms:
        """Each picture learns from the teachers that :func:`teacher_shares` leaves it; with all left it is the sum."""
        of_teacher: dict[str, Tensor] = {}
        named = {}
        for name, loss in self.active.items():
            layers, keys = self._looks[name]
            own, theirs = features(layers, self._taps[name].tokens)[0], answer.features[keys[0]]
            values = loss.per_picture(own, theirs)  # type: ignore[operator]
            named[f"{name}_loss"] = values.detach().mean()
            member = self._teacher_of[name]
            of_teacher[member] = of_teacher.get(member, 0.0) + self.weight_of(name) * values
        losses = torch.stack(list(of_teacher.values()))
        total = len(losses) * (teacher_shares(losses, self.teacher_drop) * losses).sum()
        return Terms(total, named | {"loss": total.detach()})

    @torch.no_grad()
    def held_out(self, features: Callable[[list[str], str], list[Tensor]], answer: Answer) -> dict[str, Tensor]:
        """The losses over features of a validation batch, each process by itself.

        Args:
            features: gives the student's, by layers and form.
            answer: the teacher's.

        Returns:
            ``<name>_loss`` of :attr:`measurable`, and ``feature_loss``, their weighted sum.
        """
        found, total = {}, torch.zeros(())
        with alone():
            for name in self.measurable:
                layers, keys = self._looks[name]
                own, theirs = features(layers, self._taps[name].tokens), [answer.features[key] for key in keys]
                loss: Any = self.losses[name]
                nothing = own[0].new_zeros(len(own[0]))
                many = isinstance(loss, LayersLoss)
                value = loss(own, theirs, nothing) if many else loss(own[0], theirs[0], nothing)
                found[f"{name}_loss"] = value
                total = total.to(value.device) + self.weight_of(name) * value
        return found | {"feature_loss": total}

    @property
    def measurable(self) -> list[str]:
        """The active losses over features that held-out pictures have: not those that remember training pictures."""
        return [name for name, loss in self.active.items() if name in self._looks and not loss.needs_index]

    def _term(
        self,
        name: str,
        loss: DistillLoss,
        logits: Tensor,
        features: Callable[[list[str], str], list[Tensor]],
        answer: Answer,
        target: Tensor,
        index: Tensor | None,
    ) -> Tensor:
        extra: dict[str, Tensor] = {}
        if loss.needs_index:
            if index is None:
                raise UserError(f"{type(loss).__name__} needs the samples' numbers: give batches with an 'index'")
            extra = {"index": index}
        if isinstance(loss, LogitLoss):
            theirs = answer.logits[self._teacher_of.get(name, ALL)]
            if isinstance(theirs, TopKLogits):
                return loss.forward_topk(logits, theirs, target)  # type: ignore[operator]
            return loss(logits, self.task.fit(theirs, target) if logits.ndim > 2 else theirs, target, **extra)
        layers, keys = self._looks[name]
        student, teacher = features(layers, self._taps[name].tokens), [answer.features[key] for key in keys]
        if isinstance(loss, LayersLoss):
            return loss(student, teacher, target, **extra)
        return loss(student[0], teacher[0], target, **extra)

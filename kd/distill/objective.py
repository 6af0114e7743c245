"""What a student learns: the task's loss on the labels and named distillation losses, each with a weight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kd.data.batch import Batch, DataInfo
from kd.distill.feature_taps import FeatureTaps, Read
from kd.distill.fitting import among, check_dropping, check_listeners, check_loss, check_task
from kd.errors import UserError
from kd.losses import DistillLoss, FeatureLoss, LayersLoss, LogitLoss, SimKDLoss
from kd.losses.base import TopKLogits
from kd.losses.functional import teacher_shares
from kd.losses.ranks import in_parallel, share_of_the_step, without_gather
from kd.models import TapSpec
from kd.models.taps import Taps
from kd.tasks import Task
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Answer, Wanted


@dataclass
class Terms:
    """What one batch cost: ``total`` has a gradient; ``named`` has each term unweighted, and ``loss``, detached.

    Attributes:
        total: the weighted sum, a scalar with a gradient.
        named: each term unweighted (``task_loss``, ``<name>_loss``) and ``loss``, the total; without gradients.
    """

    total: Tensor
    named: dict[str, Tensor]


class Objective(nn.Module):
    """``task_loss_weight * task_loss + sum(loss.weight * loss)``; see :class:`kd.distill.step.Distillation`.

    Args:
        task: what the labels mean.
        losses: distillation losses by name, each with its weight.
        task_loss_weight: weight of the task's own loss, >= 0; 0 for tasks without one.
        taps: the layers that a feature loss of the same name reads.
        teacher_of: the one of several teachers that a loss of that name reads; default: the mean of all.
        teacher_drop: probability that a picture does without every teacher but the one with the largest loss
            (:func:`kd.losses.functional.teacher_shares`).

    Raises:
        ValueError: a negative weight, or a probability outside [0, 1].
        UserError: nothing to learn from, or taps for a loss that does not exist.
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
        self.teacher_drop = teacher_drop  # the chance in [0, 1] of teacher_shares()
        self.feature_taps, self._teacher_of = (
            FeatureTaps(taps or {}, teacher_of or {}),
            dict(teacher_of or {}),
        )
        self.lacks_labels = True  # or may: then processes have unequal numbers of them in a batch
        self._factors: dict[
            str, float
        ] = {}  # of losses over features, see RunTeacher.feature_weight

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

        Args:
            data: classes and sizes.
            teacher: the run's teacher, or None.
            student: the student's model.
            taps: on the student's model; layers are added.
            trial: runs the student on two small pictures.

        Raises:
            UserError: losses, models and data that do not fit each other.
        """
        check_task(self.task, data)
        self.lacks_labels = data.lacks_labels
        check_listeners(self._teacher_of, self.losses, teacher)
        if teacher is not None:
            teacher.expect(self.task)
        if self.teacher_drop:
            check_dropping(self.active, self._teacher_of, self.task_loss_weight)
        self.task.name_metrics(data.classes)
        self.task.weigh(data.classes, data.counts)
        if data.scales is not None:
            self.task.scale(*zip(*data.scales, strict=True))
        for name, loss in self.losses.items():
            self._bind_loss(name, loss, data, teacher)  # type: ignore[arg-type]
        over_features = {
            n: x for n, x in self.losses.items() if isinstance(x, (FeatureLoss, LayersLoss))
        }
        self.feature_taps.complete(over_features)
        if teacher is None:
            if over_features:
                raise UserError(
                    f"model.teacher: {', '.join(over_features)} read its features, but no teacher is given"
                )
            return
        for name, loss in over_features.items():
            self.losses[name] = self.feature_taps.build(name, loss, teacher, student, taps, trial)
            self._factors[name] = teacher.feature_weight(self._teacher_of.get(name, ALL))

    def _bind_loss(
        self, name: str, loss: DistillLoss, data: DataInfo, teacher: RunTeacher | None
    ) -> None:
        key = f"model.distill_losses.{name}"
        if type(loss) is DistillLoss:  # only a weight was given
            others = among(other for other in self.losses if other != name)
            raise UserError(f"{key}: there is no loss '{name}'{others}; to add one: {key}=KDLoss")
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
        """What the active losses read of the teacher."""
        looking: dict[str, tuple[LogitLoss, ...]] = {}
        for name, loss in self.active.items():
            if isinstance(loss, LogitLoss):
                member = self._teacher_of.get(name, ALL)
                looking[member] = (*looking.get(member, ()), loss)
        return Wanted(looking, self.feature_taps.shapes(self.active))

    @property
    def trains_logits(self) -> bool:
        """Whether an active distillation loss reads the student's logits."""
        return any(isinstance(loss, LogitLoss) for loss in self.active.values())

    def softened(self, teacher: Tensor) -> Tensor:
        """The teacher's logits as the first loss over logits compares them."""
        loss = next((loss for loss in self.active.values() if isinstance(loss, LogitLoss)), None)
        return teacher if loss is None else loss.softened(teacher)

    @property
    def takeover(self) -> tuple[SimKDLoss, str] | None:
        """SimKD: the loss that puts a teacher's classifier in place of the student's, and that teacher's name."""
        losses = (
            (x, self._teacher_of.get(name, ALL))
            for name, x in self.losses.items()
            if isinstance(x, SimKDLoss)
        )
        return next(losses, None)

    @property
    def layers_of_student(self) -> dict[str, tuple[list[str], str]]:
        """What each active loss over features reads: the student's layers and their form."""
        return self.feature_taps.layers_of_student(self.active)

    def set_epoch(self, epoch: float, max_epochs: int) -> None:
        """Sets where training is; schedules of weights and temperatures read it.

        Args:
            epoch: from 0, with a fraction inside the epoch where there is one.
            max_epochs: planned.
        """
        for loss in self.losses.modules():
            if isinstance(loss, DistillLoss):
                loss.epoch, loss.max_epochs = float(epoch), max_epochs

    # -- a step ------------------------------------------------------------------------------------------------------
    def forward(
        self, logits: Tensor, distilled: Tensor, features: Read, answer: Answer, batch: Batch
    ) -> Terms:
        """The losses of one batch, weighted and summed: ``total = sum_i weight_i * loss_i``.

        Args:
            logits: the student's, for the task.
            distilled: those that distillation reads; the same, but for a student with two heads.
            features: gives the student's features, by layers and form of tokens.
            answer: the teacher's.
            batch: with ``target`` and ``index``, see :class:`kd.data.batch.Batch`.
        """
        if self.teacher_drop and self.training:
            return self._with_dropping(features, answer)
        target = batch["target"]
        logits, distilled = self.task.fit(logits, target), self.task.fit(distilled, target)
        terms = {
            name: (self.weight_of(name), self._term(name, loss, distilled, features, answer, batch))
            for name, loss in self.active.items()
        }
        if self.task_loss_weight:
            terms["task"] = (self.task_loss_weight, self.task.loss(logits, target))
        total = logits.new_zeros((), dtype=torch.float32)
        shares = self._shares(target, list(terms), batch.get("window"))
        for (weight, value), share in zip(terms.values(), shares, strict=True):
            total = total + weight * (value if share is None else value * share)
        named = {f"{name}_loss": value.detach() for name, (_, value) in terms.items()} | {
            "loss": total.detach()
        }
        return Terms(total, named)

    def _shares(
        self, target: Tensor, terms: list[str], window: Sequence[Tensor] | None
    ) -> Sequence[Tensor | None]:
        """What each term's mean over this batch's targets counts in the optimizer step; None: as it is.

        Args:
            target: of this batch.
            terms: names of the terms.
            window: targets of all batches of the step on this process; None: this batch alone is the step.
        """
        alone = window is None and not in_parallel()
        if alone or not (self.lacks_labels and self.training):
            return [None] * len(terms)
        sources: list[Any] = [self.task if name == "task" else self.losses[name] for name in terms]
        counts = torch.stack([source.counted(target) for source in sources])  # (terms,)
        if window is None:
            return list(share_of_the_step(counts))
        counts_of_window = torch.stack(
            [torch.stack([source.counted(other) for other in window]).sum() for source in sources]
        )
        return list(share_of_the_step(counts, counts_of_window, len(window)))

    def weight_of(self, name: str) -> float:
        """The factor of a distillation loss in the total: its own weight times that of its teacher."""
        return self.losses[name].weight * self._factors.get(name, 1.0)  # type: ignore[operator, return-value]

    def _with_dropping(self, features: Read, answer: Answer) -> Terms:
        """Each picture learns from the teachers that :func:`teacher_shares` leaves it; with all left it is the sum."""
        of_teacher: dict[str, Tensor] = {}
        named = {}
        for name, loss in self.active.items():
            values = loss.per_picture(*self._compared(name, features, answer))  # type: ignore[operator]
            named[f"{name}_loss"] = values.detach().mean()
            member = self._teacher_of[name]
            of_teacher[member] = of_teacher.get(member, 0.0) + self.weight_of(name) * values
        losses = torch.stack(list(of_teacher.values()))
        total = len(losses) * (teacher_shares(losses, self.teacher_drop) * losses).sum()
        return Terms(total, named | {"loss": total.detach()})

    @torch.no_grad()
    def held_out(self, features: Read, answer: Answer) -> dict[str, Tensor]:
        """The losses over features of a validation batch, each process by itself.

        Args:
            features: gives the student's, by layers and form.
            answer: the teacher's.

        Returns:
            ``<name>_loss`` of :attr:`measurable`, and ``feature_loss``, their weighted sum.
        """
        found: dict[str, Tensor] = {}
        with without_gather():
            for name in self.measurable:
                student, teacher = self._compared(name, features, answer)
                first = student[0] if isinstance(student, list) else student
                found[f"{name}_loss"] = self.losses[name](
                    student, teacher, first.new_zeros(len(first))
                )
        weighted = (self.weight_of(name) * found[f"{name}_loss"] for name in self.measurable)
        return found | {"feature_loss": sum(weighted, torch.zeros(()))}

    @property
    def measurable(self) -> list[str]:
        """The active losses over features that held-out pictures have: not those that remember training pictures."""
        return [
            name
            for name, loss in self.active.items()
            if name in self.feature_taps and not loss.needs_index
        ]

    def _compared(self, name: str, features: Read, answer: Answer) -> tuple[Any, Any]:
        """What a loss over features compares: a layer of each model, or lists of them."""
        student, teacher = self.feature_taps.read(name, features, answer)
        return (
            (student, teacher)
            if isinstance(self.losses[name], LayersLoss)
            else (student[0], teacher[0])
        )

    def _term(
        self,
        name: str,
        loss: DistillLoss,
        logits: Tensor,
        features: Read,
        answer: Answer,
        batch: Batch,
    ) -> Tensor:
        if loss.needs_index and "index" not in batch:
            raise UserError(
                f"{type(loss).__name__} needs the samples' numbers: give batches with an 'index'"
            )
        extra, target = {"index": batch["index"]} if loss.needs_index else {}, batch["target"]
        if isinstance(loss, LogitLoss):
            wanted = answer.logits[self._teacher_of.get(name, ALL)]
            if isinstance(wanted, TopKLogits):
                return loss.forward_topk(logits, wanted, target)  # type: ignore[operator]
            wanted = self.task.fit(wanted, target) if logits.ndim > 2 else wanted
            return loss(*(self.task.compared(x) for x in (logits, wanted, target)), **extra)
        return loss(*self._compared(name, features, answer), target, **extra)

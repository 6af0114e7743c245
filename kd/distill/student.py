"""The trained model with all that belongs to it: its input, its average, what it learns and how it is optimized."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from timm.models import is_model_pretrained
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kd.data.info import DataInfo
from kd.distill.average import MovingAverage
from kd.distill.casts import CastTogether
from kd.distill.fitting import check_apart
from kd.distill.inherit.families import last_norm
from kd.distill.objective import Objective
from kd.errors import UserError
from kd.models import Prepare, Preprocess, StudentSpec, trial
from kd.models.build import AUTO
from kd.models.hub import is_downloadable
from kd.models.loading import freeze_backbone, has_new_classifier
from kd.models.output_scale import scale_output, set_in_units
from kd.models.own import AsGiven, classes_of, features_of, logits_of
from kd.models.preprocess import evaluating
from kd.models.taps import TRIAL, Taps, linear_classifier
from kd.optim import OptimSpec, Pace, for_start, scaled_to_batch
from kd.tasks import Features, Task
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Answer


class Student(nn.Module):
    """A model and how it learns.

    It gives logits. Of a task without labels (:class:`kd.tasks.Features`) it gives features ``(N, D)``, and is validated
    by those of its losses that held-out pictures have (:attr:`Objective.measurable`).

    Args:
        model: takes pictures.
        prepare: uint8 pictures -> the model's input.
        objective: its losses; they are bound to the data, the teacher and this model.
        data: classes and sizes.
        teacher: the run's, or None.
        average: of the model's weights, validated and exported in its place; None: without.
        optim: settings of the optimizer.
        spec: the settings that the model was built from; None: it was given.
        start: where its first weights come from: ``inherited``, ``pre-trained``, ``scratch`` or ``given``.
        note: why they are not inherited, or what to report of the patches if they are.
        parent: the name of the teacher that they are inherited from.

    Raises:
        UserError: models, losses and data that do not fit each other.
    """

    def __init__(
        self,
        model: nn.Module,
        prepare: Prepare,
        objective: Objective,
        data: DataInfo,
        teacher: RunTeacher | None = None,
        average: MovingAverage | None = None,
        optim: OptimSpec | None = None,
        spec: StudentSpec | None = None,
        start: str = "given",
        note: str = "",
        parent: str = ALL,
    ) -> None:
        """Stores the arguments, which are the class's, freezes what ``spec.freeze`` names and builds the losses'
        parameters.

        Runs the model on two black pictures at least once for each loss over features, to see the shapes that the loss
        reads; without such a loss the model is not run.
        """
        super().__init__()
        check_apart(model, teacher)
        self.model = model
        self.average = average
        self.objective = objective
        self.prepare = prepare
        self.data = data
        self.spec = spec
        self.start = start
        self.note = note
        self.parent = parent
        self.optim = optim or OptimSpec()
        self.lr = self.optim.lr
        """Peak learning rate, of the fastest parameters; from :meth:`build_optimizer` on the one that is used."""
        self.classifier_is_fitted = False
        """Whether its new classifier was fitted before training, in this process."""
        self.given: AsGiven | None = None
        """The state of a user's model before the run; None of a model that kd has built."""
        self.output_in = features_of if self.gives_features else logits_of
        """The logits, or features, in what the model gives."""
        self._trained: tuple[str, ...] = ()  # names of the modules that train; empty: all
        if spec is not None and spec.freeze:
            self._trained = freeze_backbone(model)
        self._has_classifier_of_file = (
            spec is not None and spec.checkpoint is not None and not has_new_classifier(model)
        )
        if data.scales is not None:  # targets are numbers: the classifier answers in their units
            for each in self._models:
                scale_output(each, data.scales, self._has_classifier_of_file)
        self._follow_precision()
        # Lightning leaves modes as it finds them. This class's own train() reads _trained: frozen parts stay in eval.
        self.train()
        self.taps = Taps(model, [], prepare, self._trial)
        self.casts = CastTogether(model)
        objective.bind(data, teacher, self.taps)
        inherits = start == "inherited" and teacher is not None and teacher.members[parent].has_head
        self._brought = inherits or self._has_classifier_of_file
        self.has_two_heads = hasattr(model, "set_distilled_training") and objective.trains_logits
        """DeiT: logit losses train the classifier of a distillation token."""
        if self.has_two_heads:
            model.set_distilled_training(True)  # type: ignore[operator]
        self._lender: Any = None  # the teacher whose classifier SimKD takes over
        if objective.takeover is not None and teacher is not None:
            self._lender = teacher.members[objective.takeover[1]]
            self._check_takeover()
        if self.gives_features:
            self._measure_features()

    def _trial(self) -> object:
        """What the model gives for two black pictures of its input's size, in its present mode."""
        return trial(self.model, self.prepare, TRIAL)

    def train(self, mode: bool = True) -> "Student":
        """As of any module, but what is frozen computes as in evaluation: statistics of norms, dropout, drop path."""
        super().train(mode)
        if mode and self._trained:
            for part in self.model.children():
                part.eval()
            for name in self._trained:
                self.model.get_submodule(name).train()
        return self

    # -- what it is --------------------------------------------------------------------------------------------------
    @property
    def task(self) -> Task:
        """The task: what the student's labels mean."""
        return self.objective.task

    @property
    def gives_features(self) -> bool:
        """Whether it has no classifier and gives features: its task reads no labels."""
        return not self.task.labels

    @property
    def classes(self) -> list[str]:
        """Class names; empty without a classifier."""
        return [] if self.gives_features else list(self.data.classes)

    @property
    def arch(self) -> str:
        """The model's name, for reports and files: timm's where it is one of timm's, else its class."""
        if self.spec is not None:
            return self.spec.arch
        config = getattr(self.model, "pretrained_cfg", None) or {}
        return config.get("architecture") or type(self.model).__name__

    @property
    def classifies(self) -> bool:
        """Whether the classifier means anything: features alone leave a new one as it was drawn."""
        objective = self.objective
        if self.gives_features:
            return False
        taught = objective.trains_logits or objective.takeover is not None
        labelled = bool(objective.task_loss_weight)
        return labelled or taught or self._brought

    @property
    def is_measured(self) -> bool:
        """Whether validation measures it: its answers, or without a classifier its losses, which need no labels."""
        return self.classifies or self.gives_features

    @property
    def final(self) -> nn.Module:
        """The model that is validated and exported: the one that holds the average, where there is one."""
        return self._models[-1]

    @property
    def _models(self) -> list[Any]:
        """The model that trains and, where there is one, the one that holds its average."""
        return [self.model] if self.average is None else [self.model, self.average.module]

    @property
    def sample_size(self) -> int:
        """How many training pictures its start, and the statistics of its losses, are computed from."""
        return (self.spec or StudentSpec).inherit_pictures

    def without_gradient(self) -> list[str]:
        """Names of the parameters that no loss reaches (``model.head.weight``, ``objective.losses.NAME.weight``): DDP, which
        waits for every parameter's gradient, must leave them out.

        Those of losses whose weight is 0; and, where features alone are learnt, those that a trial's backward pass gives
        no gradient. Frozen parameters are not among them.
        """
        objective = self.objective
        names = []
        for name, _ in objective.losses.named_parameters():
            of_loss, _, _ = name.partition(".")
            if of_loss not in objective.active:
                names.append(f"objective.losses.{name}")
        if objective.task_loss_weight or objective.trains_logits:
            return names
        # Features alone are learnt: what comes after the last layer that is read.
        with evaluating(self.model), torch.enable_grad(), self.taps as tapped:
            self._trial()
        sums = []
        for layers in objective.layers.values():
            read = self.taps.read(tapped, layers.student, layers.tokens)
            sums += [features.sum() for features in read]
        trained = {
            f"model.{name}": p for name, p in self.model.named_parameters() if p.requires_grad
        }
        gradients = torch.autograd.grad(sums, list(trained.values()), allow_unused=True)
        pairs = zip(trained, gradients, strict=True)
        return [*names, *(name for name, gradient in pairs if gradient is None)]

    # -- before training ---------------------------------------------------------------------------------------------
    def begin(self, pictures: Callable[[int], Tensor] | None) -> str:
        """Starts the average of an inherited student from its new weights; reports where the first weights are from.

        Called in the first process, before training, after the student has its teacher's layers where it inherits. The
        features of such a student without a classifier are centred.

        Args:
            pictures: gives so many training pictures, uint8 ``(N, 3, H, W)``; None where there are none.

        Returns:
            A message for the user about its first weights; "" where nothing is unusual, or the model was given.
        """
        if self.start == "inherited":
            if pictures is not None and self.gives_features:
                self._centre(pictures(self.sample_size))
            if self.average is not None:
                self.average.set(self.model)
        if self.spec is None:
            return ""
        arch = self.spec.arch
        if self.start != "scratch":
            return f"student: {arch} {self.note}" if self.note else ""
        message = f"student: {arch} starts from random weights"
        if self.note:
            message += f", not from the teacher's layers ({self.note})"
        if self.optim.lr_scratch is not None:
            message += f", at optim.lr_scratch={self.optim.lr_scratch:g}"
        is_plain = all(value == AUTO for value in self.spec.kwargs.values())
        if is_plain and is_model_pretrained(arch) and is_downloadable(arch):
            message += "; model.student.pretrained=true starts from timm's"
        return message

    @property
    def answers_at_its_start(self) -> bool:
        """Whether its first weights answer already, so that training can make it worse than it began.

        They do where it has its teacher's layers, a fitted classifier, or one that came with its weights. Known to the
        process alone that fits the starts.
        """
        if self.start == "inherited" or self.classifier_is_fitted:
            return True
        return self.start == "pre-trained" and not has_new_classifier(self.model)

    def build_optimizer(self, pace: Pace) -> tuple[Optimizer, LambdaLR]:
        """Its optimizer (sharded with ``optim.zero``) and the schedule of its learning rate, stepped every optimizer step.

        Both have the parameters of its model and of its losses. Sets :attr:`lr`.

        Args:
            pace: how many steps and epochs the run has, and how many pictures a step.

        Raises:
            UserError: ``optim.lr_batch`` beside loaders whose batch size is not known, or what the optimizer refuses.
        """
        spec = for_start(self.optim, self.start == "scratch")
        if pace.global_batch is not None:
            spec = scaled_to_batch(spec, pace.global_batch)
        elif spec.lr_batch is not None:
            raise UserError(
                "optim.lr_batch: needs a known batch size, which loaders of your own don't give"
            )
        optimizer, schedule = spec.build([self.model, self.objective.losses], pace)
        self.lr = max(float(lr) for lr in schedule.base_lrs)
        return optimizer, schedule

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves or casts it, as of any module; its input gets the type of its weights (``trainer.precision=bf16-true``)."""
        super()._apply(fn, recurse)
        self._follow_precision()
        return self

    def exchange_given(self) -> None:
        """Gives a user's model the state that it had before the run, or by the next call that of the run."""
        if self.given is not None:
            self.given.exchange()
            self._follow_precision()

    def _follow_precision(self) -> None:
        """Gives the input the type of the weights; a :class:`kd.Preprocess` of the user's own is copied for that."""
        dtype = torch.float32
        for weight in self.model.parameters():
            if weight.is_floating_point():
                dtype = weight.dtype
                break
        if isinstance(self.prepare, Preprocess) and self.prepare.dtype != dtype:
            self.prepare = copy.copy(self.prepare)
            self.prepare.dtype = dtype

    # -- beside the step ---------------------------------------------------------------------------------------------
    def move_average(self, step: int) -> None:
        """Moves the average of the weights, where there is one; called after each optimizer step.

        Args:
            step: how many steps the optimizer has made, from 1; the average's decay grows with it.
        """
        if self.average is not None:
            self.average.update(self.model, step)

    def logits(self, images: Tensor) -> Tensor:
        """Logits ``(N, C, ...)``, or features, of the weights that count (:attr:`final`).

        Args:
            images: ``(N, 3, H, W)`` as batches have them, uint8, or float that ``prepare`` takes.
        """
        return self.output_in(self.final(self.prepare(images)))

    def _check_takeover(self) -> None:
        """SimKD: the student's classifier is the teacher's and does not train.

        Raises:
            UserError: another loss would train it, or a model has no linear one.
        """
        if self.objective.task_loss_weight or self.objective.trains_logits:
            raise UserError(
                "model.distill_losses: SimKDLoss puts the teacher's classifier in place of the student's, so nothing "
                "else may train it: set model.task_loss_weight=0 and leave out losses over logits"
            )
        classifiers = []
        for role, owner in (("student", self.model), ("teacher", self._lender.model)):
            classifier = linear_classifier(owner)
            if classifier is None:
                raise UserError(
                    f"model.{role}.arch: SimKDLoss needs a {role} with one linear classifier, which "
                    f"{type(owner).__name__} is not"
                )
            classifiers.append(classifier)
        classifiers[0].requires_grad_(False)

    @torch.no_grad()
    def take_classifier(self) -> None:
        """SimKD: sets the classifier to the teacher's after the loss's projection as it is now; else does nothing.

        The projection trains on, so the classifier lags behind it until the next call. The average, where there is one,
        gets the same classifier.
        """
        if self.objective.takeover is None or self._lender is None:
            return
        device = next(self.model.parameters()).device
        theirs = [tensor.to(device) for tensor in self._lender.classifier()]
        loss, _ = self.objective.takeover
        weight, bias = loss.fold(*theirs)
        for model in self._models:
            classifier: Any = linear_classifier(model)
            set_in_units(classifier, weight, bias)

    # -- without a classifier ----------------------------------------------------------------------------------------
    def _measure_features(self) -> None:
        """Makes the metrics of its losses and features, whose width D is that of a trial forward without gradient.

        Raises:
            UserError: the model gives neither features nor maps.
        """
        self._taps_of_final = self.taps  # on the weights that are validated
        if self.average is not None:
            layers: list[Any] = [of_loss.student for of_loss in self.objective.layers.values()]
            self._taps_of_final = Taps(self.average.module, layers, self.prepare)
        with torch.no_grad(), evaluating(self.model):
            features = self.output_in(self._trial())
        if features.ndim != 2:
            raise UserError(
                f"model.student: without a classifier {self.arch} gives numbers of shape {tuple(features.shape)} for "
                "two pictures, but features are (N, D), or maps (N, C, H, W)"
            )
        losses = ["feature_loss", *(f"{name}_loss" for name in self.objective.measurable)]
        assert isinstance(self.task, Features)
        self.task.measure(losses, features.shape[1], self.data.probed)

    @torch.no_grad()
    def _centre(self, pictures: Tensor) -> None:
        """Subtracts the features' mean over a sample from the last norm's shift: in cosines it would hide how pictures
        differ. A model whose features are not the output of one norm with a shift (a ResNet, a ViT that pools by attention)
        stays as it is.

        Args:
            pictures: uint8 ``(N, 3, H, W)``.
        """
        bias = getattr(last_norm(self.model), "bias", None)
        if bias is None:
            return
        with evaluating(self.model):
            features = []
            for part in pictures.split(64):
                features.append(self.output_in(self.model(self.prepare(part))))
        bias -= torch.cat(features).mean(dim=0)

    def measure(self, images: Tensor, answer: Answer, pictures: int) -> None:
        """Adds the features and losses (:meth:`Objective.held_out`) of validation pictures to the metrics of a student
        without a classifier.

        Args:
            images: ``(N, 3, H, W)`` on the student's device.
            answer: the teacher's features of the same pictures.
            pictures: N, or 0 where all are padding: then nothing is added.
        """
        assert isinstance(self.task, Features)
        with self._taps_of_final as tapped:
            outputs = self.logits(images)
        read = partial(self._taps_of_final.read, tapped)
        losses = self.objective.held_out(read, answer, len(images))
        self.task.held_out.update(outputs[:pictures], losses)


def info_without_data(task: Task, model: nn.Module) -> DataInfo:
    """What a task, or the last layer of a model, says of the data where nothing else does.

    Raises:
        UserError: neither has a number of classes, and the task has labels.
    """
    if not task.labels:
        return DataInfo([], labels=False)
    count = task.num_classes or classes_of(model)
    if not count:
        wanted = f"task={type(task).__name__}(num_classes) or data=kd.DataInfo(classes)"
        raise UserError(f"task: how many classes has the data? {wanted}")
    return DataInfo([str(i) for i in range(count)], kind=task.kind, ignore_index=task.ignore_index)

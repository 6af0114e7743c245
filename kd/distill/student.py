"""The trained model with all that belongs to it: its input, its average, what it learns and how it is optimized."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

import torch
from timm.models import is_model_pretrained
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kd.clock import annotate
from kd.data.batch import Batch
from kd.data.info import DataInfo
from kd.distill.average import MovingAverage
from kd.distill.fitting import check_apart
from kd.distill.inherit.sample_taps import SampleTaps
from kd.distill.objective import Objective, Terms
from kd.errors import UserError
from kd.losses import FeatureRegression
from kd.losses.targets import Standardizer
from kd.models import Prepare, Preprocess, StudentSpec, trial
from kd.models.build import AUTO
from kd.models.loading import freeze_backbone, has_new_classifier
from kd.models.output_scale import scale_output, set_in_units
from kd.models.own import AsGiven, classes_of, logits_of
from kd.models.preprocess import evaluating
from kd.models.taps import TRIAL, Taps, linear_classifier
from kd.optim import OptimSpec, Pace, for_start, scaled_to_batch
from kd.tasks import Task
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Answer


class Student(nn.Module):
    """A model and how it learns.

    Args:
        model: gives logits for pictures.
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
        self._trained: tuple[str, ...] = ()  # names of the modules that train; empty: all
        if spec is not None and spec.freeze:
            self._trained = freeze_backbone(model, self.arch)
        self._scale_output()
        self._follow_precision()
        # Lightning leaves modes as it finds them. This class's own train() reads _trained: frozen parts stay in eval.
        self.train()
        self.taps = Taps(model, [], prepare)
        objective.bind(data, teacher, model, self.taps, self._trial)
        self.sample_taps: SampleTaps | None = None
        """What its losses read of both models while its start was fitted; it is freed when the losses are settled."""
        self._inherits_classifier = (
            start == "inherited" and teacher is not None and teacher.gives_logits(parent)
        )
        self._lender: Any = None  # whose classifier SimKD takes over
        self._prepare_classifier(teacher)
        self._make_measures()

    def _make_measures(self) -> None:
        """Called last by the constructor: a student without a classifier makes its metrics there."""

    @staticmethod
    def info_of(task: Task, model: nn.Module) -> DataInfo:
        """What a task, or the last layer of a model, says of the data where nothing else does.

        Raises:
            UserError: neither has a number of classes.
        """
        count = task.num_classes or classes_of(model)
        if not count:
            wanted = f"task={type(task).__name__}(num_classes) or data=kd.DataInfo(classes)"
            raise UserError(f"task: how many classes has the data? {wanted}")
        return DataInfo(
            [str(i) for i in range(count)], kind=task.kind, ignore_index=task.ignore_index
        )

    def _scale_output(self) -> None:
        """Where targets are numbers: makes the classifier of the model, and of its average, answer in the targets' units;
        raises a UserError where it is not one linear layer with a bias.
        """
        if self.data.scales is None:
            return
        try:
            for model in self._models:
                scale_output(model, self.data.scales, self._has_classifier_of_file)
        except ValueError as error:
            raise UserError(f"model.student.arch: {error}") from error

    @property
    def _has_classifier_of_file(self) -> bool:
        """Whether its first weights, the classifier's among them, come from a file that the settings name; False where the
        file has none for these classes.
        """
        has_file = self.spec is not None and self.spec.checkpoint is not None
        return has_file and not has_new_classifier(self.model)

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

    def _prepare_classifier(self, teacher: RunTeacher | None) -> None:
        """DeiT: a distillation token learns from logit losses. SimKD: the classifier is the teacher's, not trained.

        Args:
            teacher: of the run; None: there is no classifier to take.

        Raises:
            UserError: SimKD beside a loss that would train the classifier, with a teacher whose classifier can't be read,
                or with a model that has no linear one.
        """
        model: Any = self.model
        self.has_two_heads = (
            hasattr(model, "set_distilled_training") and self.objective.trains_logits
        )
        if self.has_two_heads:
            model.set_distilled_training(True)
        if self.objective.takeover is None or teacher is None:
            return
        if self.objective.task_loss_weight or self.objective.trains_logits:
            raise UserError(
                "model.distill_losses: SimKDLoss puts the teacher's classifier in place of the student's, so nothing "
                "else may train it: set model.task_loss_weight=0 and leave out losses over logits"
            )
        self._lender = teacher.members[self.objective.takeover[1]]
        if self._lender.closed:
            why = f"{self._lender.arch} {self._lender.closed}: SimKDLoss needs its classifier"
            raise UserError(f"{self._lender.key}: {why}")
        for role, owner in (("student", model), ("teacher", self._lender.model)):
            classifier = linear_classifier(owner)
            if classifier is None:
                raise UserError(
                    f"model.{role}.arch: SimKDLoss needs a {role} with one linear classifier, which "
                    f"{type(owner).__name__} is not"
                )
            if role == "student":
                classifier.requires_grad_(False)

    # -- what it is --------------------------------------------------------------------------------------------------
    @property
    def task(self) -> Task:
        """The task: what the student's labels mean."""
        return self.objective.task

    @property
    def classes(self) -> list[str]:
        """Class names; empty without a classifier."""
        return list(self.data.classes)

    @property
    def arch(self) -> str:
        """The model's name, for reports and files: timm's where it is one of timm's, else its class."""
        if self.spec is not None:
            return self.spec.arch
        config: dict[str, Any] = getattr(self.model, "pretrained_cfg", None) or {}
        class_name = type(self.model).__name__
        return config.get("architecture") or class_name

    @property
    def classifies(self) -> bool:
        """Whether the classifier means anything: features alone leave a new one as it was drawn."""
        taught = self.objective.trains_logits or self.objective.takeover is not None
        brought = self._inherits_classifier or self._has_classifier_of_file
        return bool(self.objective.task_loss_weight) or taught or brought

    is_measured = classifies

    @property
    def final(self) -> nn.Module:
        """The model that is validated and exported: the one that holds the average, where there is one."""
        if self.average is not None:
            return self.average.module
        return self.model

    @property
    def _models(self) -> list[Any]:
        """The model that trains and, where there is one, the one that holds its average."""
        if self.average is not None:
            return [self.model, self.average.module]
        return [self.model]

    def without_gradient(self) -> list[str]:
        """Names of the parameters that no loss reaches (``model.head.weight``, ``objective.losses.NAME.weight``): DDP, which
        waits for every parameter's gradient, must leave them out.

        Those of losses whose weight is 0; and, where features alone are learnt, those that a trial's backward pass gives
        no gradient. Frozen parameters are not among them.
        """
        objective = self.objective
        names: list[str] = []
        # Parameters of losses whose weight is 0.
        for loss_name, loss in objective.losses.items():
            if loss_name not in objective.active:
                prefix = f"objective.losses.{loss_name}."
                names += [prefix + name for name, _ in loss.named_parameters()]
        # Where all losses are over features: what comes after the last layer that they read.
        layers = objective.layers
        if objective.task_loss_weight or len(layers) < len(objective.active):
            return names
        with evaluating(self.model), torch.enable_grad(), self.taps as tapped:
            self._trial()
        sums = []
        for of_loss in layers.values():
            read = self.taps.read(tapped, of_loss.student, of_loss.tokens)
            sums += [features.sum() for features in read]
        parameters = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameters[f"model.{name}"] = parameter
        gradients = torch.autograd.grad(sums, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                names.append(name)
        return names

    # -- before training ---------------------------------------------------------------------------------------------
    def begin(self, pictures: Callable[[int], Tensor] | None) -> str:
        """Starts the average of an inherited student from its new weights; reports where the first weights are from.

        Called in the first process, before training, after the student has its teacher's layers where it inherits.

        Args:
            pictures: gives so many training pictures, uint8 ``(N, 3, H, W)``; None where there are none. Read by students
                without a classifier alone.

        Returns:
            A message for the user about its first weights; "" where nothing is unusual, or the model was given.
        """
        if self.start == "inherited" and self.average is not None:
            self.average.set(self.model)
        if self.spec is None:
            return ""
        if self.start != "scratch":
            if self.note:
                return f"student: {self.spec.arch} {self.note}"
            return ""
        message = f"student: {self.spec.arch} starts from random weights"
        if self.note:
            message += f", not from the teacher's layers ({self.note})"
        if self.optim.lr_scratch is not None:
            message += f", at optim.lr_scratch={self.optim.lr_scratch:g}"
        is_plain = all(value == AUTO for value in self.spec.kwargs.values())
        if is_plain and is_model_pretrained(self.spec.arch):
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

    def compile_in_place(self) -> None:
        """Compiles the model where its settings say so (``compile``); names of parameters do not change.

        Called after the first weights are set and the losses settled, which run the model uncompiled.
        """
        if self.spec is not None:
            self.spec.compile_in_place(self.model)

    @property
    def standardizers(self) -> list[Standardizer]:
        """What standardises the teachers' features, of all losses."""
        losses = self.objective.active.values()
        modules = [module for loss in losses for module in loss.modules()]
        return [module for module in modules if isinstance(module, Standardizer)]

    @property
    def is_settled_by_sample(self) -> bool:
        """Whether its losses need a sample before the first step: to standardise by, or to fit projections to."""
        if self.standardizers:
            return True
        losses = self.objective.active.values()
        modules = [module for loss in losses for module in loss.modules()]
        has_regression = any(isinstance(module, FeatureRegression) for module in modules)
        return self.start == "inherited" and has_regression

    @property
    def sample_size(self) -> int:
        """How many training pictures its start, and the statistics of its losses, are computed from."""
        if self.spec is not None:
            return self.spec.inherit_pictures
        return StudentSpec.inherit_pictures

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

    answer_in = staticmethod(logits_of)
    """The logits in what the model gives."""

    # -- a step ------------------------------------------------------------------------------------------------------
    def learn(self, batch: Batch, answer: Answer) -> Terms:
        """Forward pass and losses of one batch.

        Args:
            batch: on the student's device.
            answer: the teacher's to the same pictures, with all that :attr:`Objective.wanted` lists; empty without.
        """
        images = batch["image"]
        taps: Any = nullcontext({})
        if self.objective.layers:
            taps = self.taps
        with annotate("student"), taps as tapped:
            output = self.model(self.prepare(images))
        if self.has_two_heads and isinstance(output, tuple):
            logits, distilled_logits = output
        else:
            logits = distilled_logits = self.answer_in(output)
        read = partial(self.taps.read, tapped)
        return self.objective(logits, distilled_logits, read, answer, batch)

    def move_average(self, step: int) -> None:
        """Moves the average of the weights, where there is one; called after each optimizer step.

        Args:
            step: how many steps the optimizer has made, from 1; the average's decay grows with it.
        """
        if self.average is not None:
            self.average.update(self.model, step)

    def logits(self, images: Tensor) -> Tensor:
        """Logits ``(N, C, ...)`` of the weights that count (:attr:`final`).

        Args:
            images: ``(N, 3, H, W)`` as batches have them, uint8, or float that ``prepare`` takes.
        """
        return self.answer_in(self.final(self.prepare(images)))

    @torch.no_grad()
    def take_classifier(self) -> None:
        """SimKD: sets the classifier to the teacher's after the loss's projection as it is now; else does nothing.

        The projection trains on, so the classifier lags behind it until the next call. The average, where there is one,
        gets the same classifier.
        """
        if self.objective.takeover is None or self._lender is None:
            return
        device = next(self.model.parameters()).device
        loss, _ = self.objective.takeover
        teacher_weight, teacher_bias = self._lender.classifier()
        weight, bias = loss.fold(teacher_weight.to(device), teacher_bias.to(device))
        for model in self._models:
            classifier = linear_classifier(model)
            assert classifier is not None
            set_in_units(classifier, weight, bias)

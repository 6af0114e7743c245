"""The trained model with all that belongs to it: its input, its average, what it learns and how it is optimized."""

from collections.abc import Callable
from typing import Any

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
from kd.models import Prepare, StudentSpec, trial
from kd.models.build import AUTO
from kd.models.hub import is_downloadable
from kd.models.loading import freeze_backbone, has_new_classifier
from kd.models.output_scale import scale_output, set_in_units
from kd.models.own import AsGiven, classes_of, features_of, logits_of
from kd.models.preprocess import evaluating, in_type_of
from kd.models.taps import TRIAL, Taps, linear_classifier, name_of
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
        """Stores the arguments, which are the class's, and builds the losses' parameters. The model is changed in place:
        frozen backbone, outputs in the data's units, DeiT's two heads, SimKD's frozen classifier.

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
        # Lightning leaves modes as it finds them. This class's own train() reads _trained: frozen parts stay in eval.
        self.train()
        self.taps = Taps(model, [], prepare, self._trial)
        self.casts = CastTogether(model)
        objective.bind(data, teacher, self.taps)
        inherits = start == "inherited" and teacher is not None and teacher.members[parent].has_head
        # the classifier is the teacher's, or the file's: it answers before any training
        self._comes_with_classifier = inherits or self._has_classifier_of_file
        self.has_two_heads = hasattr(model, "set_distilled_training") and objective.trains_logits
        """DeiT: logit losses train the classifier of a distillation token."""
        if self.has_two_heads:
            model.set_distilled_training(True)  # type: ignore[operator]
        if objective.takeover is not None:
            self._check_takeover()
        if self.gives_features:
            self._measure_features()

    def _trial(self) -> object:
        """What the model gives for two black pictures of its input's size, in its present mode."""
        return trial(lambda x: self.model(in_type_of(self.model, x)), self.prepare, TRIAL)

    def train(self, mode: bool = True) -> "Student":
        """Sets the mode as any module does, but frozen parts stay in evaluation: statistics of norms, dropout, drop path."""
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
        return self.spec.arch if self.spec is not None else name_of(self.model)

    @property
    def classifies(self) -> bool:
        """Whether the classifier means anything: features alone leave a new one as it was drawn."""
        objective = self.objective
        if self.gives_features:
            return False
        taught = objective.trains_logits or objective.takeover is not None
        labelled = bool(objective.task_loss_weight)
        return labelled or taught or self._comes_with_classifier

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

    def freeze_unreached(self) -> None:
        """Freezes the parameters that no loss reaches, as DDP waits for the gradients of all others.

        Where features alone are learnt these are the parameters that get no gradient in the backward pass of a trial.
        Where logits are learnt, losses reach all, and nothing is done.

        Raises:
            UserError: no loss reaches a parameter that is trained: all before the layers are frozen.
        """
        objective = self.objective
        if objective.task_loss_weight or objective.trains_logits:
            return
        with evaluating(self.model), torch.enable_grad(), self.taps as caught:
            self._trial()
        total = torch.zeros(())
        for layers in objective.layers.values():
            for features in self.taps.read(caught, layers.student, layers.tokens):
                total = total + features.sum().cpu()
        if not total.requires_grad:
            raise UserError("model.taps: what the student has up to these layers is frozen")
        trained = [p for p in self.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(total, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)

    # -- before training ---------------------------------------------------------------------------------------------
    def begin(self, pictures: Callable[[int], Tensor] | None) -> str:
        """Centres the features of an inherited student without a classifier; reports where the first weights are from.

        Called in the first process, before training, after the student has its teacher's layers where it inherits.

        Args:
            pictures: gives so many training pictures, uint8 ``(N, 3, H, W)``; None where there are none.

        Returns:
            A message for the user about its first weights; "" where nothing is unusual, or the model was given.
        """
        if self.start == "inherited" and pictures is not None and self.gives_features:
            self._centre(pictures(self.sample_size))
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

    def inputs(self, images: Tensor) -> Tensor:
        """Pictures ``(N, 3, H, W)`` as the model takes them: prepared, in the type of its weights."""
        return in_type_of(self.model, self.prepare(images))

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
        return self.output_in(self.final(self.inputs(images)))

    def _check_takeover(self) -> None:
        """SimKD: the student's classifier is the teacher's and does not train.

        Raises:
            UserError: another loss would train it, or it is not one linear layer.
        """
        if self.objective.task_loss_weight or self.objective.trains_logits:
            raise UserError(
                "model.distill_losses: SimKDLoss puts the teacher's classifier in place of the student's, so nothing "
                "else may train it: set model.task_loss_weight=0 and leave out losses over logits"
            )
        classifier = linear_classifier(self.model)
        if classifier is None:
            raise UserError(
                "model.student.arch: SimKDLoss needs a student with one linear classifier, which "
                f"{type(self.model).__name__} is not"
            )
        classifier.requires_grad_(False)

    def take_classifier(self) -> None:
        """SimKD: sets the classifier to the teacher's after the loss's projection as it is now; else does nothing.

        The projection trains on, so the classifier lags behind it until the next call. The average, where there is one,
        gets the same classifier.
        """
        loss = self.objective.takeover
        if loss is None:
            return
        weight, bias = loss.fold(*loss.classifier)
        for model in self._models:
            classifier: Any = linear_classifier(model)
            set_in_units(classifier, weight, bias)

    # -- without a classifier ----------------------------------------------------------------------------------------
    def _measure_features(self) -> None:
        """Makes the metrics of a student without a classifier, those of its losses and of its features.

        A trial forward shows the features' width D. Taps are put on the final model's layers, for :meth:`measure`.

        Raises:
            UserError: the model gives neither features nor maps.
        """
        layers: list[Any] = [of_loss.student for of_loss in self.objective.layers.values()]
        self._taps_of_final = Taps(self.final, layers, self.prepare)
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
                features.append(self.output_in(self.model(self.inputs(part))))
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
        with self._taps_of_final as caught:
            outputs = self.logits(images)
        losses = self.objective.held_out(caught, answer, len(images))
        self.task.held_out.update(outputs[:pictures], losses)


def info_without_data(task: Task, model: nn.Module) -> DataInfo:
    """Facts of the data for a step that is given none: as many classes as the task says, else as the model's last layer
    has outputs, named ``0``, ``1``, ...; none for a task without labels.

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

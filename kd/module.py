"""The LightningModule: a frozen teacher, a trainable student, a task and distillation losses."""

import math
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from timm.models import is_model_pretrained
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kd.cached import CachedTeacher, open_cache
from kd.clock import annotate
from kd.data.datamodule import Batch, DataInfo
from kd.errors import UserError
from kd.losses import DistillLoss, EachLayer, FeatureLoss, LayersLoss, LogitLoss, SimKDLoss
from kd.losses.base import equal_on_all_ranks
from kd.losses.topk import TopKLogits
from kd.measure import cache_pays, tune_batch_size, tune_num_workers
from kd.memory import Memory
from kd.models import StudentSpec, TeacherSpec, build_model, completed, preprocess_for
from kd.optim import (
    OptimSpec,
    build_optimizer,
    build_schedule,
    for_start,
    scaled_to_batch,
    settings_of,
    settle_resumed,
    short_window,
    steps_done,
)
from kd.taps import TRIAL, Features, Taps, TapSpec, tap_shapes
from kd.tasks import Classification, Task
from kd.teacher import ALL, Ensemble, Teacher, build_teachers, dtype_for

Answers = dict[str, Any]
"""The teachers' logits by name; ``ALL`` is their mean (or the one teacher's). A cache may give :class:`TopKLogits`."""


class DistillationModule(LightningModule):
    """Trains a student from labels and from one or several teachers' answers.

    The total is ``task_loss_weight * task_loss + sum(loss.weight * loss)``; each term is logged unweighted under its
    own name (``train/task_loss``, ``train/<name>_loss``), the total as ``train/loss``.

    Args:
        data: classes and sizes of the data.
        student: the model to train.
        teacher: the model to learn from; without one the student learns from labels alone.
        teachers: several of them by name, in place of ``teacher``; their mean counts by each one's ``weight``.
        task: what the labels mean.
        task_loss_weight: weight of the task's own loss, >= 0. Without labels there is no such loss.
        distill_losses: distillation losses by name, each with its weight.
        taps: the layers that a feature loss of the same name looks at.
        teacher_of: the one of ``teachers`` that a loss of that name listens to; default: the mean of all.
        ema_decay: keep an exponential moving average of the student, validate and export that.
        optim: optimizer and schedule.

    Raises:
        ValueError: weights that leave nothing to learn from.
        UserError: models, losses, data or checkpoints that do not fit each other.
    """

    def __init__(
        self,
        data: DataInfo,
        student: StudentSpec,
        teacher: TeacherSpec | None = None,
        teachers: dict[str, TeacherSpec] | None = None,
        task: Task | None = None,
        task_loss_weight: float = 1.0,
        distill_losses: dict[str, DistillLoss] | None = None,
        taps: dict[str, TapSpec] | None = None,
        teacher_of: dict[str, str] | None = None,
        ema_decay: float | None = None,
        optim: OptimSpec | None = None,
    ) -> None:
        super().__init__()
        losses = distill_losses or {}
        if not task_loss_weight >= 0:
            raise ValueError(f"task_loss_weight must be >= 0, got {task_loss_weight}")
        if not data.labels:
            task_loss_weight = 0.0
        if task_loss_weight == 0 and not any(loss.weight for loss in losses.values()):
            raise UserError("model.task_loss_weight: all loss weights are 0, there is nothing to learn from")
        if losses and teacher is None and not teachers:
            raise UserError(
                f"model.teacher: the distillation losses {', '.join(losses)} need one (or config=no_teacher)"
            )
        if ema_decay is not None and not 0 < ema_decay < 1:
            raise ValueError(f"ema_decay must be > 0 and < 1, got {ema_decay}")
        student = completed(student, "model.student")
        self.data_info, self.student_spec, self.optim_spec = data, student, optim or OptimSpec()
        self.lr = self.optim_spec.lr
        self.memory: Memory | None = None
        self.task_loss_weight = task_loss_weight
        self.task = task or Classification()
        self._check_task(data)
        self.task.build(len(data.classes), data.ignore_index)

        self.student = build_model(student, len(data.classes), "model.student", data.classes, dense=self.task.dense)
        self.student.train()  # Lightning leaves modes as it finds them
        self.student_input = preprocess_for(self.student, student.img_size, False, student.mean, student.std)
        if student.grad_checkpointing:
            self.student.set_grad_checkpointing(True)  # type: ignore[operator]
        self.student_ema = None
        if ema_decay:  # its decay grows from 0, so that a short run's average does not keep the first, random weights
            self.student_ema = ModelEmaV3(self.student, decay=ema_decay, use_warmup=True).requires_grad_(False)

        found = build_teachers(teacher, teachers or {}, data.classes, self.task.dense)
        object.__setattr__(self, "teacher", found)
        self.teacher: Teacher | Ensemble | None
        self.teacher_identity = self.teacher.identity() if self.teacher else {}
        object.__setattr__(self, "cached", None)
        self.cached: CachedTeacher | None
        self.terms: dict[str, Tensor] = {}  # of the newest batch: each loss unweighted, and the total
        self.planned_epochs = 1
        self.optim_before: dict[str, Any] | None = None  # the settings of the run that is resumed
        self.resumed = False  # set by who resumes: Lightning tells its module too late
        self.teacher_answers: Tensor | None = None  # by validation index, from the preflight

        self._check_names(losses)
        self._choose_start()
        self.distill_losses = nn.ModuleDict(losses)
        self._teacher_of = self._checked_teacher_of(teacher_of or {})
        self._bind_losses(data)
        self._build_feature_losses(dict(taps or {}))
        self._prepare_classifier()
        self._ddp_params_and_buffers_to_ignore = [*equal_on_all_ranks(self), *self._without_gradient()]

    def named_students(self) -> "dict[str, DistillationModule]":
        """Itself, under no name (several students: :class:`kd.joint.SeveralStudents`)."""
        return {"": self}

    def _choose_start(self) -> None:
        """Settles where the student's first weights come from, before data are read and the teacher is measured."""
        spec = self.student_spec
        self.start = "pre-trained" if spec.pretrained or spec.checkpoint else "scratch"
        self.not_inherited = ""
        if not spec.inherit or (spec.inherit == "auto" and (self.teacher is None or self.start == "pre-trained")):
            return
        problem = self._not_inheritable()
        if not problem:
            self.start = "inherited"
        elif spec.inherit == "auto":
            self.not_inherited = problem
        else:
            without = "" if self.teacher is None else "; model.student.inherit=auto trains such a student without them"
            raise UserError(f"model.student.inherit: {problem}{without}")

    def _not_inheritable(self) -> str:
        """Why the student can't start from the teacher's layers; empty where it can."""
        from kd.distill.inherit import check_pair

        if self.teacher is None:
            return "needs a model.teacher"
        if not isinstance(self.teacher, Teacher):
            return "needs one model.teacher, not model.teachers"
        pair: list[Any] = [self.student, self.teacher.model]
        try:
            check_pair(*(model.backbone if self.task.dense else model for model in pair))
        except ValueError as error:
            return str(error)
        return ""

    # -- losses ------------------------------------------------------------------------------------------------------

    def _check_task(self, data: DataInfo) -> None:
        if self.task.dense != data.masks:
            kind, needs = type(self.task).__name__, "masks" if self.task.dense else "one label a picture"
            raise UserError(f"model.task: {kind} needs {needs}, data.source gives {data.kind}")
        if self.task.multi_label != data.multi_label:
            raise UserError(f"model.task: {type(self.task).__name__} does not fit data.source, which gives {data.kind}")

    @staticmethod
    def _check_names(losses: dict[str, DistillLoss]) -> None:
        for name in losses:
            if name == "task" or hasattr(nn.ModuleDict(), name):
                raise UserError(f"model.distill_losses.{name}: the name '{name}' is taken, give the loss another")

    def _checked_teacher_of(self, teacher_of: dict[str, str]) -> dict[str, str]:
        members = list(self.teacher.members) if self.teacher else []
        for name, member in teacher_of.items():
            if name not in self.distill_losses:
                raise UserError(f"model.teacher_of.{name}: there is no loss '{name}'{self._among(self.distill_losses)}")
            if member not in members or member == ALL:
                raise UserError(f"model.teacher_of.{name}: there is no teacher '{member}' in model.teachers"
                                f"{self._among([m for m in members if m])}")  # fmt: skip
        return teacher_of

    @staticmethod
    def _among(names: Any) -> str:
        return f" ({', '.join(names)})" if names else ""

    def _bind_losses(self, data: DataInfo) -> None:
        """Tells each loss of the data, and refuses what it is not defined for."""
        for name, loss in self.distill_losses.items():
            assert isinstance(loss, DistillLoss)
            key = f"model.distill_losses.{name}"
            if type(loss) is DistillLoss:  # only a weight was given
                others = self._among(other for other in self.distill_losses if other != name)
                raise UserError(f"{key}: there is no loss '{name}'{others}; to add one: {key}=KDLoss")
            self._check_targets(key, loss, data)
            if isinstance(loss, LogitLoss) and self.teacher is not None and not self.teacher.has_head:
                raise UserError(f"{key}: the teacher has no classifier (model.teacher.head=false), its features alone "
                                "can teach")  # fmt: skip
            try:
                loss.bind(len(data.classes), data.train, data.ignore_index)
            except ValueError as error:
                raise UserError(f"{key}: {error}") from error

    def _check_targets(self, key: str, loss: DistillLoss, data: DataInfo) -> None:
        kind = type(loss).__name__
        if isinstance(loss, LogitLoss) and loss.for_maps != self.task.dense:
            if loss.for_maps:
                raise UserError(f"{key}: {kind} is defined for masks alone (model.task=Segmentation)")
            raise UserError(
                f"{key}: {kind} is not defined for masks; PixelKDLoss, CWDLoss and the losses over features are"
            )
        wants = "a class id" if loss.needs_class_ids else "a label" if loss.needs_labels else ""
        if wants == "a class id" and data.soft_targets:
            reason = "mixes labels (data.augment.mixup=0 data.augment.cutmix=0)"
        elif data.multi_label:
            reason = "has several labels a picture"
        elif not data.labels or data.unlabeled:
            reason = "has pictures without a label"
        else:
            return
        if wants:
            raise UserError(f"{key}: {kind} needs {wants} for each picture, the data {reason}")

    def _build_feature_losses(self, taps: dict[str, TapSpec]) -> None:
        wanted = [n for n, loss in self.distill_losses.items() if isinstance(loss, (FeatureLoss, LayersLoss))]
        for name in taps:
            if name not in wanted:
                raise UserError(f"model.taps.{name}: there is no feature loss '{name}'{self._among(wanted)}")
        for name in wanted:
            default = getattr(self.distill_losses[name], "default_tap", None)
            if name not in taps and default is None:
                raise UserError(f"model.taps.{name}: the loss {name} needs the layers to look at (student, teacher)")
            taps.setdefault(name, TapSpec(default or "", default or ""))
        self._tap_specs = taps
        patterns = [t.student for t in taps.values()]
        self._student_taps = Taps(self.student, patterns, self.student_input.size, "model.taps")
        self._teacher_taps: dict[str, Taps] = {}
        self._teacher_shapes: dict[str, dict[tuple[str, str], tuple[int, ...]]] = {}  # of each loss
        for name in wanted:
            self._build_feature_loss(name, taps[name])

    def _build_feature_loss(self, name: str, spec: TapSpec) -> None:
        assert self.teacher is not None
        member = self._teacher_of.get(name, ALL)
        if member not in self.teacher.members:
            raise UserError(f"model.teacher_of.{name}: a feature loss looks at one teacher, say which"
                            f"{self._among(self.teacher.members)}")  # fmt: skip
        teacher = self.teacher.members[member]
        if member not in self._teacher_taps:
            patterns = [t.teacher for n, t in self._tap_specs.items() if self._teacher_of.get(n, ALL) == member]
            self._teacher_taps[member] = Taps(teacher.model, patterns, teacher.preprocess.size, "model.taps")
        pictures = torch.zeros(TRIAL, 3, *self.student_input.size, dtype=torch.uint8)
        student_shapes = tap_shapes(
            self.student, self._student_taps, spec.student, spec.tokens,
            lambda: self.student(self.student_input(pictures)),
        )  # fmt: skip
        teacher_shapes = tap_shapes(
            teacher.model, self._teacher_taps[member], spec.teacher, spec.tokens, lambda: teacher(pictures)
        )
        layers = self._teacher_taps[member].paths(spec.teacher)
        self._teacher_shapes[name] = {(p, spec.tokens): s for p, s in zip(layers, teacher_shapes, strict=True)}
        loss: Any = self.distill_losses[name]
        try:
            if isinstance(loss, LayersLoss):
                loss.build(student_shapes, teacher_shapes)
            elif len(student_shapes) == len(teacher_shapes) == 1:
                loss.build(student_shapes[0], teacher_shapes[0])
            else:
                each = EachLayer(loss)
                each.build(student_shapes, teacher_shapes)
                self.distill_losses[name] = each
        except ValueError as error:
            raise UserError(f"model.taps.{name}: {error}") from error

    def _prepare_classifier(self) -> None:
        """DeiT: a distillation token answers to the logit losses. SimKD: the classifier is the teacher's, not trained.

        Raises:
            UserError: SimKD beside a loss that trains the classifier.
        """
        student: Any = self.student
        self._two_heads = hasattr(student, "set_distilled_training") and any(
            isinstance(loss, LogitLoss) and loss.weight for loss in self.distill_losses.values()
        )
        if self._two_heads:
            student.set_distilled_training(True)
        found = [(n, loss) for n, loss in self.distill_losses.items() if isinstance(loss, SimKDLoss)]
        self._folded: SimKDLoss | None = found[0][1] if found else None
        if not found or self.teacher is None:
            return
        self._folded_teacher: Teacher = self.teacher.members[self._teacher_of.get(found[0][0], ALL)]
        if self.task_loss_weight or any(isinstance(loss, LogitLoss) for loss in self.distill_losses.values()):
            raise UserError(
                "model.distill_losses: SimKDLoss puts the teacher's classifier in place of the student's, so nothing "
                "else may train it: set model.task_loss_weight=0 and leave out losses over logits"
            )
        pair: dict[str, Any] = {"student": student, "teacher": self._folded_teacher.model}
        for role, model in pair.items():
            if not isinstance(model.get_classifier(), nn.Linear):
                raise UserError(
                    f"model.{role}.arch: SimKDLoss needs a {role} with one linear classifier, {type(model).__name__} "
                    "has another kind or two (distilled)"
                )
        student.get_classifier().requires_grad_(False)

    def _without_gradient(self) -> list[str]:
        """Parameters that no term reaches, by name: DDP would stop at the first step, waiting for their gradients."""
        off = {f"distill_losses.{name}." for name, loss in self.distill_losses.items() if not loss.weight}
        names = [name for name, _ in self.named_parameters() if name.startswith(tuple(off))] if off else []
        over_features = {name: self._tap_specs[name] for name in self.active_losses if name in self._tap_specs}
        if self.task_loss_weight or len(over_features) < len(self.active_losses):
            return names
        training = self.student.training
        self.student.eval()
        with torch.enable_grad(), self._student_taps:
            self.student(self.student_input(torch.zeros(TRIAL, 3, *self.student_input.size, dtype=torch.uint8)))
        self.student.train(training)
        read = [x for spec in over_features.values() for x in self._student_taps.read(spec.student, spec.tokens)]
        self._student_taps.clear()
        parameters = {f"student.{name}": p for name, p in self.student.named_parameters() if p.requires_grad}
        found = torch.autograd.grad([x.sum() for x in read], list(parameters.values()), allow_unused=True)
        return names + [name for name, gradient in zip(parameters, found, strict=True) if gradient is None]

    @torch.no_grad()
    def _fold_classifier(self) -> None:
        if self._folded is None:
            return
        theirs = [x.to(self.device) for x in self._folded_teacher.classifier()]
        weight, bias = self._folded.fold(theirs[0], theirs[1])
        models: list[Any] = [self.student, *([self.student_ema.module] if self.student_ema is not None else [])]
        for model in models:
            model.get_classifier().weight.copy_(weight)
            model.get_classifier().bias.copy_(bias)

    # -- life cycle --------------------------------------------------------------------------------------------------

    @property
    def _datamodule(self) -> Any:
        return getattr(self.trainer, "datamodule", None)

    def setup(self, stage: str) -> None:
        """Starts the student from the teacher's layers where asked; puts the teacher on its device."""
        self.start_student(stage)
        self.place_teacher()
        if stage == "fit":
            self.prepare_fit()

    def place_teacher(self) -> None:
        """Puts the teacher on its device, in the run's precision."""
        if self.teacher is not None:
            self.teacher.to(self.trainer.strategy.root_device, dtype_for(str(self.trainer.precision)))
            self.teacher.forget_original()

    def prepare_fit(self) -> None:
        """Settles by measuring what is left to it, opens the cache, compiles the student."""
        self._tune()
        if self.teacher is not None:
            self._choose_cache(self.teacher)
        if self.trainer.is_global_zero:
            self.memory = Memory(self)  # now: later its layers may be sharded
        self.student_spec.compile_in_place(self.student)

    def _tune(self) -> None:
        """Finds by measuring what is left to it: the batch size on rank 0, loader processes on all ranks at once."""
        data, trainer = self._datamodule, self.trainer
        if "batch_size" in data.auto and self.optim_spec.lr_batch is None:
            raise UserError(
                f"optim.lr_batch: say which global batch optim.lr={self.optim_spec.lr:g} is meant for; "
                "data.batch_size=auto changes the batch"
            )
        for name, tune in (("batch_size", tune_batch_size), ("num_workers", tune_num_workers)):
            if name not in data.auto:
                continue
            found = tune(self, data) if trainer.is_global_zero or name == "num_workers" else ""
            if trainer.is_global_zero:
                print(found, flush=True)
            setattr(data, name, trainer.strategy.broadcast(getattr(data, name)))

    @property
    def active_losses(self) -> dict[str, Any]:
        """The distillation losses with a weight."""
        return {name: loss for name, loss in self.distill_losses.items() if loss.weight}

    @property
    def teacher_features(self) -> Features | None:
        """What the active losses look at of one teacher's layers."""
        shapes = {k: s for name in self.active_losses for k, s in self._teacher_shapes.get(name, {}).items()}
        return Features(self._teacher_taps[ALL], shapes) if shapes and ALL in self._teacher_taps else None

    def _choose_cache(self, teacher: Teacher | Ensemble) -> None:
        """Opens the cache of the teacher's answers where it is asked for, or pays."""
        modes, losses = {member.spec.cache for member in teacher.members.values()}, self.active_losses
        if modes == {"off"} or not losses:
            return
        if any(member.is_shared_out for member in teacher.members.values()):
            raise UserError("model.teacher.cache: is not available beside placement=shard (a miss asks one process)")
        if modes == {"auto"}:
            answer = cache_pays(self, teacher, losses, self._datamodule) if self.trainer.is_global_zero else (False, "")
            pays, why = self.trainer.strategy.broadcast(answer)
            if self.trainer.is_global_zero:
                print(f"cache: {why}", flush=True)
            if not pays:
                return
        self._open_cache(teacher)

    def _open_cache(self, teacher: Teacher | Ensemble) -> None:
        data, zero = self._datamodule, self.trainer.is_global_zero
        opened = open_cache(teacher, self.active_losses, data, self.teacher_features, announce=zero)
        object.__setattr__(self, "cached", opened)
        data.views = opened.store.views

    def start_student(self, stage: str) -> None:
        """Takes the student's first weights from the teacher where asked, while that is whole and not yet placed."""
        if stage != "fit" or self.resumed:
            return
        if self.start == "inherited":
            assert isinstance(self.teacher, Teacher)
            self._inherit(self.teacher)
        elif self.start == "scratch" and self.trainer.is_global_zero:
            print(self._told_of_scratch(), flush=True)

    def _told_of_scratch(self) -> str:
        spec, optim = self.student_spec, self.optim_spec
        why = f", not from the teacher's layers ({self.not_inherited})" if self.not_inherited else ""
        rate = f", at optim.lr_scratch={optim.lr_scratch:g}" if optim.lr_scratch is not None else ""
        better = (
            "; model.student.pretrained=true starts from timm's"
            if is_model_pretrained(spec.arch) and not spec.kwargs
            else ""
        )
        return f"student: {spec.arch} starts from random weights{why}{rate}{better}"

    @property
    def will_inherit(self) -> bool:
        """Whether this run starts the student from the teacher's layers."""
        return self.start == "inherited" and not self.resumed

    def configure_model(self) -> None:
        """Lets a strategy that shards the student do so (:mod:`kd.strategies.fsdp`)."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def _inherit(self, teacher: Teacher) -> None:
        from kd.distill.inherit import inherit, inherit_dense

        pictures = self._datamodule.sample_pictures(self.student_spec.inherit_pictures)
        try:
            start: Any = inherit_dense if self.task.dense else inherit
            start(self.student, teacher.original(), pictures, self.student_input, teacher.preprocess)
        except ValueError as error:
            raise UserError(f"model.student.inherit: {error}") from error
        if self.student_ema is not None:
            self.student_ema.set(self.student)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW (or as asked), sharded where asked, with warm-up and cosine stepped every optimizer step."""
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        per_step = self._datamodule.batch_size * self.trainer.world_size * self.trainer.accumulate_grad_batches
        spec = scaled_to_batch(for_start(self.optim_spec, self.start == "scratch"), per_step)
        self.lr = spec.lr
        optimizer = build_optimizer([self.student, self.distill_losses], spec, fused=not scaled)
        self.trainer.fit_loop.setup_data()  # else a run bounded by steps alone does not know its epoch's length
        total = self.trainer.estimated_stepping_batches
        if math.isinf(total) and self.trainer.is_global_zero:
            print("optim: without trainer.max_epochs or max_steps the learning rate stays at its peak", flush=True)
        per_epoch = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        epochs = self.trainer.max_epochs or -1
        self.planned_epochs = epochs if epochs > 0 else 1 if math.isinf(total) else math.ceil(total / per_epoch)
        schedule = build_schedule(optimizer, self.optim_spec, total, per_epoch)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        """Keeps what this run made its optimizer with: a checkpoint is loaded over it."""
        self.optimizer_settings = [settings_of(optimizer) for optimizer in self.trainer.optimizers]
        self.follow_precision()

    def follow_precision(self) -> None:
        """Feeds the student in the type of its weights (``trainer.precision=bf16-true``)."""
        self.student_input.dtype = next(self.student.parameters()).dtype

    def on_train_start(self) -> None:
        """A resumed run goes on with its own settings, and where the share of samples seen puts it."""
        if self.optim_before is not None:
            self.settle_resumed([(self.optim_before, self.optim_spec)])

    def settle_resumed(self, specs: list[tuple[dict[str, Any], OptimSpec]]) -> None:
        """See :func:`kd.optim.settle_resumed`.

        Args:
            specs: of each student the settings that the checkpoint was made with, and this run's.
        """
        trainer, data = self.trainer, self._datamodule
        keys = {"weight_decay"}.union(*(before.get("kwargs", {}) | now.kwargs for before, now in specs))
        (optimizer,), (schedule,) = trainer.optimizers, (config.scheduler for config in trainer.lr_scheduler_configs)
        assert isinstance(schedule, LambdaLR)
        position = schedule.last_epoch
        if data.resume_at is not None:
            epoch, samples = data.resume_at
            per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            by_epochs = epoch * per_epoch + data.batches_before(samples) // trainer.accumulate_grad_batches
            epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf
            position = steps_done(trainer.global_step, by_epochs, epochs * per_epoch, trainer.max_steps)
        settle_resumed(optimizer, schedule, self.optimizer_settings[0], keys, position)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seeds the step and tells the losses where training is."""
        self.seed_step(batch_idx)
        self.set_epoch(self.current_epoch, self.planned_epochs)

    def seed_step(self, batch_idx: int) -> None:
        """Seeds dropout and the like by (seed, step, rank): a resumed run draws what the uninterrupted one drew."""
        step = self.current_epoch * 1_000_003 + batch_idx
        seed = (self._datamodule.seed * 7_919 + step) * 4_096 + self.global_rank
        # not torch.manual_seed: it takes a stack trace for each kind of device that is absent, 0.8 ms
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.device.type != "cpu":
            torch.manual_seed(seed)

    def set_epoch(self, epoch: int, max_epochs: int) -> None:
        """Tells the losses where training is: warm-ups and moving temperatures follow it."""
        for loss in self.distill_losses.modules():
            if isinstance(loss, DistillLoss):
                loss.epoch, loss.max_epochs = float(epoch), max_epochs

    # -- training ----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One batch (see :data:`kd.data.datamodule.Batch`) -> the total loss, a scalar."""
        total, terms = self.losses(batch, self.ask(batch["image"]) if self.cached is None else self._cached(batch))
        if logs_now(self):
            for name, value in terms.items():
                self.log(f"train/{name}", value)
        return self.for_its_window(total, batch_idx)

    def for_its_window(self, loss: Tensor, batch_idx: int) -> Tensor:
        """The loss as the trainer wants it: it divides by ``accumulate_grad_batches``, also where fewer batches are
        left of an epoch."""
        accumulate = self.trainer.accumulate_grad_batches if self._trainer is not None else 1  # called by hand
        factor = short_window(self.trainer.num_training_batches, accumulate, batch_idx) if accumulate > 1 else 1.0
        return loss if factor == 1 else loss * factor

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Adds the teacher's cached answers while the batch is on the host: a look-up later would stop the device."""
        if self.cached is None or not self.trainer.training:
            return batch
        records = self.cached.look_up(batch["index"], self._view)
        return batch if records is None else {**batch, "answers": records}

    @property
    def _view(self) -> int:
        return self.current_epoch % self._datamodule.views

    def _cached(self, batch: Batch) -> Answers:
        if self.cached is None or not self.listens:
            return {}
        return {ALL: self.cached(batch["image"], batch["index"], self._view, batch.get("answers"))}

    @property
    def listens(self) -> bool:
        """Whether a loss needs the teacher."""
        return self.teacher is not None and bool(self.active_losses)

    @property
    def classifies(self) -> bool:
        """Whether the student's classifier means anything: features alone leave a new one as it was drawn."""
        taught = any(isinstance(loss, LogitLoss) for loss in self.active_losses.values()) or self._folded is not None
        brought = self.start == "inherited" or self.student_spec.checkpoint is not None
        return bool(self.task_loss_weight) or taught or brought

    def tapping_the_teacher(self) -> ExitStack:
        """Inside, the teacher's features are caught for this module's losses."""
        stack = ExitStack()
        for taps in self._teacher_taps.values():
            stack.enter_context(taps)
        return stack

    def ask(self, images: Tensor) -> Answers:
        """The teachers' answers to a batch; their features wait in the taps. Empty where no loss needs them."""
        if self.teacher is None or not self.listens:
            return {}
        with self.tapping_the_teacher():
            return self.teacher.answers(images)

    def losses(self, batch: Batch, answers: Answers) -> tuple[Tensor, dict[str, Tensor]]:
        """The student's forward and its losses.

        Args:
            batch: see :data:`kd.data.datamodule.Batch`.
            answers: of :meth:`ask`, for the same batch.

        Returns:
            The total, and what to log: each term unweighted (``<name>_loss``) and ``loss``, without gradients.
        """
        images, target = batch["image"], batch["target"]
        with annotate("student"), self._student_taps:
            output = self.student(self.student_input(images))
        own, distilled = output if isinstance(output, tuple) else (output, output)
        own, distilled = self.task.fit(own, target), self.task.fit(distilled, target)
        terms = self._distillation_terms(batch, distilled, answers)
        if self.task_loss_weight:
            terms["task"] = (self.task_loss_weight, self.task.loss(own, target))
        total = own.new_zeros((), dtype=torch.float32)
        for weight, value in terms.values():
            total = total + weight * value
        self.terms = {f"{name}_loss": value.detach() for name, (_, value) in terms.items()} | {"loss": total.detach()}
        return total, self.terms

    def _distillation_terms(self, batch: Batch, logits: Tensor, answers: Answers) -> dict[str, tuple[float, Tensor]]:
        target = batch["target"]
        fitted = (
            {name: self.task.fit(answer, target) for name, answer in answers.items()} if logits.ndim > 2 else answers
        )
        terms = {}
        for name, loss in self.active_losses.items():
            extra = {"index": batch["index"]} if loss.needs_index else {}
            if isinstance(loss, LogitLoss) and isinstance(answers[ALL], TopKLogits):
                value = loss.forward_topk(logits, answers[ALL], target)  # type: ignore[operator]
            elif isinstance(loss, LogitLoss):
                value = loss(logits, fitted[self._teacher_of.get(name, ALL)], target, **extra)
            else:
                value = loss(*self._features(name, isinstance(loss, LayersLoss)), target, **extra)
            terms[name] = (loss.weight, value)
        self._let_go()
        return terms

    def _features(self, name: str, layers: bool) -> tuple[Any, Any]:
        spec = self._tap_specs[name]
        student = self._student_taps.read(spec.student, spec.tokens)
        teacher = self._teacher_taps[self._teacher_of.get(name, ALL)].read(spec.teacher, spec.tokens)
        teacher = [x.to(student[0].device, torch.float32) for x in teacher]
        return (student, teacher) if layers else (student[0], teacher[0])

    def _let_go(self) -> None:
        self._student_taps.clear()
        for taps in self._teacher_taps.values():
            taps.clear()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips as Lightning does, but also beside a fused optimizer, which Lightning refuses even without a scaler."""
        if getattr(self.trainer.strategy, "clips_gradients", False):
            return
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if scaled or gradient_clip_algorithm == "value" or not gradient_clip_val:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Steps, then moves the average."""
        super().optimizer_step(*args, **kwargs)
        self.move_average()

    def move_average(self) -> None:
        """After an optimizer's step: takes the student into its moving average, where there is one."""
        if self.student_ema is not None:
            self.student_ema.update(self.student, self.trainer.global_step + 1)  # this step is not counted yet

    # -- validation --------------------------------------------------------------------------------------------------

    @property
    def final_student(self) -> nn.Module:
        """The weights that are validated and exported: the average where there is one."""
        return self.student_ema.module if self.student_ema is not None else self.student

    def keep_teacher_answers(self, answers: Tensor | None) -> None:
        """Takes the teacher's answers on the validation set, by index: it need not be asked again."""
        self.teacher_answers = answers

    def on_validation_start(self) -> None:
        """Brings a classifier that is made of the teacher's up to date."""
        self._fold_classifier()

    def on_train_end(self) -> None:
        """Likewise where no validation came last."""
        self._fold_classifier()

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Adds one batch to the task's metrics; padding (index -1) is left out.

        Returns:
            For callbacks, under the student's name (``""``): logits, targets and indices of what was added.
        """
        if not self.classifies:
            return {}
        real = batch["index"] >= 0
        images, target, index = (batch[k][real] for k in ("image", "target", "index"))
        if not len(images):
            if hasattr(self.trainer.strategy, "shard"):  # the other ranks wait for this one's shards
                self.final_student(self.student_input(batch["image"]))
            if self.teacher is not None and self.teacher.is_shared_out and self.teacher_answers is None:
                self.teacher(batch["image"])
            return {}
        logits = self.task.fit(self.final_student(self.student_input(images)), target)
        self.task.update(logits, target, self._teacher_answer(images, target, index))
        return {"": (logits, target, index)}

    def _teacher_answer(self, images: Tensor, target: Tensor, index: Tensor) -> Tensor | None:
        if self.teacher is None or not self.teacher.has_head:
            return None
        if self.teacher_answers is not None:
            return self.teacher_answers[index.to(self.teacher_answers.device)].to(images.device)
        return self.task.decide(self.task.fit(self.teacher.answers(images)[ALL], target))

    def on_validation_epoch_end(self) -> None:
        """Logs the task's metrics over all processes, as ``val/<name>``."""
        if not self.classifies:
            return
        self.log_dict({f"val/{name}": value for name, value in self.task.compute().items()})
        self.task.reset()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores who the teacher was (its weights stay out)."""
        self._fold_classifier()
        checkpoint["kd_teacher"] = self.teacher_identity
        checkpoint["kd_classes"] = list(self.data_info.classes)
        checkpoint["kd_cached"] = self.cached is not None
        checkpoint["kd_batch_size"] = self._datamodule.batch_size
        checkpoint["kd_optim"] = {name: asdict(module.optim_spec) for name, module in self.named_students().items()}
        checkpoint["kd_data"] = self._datamodule.samples_identity()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses to go on with another teacher, other data or classes, or an optimizer that its state does not fit."""
        self.optim_before = checkpoint.get("kd_optim", {}).get("", {})
        self.optim_spec.check_resumed(self.optim_before)
        self._datamodule.check_resumed(checkpoint.get("kd_data", {}))
        for key, now in (("kd_teacher", self.teacher_identity), ("kd_classes", list(self.data_info.classes))):
            before = checkpoint.get(key, now)
            if before != now:
                raise UserError(
                    f"resume: the checkpoint was made with another {key.removeprefix('kd_')} ({before}, now {now})"
                )
        if "batch_size" in self._datamodule.auto:
            self._datamodule.batch_size = checkpoint.get("kd_batch_size", self._datamodule.batch_size)
        if isinstance(self.teacher, Teacher) and self.teacher.spec.cache == "auto":
            self._cache_as_before(self.teacher, checkpoint.get("kd_cached", False))

    def _cache_as_before(self, teacher: Teacher, before: bool) -> None:
        """A resumed run goes on as it began, whatever the clock says now: the cache decides which views it shows."""
        if before == (self.cached is not None):
            return
        if self.trainer.is_global_zero:
            print(f"cache: {'on' if before else 'off'} all the same, as in the run that is resumed", flush=True)
        if before:
            self._open_cache(teacher)
        else:
            object.__setattr__(self, "cached", None)
            self._datamodule.views = None


def logs_now(module: LightningModule) -> bool:
    """Whether a logger will take this step's values; those of an epoch's or the run's end are kept for people.

    Lightning's ``log`` takes 0.7 ms a value, whether or not a logger listens. A callback that looks at ``train/*``
    between two logged steps (``trainer.log_every_n_steps``) sees the last logged one's.
    """
    trainer: Any = module._trainer
    if trainer is None:  # called by hand
        return True
    loop = trainer.fit_loop.epoch_loop
    due = (loop._batches_that_stepped + 1) % max(1, trainer.log_every_n_steps) == 0  # as Lightning's loggers decide
    return due or trainer.is_last_batch or loop.batch_idx == 0 or trainer.global_step + 1 == trainer.max_steps

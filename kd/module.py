"""The LightningModule: a frozen teacher, one or several students, each with its own objective and optimizer."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kd.data.batch import Batch, DataInfo, as_batch
from kd.data.datamodule import DistillationDataModule
from kd.distill.objective import Objective
from kd.distill.step import as_teacher, own_student
from kd.distill.student import Student
from kd.errors import UserError
from kd.fit_to_machine import Memory, choose_cache, reopened, tune
from kd.lightning_internals import loggers_take_this_step, trainer_of
from kd.losses import DistillLoss
from kd.losses.base import equal_on_all_ranks
from kd.models import Preprocess
from kd.models.taps import TapSpec
from kd.optim import (
    OptimSpec,
    Together,
    build_optimizer,
    build_schedule,
    for_start,
    scaled_to_batch,
    settings_of,
    settle_resumed,
    short_window,
    steps_done,
)
from kd.tasks import Classification, Task
from kd.teachers import CachedTeacher, FrozenTeacher, Teacher, dtype_for
from kd.teachers.answer import Answer, Wanted

ONLY = "student"
"""The name of a single student below ``students``; it is logged without one."""


class DistillationModule(LightningModule):
    """Trains a student from labels and from a teacher's answers, with any Trainer and any loader.

    The total is ``task_loss_weight * task_loss + sum(loss.weight * loss)``; each term is logged unweighted under its
    own name (``train/task_loss``, ``train/<name>_loss``), the total as ``train/loss``; of several students
    (:meth:`together`) under ``<student>/train/...``, with ``train/loss`` as the sum.

    Args:
        student: any model that gives logits for pictures (:func:`kd.models.own.logits_of`).
        teacher: likewise, or any callable, or a :class:`kd.Teacher`; it is frozen. Without one the student learns from
            labels alone.
        task: what the labels mean; it must know the number of classes, unless ``data`` does.
        losses: distillation losses by name, each with its weight.
        task_loss_weight: weight of the task's own loss, >= 0.
        taps: the layers that a feature loss of the same name looks at.
        teacher_of: the one of several teachers that a loss of that name listens to; default: the mean of all.
        ema_decay: keep an exponential moving average of the student, validate and export that.
        optim: optimizer and schedule.
        data: classes and sizes of the data, where losses need to know more than the task.
        prepare: uint8 pictures -> the student's input: a :class:`kd.Preprocess`, or a function. Default: as timm says
            of the model. Float pictures pass as they are.
        teacher_prepare: likewise for the teacher.

    Raises:
        ValueError: weights that leave nothing to learn from.
        UserError: models, losses and data that do not fit each other.

    >>> import kd, timm
    >>> student, teacher = timm.create_model("resnet10t", num_classes=10), torch.nn.Sequential(
    ...     torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 10))
    >>> module = kd.DistillationModule(student, teacher, task=kd.Classification(10), losses={"kd": kd.KDLoss(4.0)})
    >>> float(module.training_step((torch.rand(4, 3, 32, 32), torch.arange(4)), 0)["loss"]) > 0
    True
    """

    def __init__(
        self,
        student: nn.Module | Student,
        teacher: nn.Module | Callable[[Tensor], Any] | Teacher | None = None,
        *,
        task: Task | None = None,
        losses: Mapping[str, DistillLoss] | None = None,
        task_loss_weight: float = 1.0,
        taps: Mapping[str, TapSpec] | None = None,
        teacher_of: Mapping[str, str] | None = None,
        ema_decay: float | None = None,
        optim: OptimSpec | None = None,
        data: DataInfo | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        teacher_prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "teacher", as_teacher(teacher, teacher_prepare))
        self.teacher: Teacher | None
        object.__setattr__(self, "asked", self.teacher)
        self.asked: Teacher | None  # who answers in training: the teacher, or a cache in front of it
        if not isinstance(student, Student):
            objective = Objective(task or Classification(), losses, task_loss_weight, taps, teacher_of)
            student = own_student(student, self.teacher, objective, data, prepare, ema_decay, optim)
        self.students = nn.ModuleDict({ONLY: student})
        self.teacher_identity = self.teacher.identity() if self.teacher else {}
        self.memory: Memory | None = None
        self.planned_epochs = 1
        self.optim_before: dict[str, Any] | None = None  # the settings of the run that is resumed, by student
        self.resumed = False  # set by who resumes: Lightning tells its module too late
        self.teacher_answers: Tensor | None = None  # by validation index, from the preflight
        self._ddp_params_and_buffers_to_ignore = self._left_alone_by_ddp()

    @classmethod
    def together(cls, modules: Mapping[str, "DistillationModule"]) -> "DistillationModule":
        """Several students side by side: on the same batches, from the same teacher's answers.

        Each has its own losses, optimizer, schedule, clipping, moving average and metrics, and comes out as if it had
        been trained alone with the same seed.

        Args:
            modules: a module for each student, by name, with one teacher.

        Raises:
            UserError: students with different teachers or tasks.
        """
        first = next(iter(modules.values()))
        if any(module.teacher_identity != first.teacher_identity for module in modules.values()):
            raise UserError("students: all must have the same model.teacher, it answers once for all")
        if len({type(module.task) for module in modules.values()}) > 1:
            raise UserError("students: all must have the same model.task")
        first.students = nn.ModuleDict({name: module.student_of_one for name, module in modules.items()})
        first.several = True
        first._ddp_params_and_buffers_to_ignore = first._left_alone_by_ddp()
        return first

    def _left_alone_by_ddp(self) -> list[str]:
        """What is equal on all ranks, and parameters that no term reaches: DDP would wait for their gradients."""
        unreached = [
            f"students.{name}.{parameter}"
            for name, student in self.students.items()
            for parameter in student.without_gradient()  # type: ignore[operator]
        ]
        return [*equal_on_all_ranks(self), *unreached]

    several = False
    """Whether its students have names."""

    # -- what it holds -----------------------------------------------------------------------------------------------

    def named_students(self) -> dict[str, Student]:
        """The students by name; a single one has the empty name."""
        found: dict[str, Any] = dict(self.students.items())
        return found if self.several else {"": found[ONLY]}

    @property
    def student_of_one(self) -> Student:
        """The only student, or the first of several."""
        return next(iter(self.named_students().values()))

    @property
    def student(self) -> nn.Module:
        """The model of the only student, or of the first of several."""
        return self.student_of_one.model

    @property
    def task(self) -> Task:
        """The task of all."""
        return self.student_of_one.task

    @property
    def data_info(self) -> DataInfo:
        """The data of all."""
        return self.student_of_one.data

    @property
    def cached(self) -> CachedTeacher | None:
        """The cache of the teacher's answers, where there is one."""
        return self.asked if isinstance(self.asked, CachedTeacher) else None

    @property
    def wanted(self) -> Wanted:
        """What the students' losses look at of the teacher."""
        found = Wanted(logits=False)
        for student in self.named_students().values():
            found |= student.objective.wanted
        return found

    @property
    def active_losses(self) -> dict[str, DistillLoss]:
        """The distillation losses with a weight, of several students as ``<student>.<name>``."""
        return {
            f"{name}.{loss}" if name else loss: found
            for name, student in self.named_students().items()
            for loss, found in student.objective.active.items()
        }

    @property
    def data(self) -> DistillationDataModule | None:
        """Our data module, where the trainer has one."""
        found = getattr(trainer_of(self), "datamodule", None)
        return found if isinstance(found, DistillationDataModule) else None

    # -- life cycle --------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Starts students from the teacher's layers; places the teacher; settles what is left to measure."""
        for student in self.named_students().values():
            self._start(student, stage)
        if self.teacher is not None:
            self.teacher.to(self.trainer.strategy.root_device, dtype_for(str(self.trainer.precision)))
            self.teacher.forget_original()
        if stage == "fit":
            self._prepare_fit()

    def _start(self, student: Student, stage: str) -> None:
        """Takes the student's first weights from the teacher where asked, while that is whole and not yet placed."""
        if stage != "fit" or self.resumed:
            return
        if student.start == "inherited":
            self._inherit(student)
        elif student.start == "scratch" and self.trainer.is_global_zero:
            print(student.told_of_scratch(), flush=True)

    def will_inherit(self, student: Student) -> bool:
        """Whether this run starts the student from the teacher's layers."""
        return student.start == "inherited" and not self.resumed

    def _inherit(self, student: Student) -> None:
        from kd.distill.inherit import inherit, inherit_dense

        assert isinstance(self.teacher, FrozenTeacher) and student.spec is not None
        if self.data is None:
            raise UserError("model.student.inherit: needs pictures to measure by: a DistillationDataModule")
        pictures = self.data.sample_pictures(student.spec.inherit_pictures)
        try:
            start: Any = inherit_dense if student.task.dense else inherit
            start(student.model, self.teacher.original(), pictures, student.prepare, self.teacher.prepare)
        except ValueError as error:
            raise UserError(f"model.student.inherit: {error}") from error
        if student.average is not None:
            student.average.set(student.model)

    def _prepare_fit(self) -> None:
        """Settles by measuring what is left to it, opens the cache, compiles the students."""
        if self.data is not None:
            tune(self, self.data)
            if self.teacher is not None and self.wanted:
                self._use_cache(choose_cache(self, self.teacher, self.data))
            if self.trainer.is_global_zero:
                self.memory = Memory(self)  # now: later its layers may be sharded
        for student in self.named_students().values():
            if student.spec is not None:
                student.spec.compile_in_place(student.model)

    def _use_cache(self, asked: Teacher) -> None:
        object.__setattr__(self, "asked", asked)
        assert self.data is not None
        self.data.views = asked.store.views if isinstance(asked, CachedTeacher) else None

    def configure_model(self) -> None:
        """Lets a strategy that shards the students do so (:mod:`kd.strategies.fsdp`)."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Each student's optimizer (sharded where asked), with warm-up and cosine stepped every optimizer step."""
        self.trainer.fit_loop.setup_data()  # else a run bounded by steps alone does not know its epoch's length
        made = [self._optimizer(student) for student in self.named_students().values()]
        self.planned_epochs = self._plan()
        if not self.several:
            optimizer, schedule = made[0]
        else:
            optimizer = Together([own for own, _ in made])
            schedule = LambdaLR(optimizer, [factor for _, own in made for factor in own.lr_lambdas])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _optimizer(self, student: Student) -> tuple[Optimizer, LambdaLR]:
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        spec = for_start(student.optim, student.start == "scratch")
        if self.data is not None:
            per_step = self.data.batch_size * self.trainer.world_size * self.trainer.accumulate_grad_batches
            spec = scaled_to_batch(spec, per_step)
        elif spec.lr_batch is not None:
            raise UserError("optim.lr_batch: the batch size of loaders of one's own is not known; give optim.lr for it")
        student.lr = spec.lr
        optimizer = build_optimizer([student.model, student.objective.losses], spec, fused=not scaled)
        total = self.trainer.estimated_stepping_batches
        per_epoch = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        return optimizer, build_schedule(optimizer, student.optim, total, per_epoch)

    def _plan(self) -> int:
        """The epochs that the run will have, as far as its settings tell."""
        total, epochs = self.trainer.estimated_stepping_batches, self.trainer.max_epochs or -1
        if math.isinf(total) and self.trainer.is_global_zero:
            print("optim: without trainer.max_epochs or max_steps the learning rate stays at its peak", flush=True)
        per_epoch = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        return epochs if epochs > 0 else 1 if math.isinf(total) else math.ceil(total / per_epoch)

    def on_fit_start(self) -> None:
        """Keeps what this run made its optimizer with (a checkpoint is loaded over it); follows the precision.

        With ``trainer.precision=bf16-true`` the students are fed in the type of their weights.
        """
        self.optimizer_settings = [settings_of(optimizer) for optimizer in self.trainer.optimizers]
        for student in self.named_students().values():
            if isinstance(student.prepare, Preprocess):
                student.prepare.dtype = next(student.model.parameters()).dtype

    def on_train_start(self) -> None:
        """A resumed run goes on with its own settings, and where the share of samples seen puts it."""
        if self.optim_before is None or self.data is None:
            return
        trainer, data, students = self.trainer, self.data, self.named_students()
        before = [self.optim_before.get(name, {}) for name in students]
        kwargs = [old.get("kwargs", {}) | s.optim.kwargs for old, s in zip(before, students.values(), strict=True)]
        (optimizer,), (schedule,) = trainer.optimizers, (config.scheduler for config in trainer.lr_scheduler_configs)
        assert isinstance(schedule, LambdaLR)
        position = schedule.last_epoch
        if data.resume_at is not None:
            epoch, samples = data.resume_at
            per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            by_epochs = epoch * per_epoch + data.batches_before(samples) // trainer.accumulate_grad_batches
            epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else math.inf
            position = steps_done(trainer.global_step, by_epochs, epochs * per_epoch, trainer.max_steps)
        settle_resumed(optimizer, schedule, self.optimizer_settings[0], {"weight_decay"}.union(*kwargs), position)

    # -- training ----------------------------------------------------------------------------------------------------

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        """Any loader's batch as ours; adds what a cache knows while the batch is on the host."""
        batch = as_batch(batch)
        return self.asked.fetch(batch) if self.asked is not None and self._in_training else batch

    @property
    def _in_training(self) -> bool:
        trainer = trainer_of(self)
        return trainer is not None and trainer.training

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Tells the losses where training is."""
        for student in self.named_students().values():
            student.objective.set_epoch(self.current_epoch, self.planned_epochs)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """One batch (see :class:`kd.data.batch.Batch`).

        Returns:
            ``loss``, the sum of the students' totals (their parameters, and so gradients, are apart); ``terms``, each
            student's terms by name; ``answer``, the teacher's, for callbacks that look at it.
        """
        batch = as_batch(batch)
        wanted = self.wanted
        answer = self.asked.answer(batch, wanted) if self.asked is not None and wanted else Answer()
        totals, terms = [], {}
        for name, student in self.named_students().items():
            self.seed_step(batch_idx)
            learnt = student.learn(batch, answer)
            totals.append(learnt.total)
            terms[name] = learnt.named
        loss = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
        if logs_now(self):
            self._log_terms(terms, loss)
        return {"loss": self._for_its_window(loss, batch_idx), "terms": terms, "answer": answer}

    def _for_its_window(self, loss: Tensor, batch_idx: int) -> Tensor:
        """The loss as the trainer wants it: it divides by ``accumulate_grad_batches``, also where fewer batches are
        left of an epoch."""
        accumulate = self.trainer.accumulate_grad_batches if trainer_of(self) else 1  # called by hand
        factor = short_window(self.trainer.num_training_batches, accumulate, batch_idx) if accumulate > 1 else 1.0
        return loss if factor == 1 else loss * factor

    def _log_terms(self, terms: Mapping[str, Mapping[str, Tensor]], loss: Tensor) -> None:
        for name, named in terms.items():
            for term, value in named.items():
                self.log(f"{name}/train/{term}" if name else f"train/{term}", value)
        if self.several:
            self.log("train/loss", loss.detach())

    def seed_step(self, batch_idx: int) -> None:
        """Seeds dropout and the like by (seed, step, rank): a resumed run draws what the uninterrupted one drew."""
        if self.data is None:  # a loop of the user's own, and its random numbers
            return
        step = self.current_epoch * 1_000_003 + batch_idx
        seed = (self.data.seed * 7_919 + step) * 4_096 + self.global_rank
        # not torch.manual_seed: it takes a stack trace for each kind of device that is absent, 0.8 ms
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.device.type != "cpu":
            torch.manual_seed(seed)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips each student's gradients by their own norm.

        As Lightning does, but also beside a fused optimizer, which Lightning refuses even without a scaler.
        """
        if getattr(self.trainer.strategy, "clips_gradients", False):
            return
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        for own in optimizer.optimizers if isinstance(optimizer, Together) else [optimizer]:
            if scaled or gradient_clip_algorithm == "value" or not gradient_clip_val:
                self.clip_gradients(own, gradient_clip_val, gradient_clip_algorithm)
                continue
            parameters = [p for group in own.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Steps, then moves the averages."""
        super().optimizer_step(*args, **kwargs)
        for student in self.named_students().values():
            student.move_average(self.trainer.global_step + 1)  # this step is not counted yet

    # -- validation --------------------------------------------------------------------------------------------------

    def keep_teacher_answers(self, answers: Tensor | None) -> None:
        """Takes the teacher's answers on the validation set, by index: it need not be asked again."""
        self.teacher_answers = answers

    def on_validation_start(self) -> None:
        """Brings classifiers that are made of the teacher's up to date."""
        self._take_classifiers()

    def on_train_end(self) -> None:
        """Likewise where no validation came last."""
        self._take_classifiers()

    def _take_classifiers(self) -> None:
        for student in self.named_students().values():
            student.take_classifier()

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
        """Adds one batch to each student's metrics; padding (index -1) is left out.

        Returns:
            For callbacks, by student (``""`` for a single one): logits, targets and indices of what was added.
        """
        students = {name: student for name, student in self.named_students().items() if student.classifies}
        if not students:
            return {}
        batch = as_batch(batch)
        images, target, index = batch["image"], batch["target"], batch.get("index")
        if index is not None:
            real = index >= 0
            if not real.any():
                self._keep_step_with_others(images)
                return {}
            images, target, index = images[real], target[real], index[real]
        answer = self._teacher_answer(images, target, index)
        found = {}
        for name, student in students.items():
            logits = student.task.fit(student.logits(images), target)
            student.task.update(logits, target, answer)
            found[name] = (logits, target, index)
        return found

    def _keep_step_with_others(self, images: Tensor) -> None:
        """Other ranks wait for this one's shards, though it has no pictures left."""
        if hasattr(self.trainer.strategy, "shard"):
            for student in self.named_students().values():
                student.logits(images)
        if self.teacher is not None and self.teacher.is_shared_out and self.teacher_answers is None:
            self.teacher(images)

    def _teacher_answer(self, images: Tensor, target: Tensor, index: Tensor | None) -> Tensor | None:
        if self.teacher is None or not self.teacher.has_head:
            return None
        if self.teacher_answers is not None and index is not None:
            return self.teacher_answers[index.to(self.teacher_answers.device)].to(images.device)
        return self.task.decide(self.task.fit(self.teacher(images), target))

    def on_validation_epoch_end(self) -> None:
        """Logs the task's metrics over all processes, as ``val/<name>`` or ``<student>/val/<name>``."""
        for name, student in self.named_students().items():
            if not student.classifies:
                continue
            prefix = f"{name}/val/" if name else "val/"
            self.log_dict({f"{prefix}{metric}": value for metric, value in student.task.compute().items()})
            student.task.reset()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores who the teacher was (its weights stay out)."""
        self._take_classifiers()
        checkpoint["kd_teacher"] = self.teacher_identity
        checkpoint["kd_classes"] = list(self.data_info.classes)
        checkpoint["kd_cached"] = self.cached is not None
        checkpoint["kd_optim"] = {name: asdict(student.optim) for name, student in self.named_students().items()}
        if self.data is not None:
            checkpoint["kd_batch_size"] = self.data.batch_size
            checkpoint["kd_data"] = self.data.samples_identity()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses to go on with another teacher, other data or classes, or an optimizer that its state does not fit."""
        self.optim_before = checkpoint.get("kd_optim", {})
        for name, student in self.named_students().items():
            student.optim.check_resumed(self.optim_before.get(name, {}))
        if self.data is not None:
            self.data.check_resumed(checkpoint.get("kd_data", {}))
        for key, now in (("kd_teacher", self.teacher_identity), ("kd_classes", list(self.data_info.classes))):
            before = checkpoint.get(key, now)
            if before != now:
                raise UserError(
                    f"resume: the checkpoint was made with another {key.removeprefix('kd_')} ({before}, now {now})"
                )
        if self.data is None:
            return
        if "batch_size" in self.data.auto:
            self.data.batch_size = checkpoint.get("kd_batch_size", self.data.batch_size)
        if self.teacher is not None and self.asked is not None:
            self._use_cache(reopened(self, self.teacher, self.asked, self.data, checkpoint.get("kd_cached", False)))


def logs_now(module: LightningModule) -> bool:
    """Whether a logger will take this step's values; those of an epoch's or the run's end are kept for people.

    Lightning's ``log`` takes 0.7 ms a value, whether or not a logger listens. A callback that looks at ``train/*``
    between two logged steps (``trainer.log_every_n_steps``) sees the last logged one's.
    """
    trainer: Any = trainer_of(module)
    if trainer is None:  # called by hand
        return True
    loop = trainer.fit_loop.epoch_loop
    return (
        loggers_take_this_step(trainer)
        or trainer.is_last_batch
        or loop.batch_idx == 0
        or trainer.global_step + 1 == trainer.max_steps
    )

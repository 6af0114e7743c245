"""The LightningModule: a frozen teacher, and a student with its objective and optimizer."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from kd.data.batch import Batch, as_batch
from kd.data.datamodule import DistillationDataModule
from kd.distill.first_weights import give_first_weights
from kd.distill.sharding import Sharding
from kd.distill.step import Distillation, GivenTeacher
from kd.distill.student import Student
from kd.fit_to_machine import Memory, apply_auto, restore_auto
from kd.fit_to_machine.compilation import choose_compilation, compile_chosen
from kd.lightning_internals import trainer_of
from kd.losses.base import equal_on_all_ranks
from kd.models.compiled import compile_in_place
from kd.module.evaluation import Validation
from kd.module.fits import pairs_for_fits, sample_for_fits
from kd.module.inference import Inference
from kd.module.pace import (
    clip,
    keep_targets_exact,
    logs_now,
    pace_of,
    seed_step,
    window_factor,
)
from kd.module.resume import Resume
from kd.module.start import by_the_first, settle_once
from kd.optim import Pace
from kd.tasks import Task
from kd.teachers import CachedTeacher, RunTeacher, caches_of, dtype_for
from kd.teachers.answer import Answer
from kd.teachers.open_cache import check_before_fits


class StepOutput(TypedDict):
    """What a training step returns; callbacks read it."""

    loss: Tensor
    """The weighted sum of the terms, a scalar; scaled in a short accumulation window."""
    terms: dict[str, Tensor]
    """:attr:`kd.distill.step.Terms.named`."""
    answer: Answer
    """The teacher's."""


class DistillationModule(Inference):
    """Trains a student from labels and from a teacher's answers, with any Trainer and any loader.

    The total is ``task_loss_weight * task_loss + sum(loss.weight * loss)``; each term is logged unweighted under its
    own name (``train/task_loss``, ``train/<name>_loss``), the total as ``train/loss``.

    Args:
        student, teacher: as of :class:`kd.Distillation`; without a teacher the student learns from labels alone.
        arguments: the other arguments of :class:`kd.Distillation`. With ``ema_decay`` the average is validated and
            exported.

    Raises:
        TypeError, ValueError, UserError: as of :class:`kd.Distillation`.

    >>> import kd, timm, torch
    >>> student, teacher = timm.create_model("resnet10t", num_classes=10), torch.nn.Sequential(
    ...     torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 10))
    >>> module = kd.DistillationModule(student, teacher, task=kd.Classification(10), losses={"kd": kd.KDLoss(4.0)})
    >>> float(module.training_step((torch.rand(4, 3, 32, 32), torch.arange(4)), 0)["loss"]) > 0
    True
    """

    _logs = True
    """Whether the step under way is logged."""
    _factor = 1.0
    """Of the loss of the step under way (:func:`kd.module.pace.window_factor`)."""
    _first: int | None = None
    """Number of the first batch of the present epoch in this fit; None before it."""

    def __init__(
        self,
        student: nn.Module | Student,
        teacher: GivenTeacher = None,
        **arguments: Any,
    ) -> None:
        """Builds the step; arguments as of the class. Its student alone is registered: trained, and saved."""
        super().__init__()
        self.distillation: Distillation
        """The step: teacher, student and losses."""
        object.__setattr__(self, "distillation", Distillation(student, teacher, **arguments))
        self.student = self.distillation.student
        self.validation = Validation(self.student, self.teacher)
        identity = {}
        if self.teacher:
            identity = self.teacher.identity()
        self.resume = Resume(self.student, identity)
        self.student.freeze_unreached()
        # DDP would send what is equal on all ranks
        self._ddp_params_and_buffers_to_ignore = equal_on_all_ranks(self)
        self.memory: Memory | None = None  # bytes of a step's parts: rank 0, in a fit on kd's data
        self.folder: Path | None = None  # of the run, once it has one
        self.planned_epochs = 1
        self.compiled: dict[str, str] = {}
        """How the models are compiled that ``compile=auto`` leaves to the machine, by key; the others run as written."""
        self.resumed = False  # set by the code that resumes: Lightning informs its module too late
        self.begun = False  # whether the student has its first weights
        self._ended = False  # whether a user's model is as it was given

    @property
    def teacher(self) -> RunTeacher | None:
        """The run's teacher; validation runs it, whatever answers in training."""
        return self.distillation.teacher

    @property
    def answering_teacher(self) -> RunTeacher | None:
        """Answers in training: the teacher, or a cache in front of it."""
        return self.distillation.answering_teacher

    @property
    def task(self) -> Task:
        """The student's task."""
        return self.student.task

    @property
    def caches(self) -> dict[str, CachedTeacher]:
        """The caches of the teachers' answers, by teacher ("" for a single one); {} where none answers."""
        return caches_of(self.answering_teacher)

    @property
    def data(self) -> DistillationDataModule | None:
        """kd's data module, where the trainer has one; None with a loader of the user's own, and without a trainer."""
        datamodule = getattr(trainer_of(self), "datamodule", None)
        return datamodule if isinstance(datamodule, DistillationDataModule) else None

    def setup(self, stage: str) -> None:
        """Gives the student its first weights, places the teacher, settles the losses, measures what ``auto`` leaves open.

        A resumed run neither starts its student nor settles its losses: the checkpoint has both. A second fit does not start
        its student again. With loaders of the user's own, in place of kd's data module, there are no pictures to settle
        losses by, and nothing is measured. Rank 0 prints how the student starts, and counts :attr:`memory`.
        Lightning calls it in every process, before weights are sharded or loaded. The order matters: the student's
        start reads the teacher before it is cast to its precision; losses are settled on the started student; batch
        size, loader processes and cache are measured on all of that; compiling comes last.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``; only a fit starts, settles, measures and compiles.

        Raises:
            UserError: as of :func:`check_before_fits`, :func:`by_the_first` and :func:`apply_auto`.
        """
        if self._ended:  # teardown has put the user's model back
            self._exchange_given()
        keep_targets_exact(self.trainer)
        data = self.data
        teacher = self.teacher
        device = self.trainer.strategy.root_device
        pictures = pairs = None
        if data is not None:
            pictures = sample_for_fits(self.trainer, data)
            pairs = pairs_for_fits(self.trainer, data)
        if stage == "fit" and not self.resumed and not self.begun:
            if teacher is not None and data is not None:
                check_before_fits(teacher, data, self.student.objective.wanted)
            start = partial(give_first_weights, [self.student], teacher, pictures, pairs, device)
            (message,) = by_the_first(self.trainer, self.student, start)
            self.begun = True
            if message and self.trainer.is_global_zero:
                print(message, flush=True)
        if teacher is not None:
            teacher.to(device, dtype_for(str(self.trainer.precision)))
            teacher.forget_original()
        if stage != "fit":
            return
        if teacher is not None and pictures is not None and not self.resumed:
            settle_once(self.trainer, self.student, teacher, pictures)
        if data is not None:
            self.answer_by(apply_auto(self, data))
            if self.trainer.is_global_zero:
                self.memory = Memory(self)  # now: later its layers may be sharded
        self._compile_models()

    def _compile_models(self) -> None:
        """Compiles the student where its settings say so, and the models that ``auto`` finds worth it; a resumed run's
        checkpoint says which (:meth:`on_load_checkpoint`).
        """
        spec = self.student.spec
        if spec is not None and spec.compile != "auto":
            compile_in_place(self.student.model, spec.compile)
        if self.data is not None and not self.resumed:
            live = self.answering_teacher is self.teacher
            self.compiled = compile_chosen(self, choose_compilation(self, self.data, live))

    def teardown(self, stage: str) -> None:
        """Puts a user's own model back as it was given, except its weights, which Lightning leaves on the CPU."""
        self._exchange_given()

    def _exchange_given(self) -> None:
        """Swaps the state of a user's model: from what a run needs to what it was when it was given, or back."""
        self._ended = not self._ended
        if self.student.given is not None:
            self.student.given.exchange()

    def answer_by(self, teacher: RunTeacher | None) -> None:
        """Makes ``teacher`` (or a cache before it; None: no teacher) answer in training from now on; validation runs the
        module's ``teacher`` as before. What answers is no submodule, so it is neither saved nor trained.

        May be called between epochs. What the loaders do for a cache (repeat its views, read its pixels) stays as it is:
        :mod:`kd.fit_to_machine` sets that where it chooses the teacher.
        """
        self.distillation.answering_teacher = teacher

    def configure_model(self) -> None:
        """FSDP cuts the student here, once; DeepSpeed checks it, and cuts it later, with its optimizer. With other
        strategies nothing is done.

        Lightning calls it after :meth:`setup` in each of fit, validate, test and predict, in a fit before
        :meth:`configure_optimizers`.

        Raises:
            UserError: settings of the student that the strategy can't have (:meth:`kd.distill.sharding.Sharding.shard`).
        """
        if isinstance(self.trainer.strategy, Sharding):
            self.trainer.strategy.shard(self.student)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The student's optimizer (sharded with ``optim.zero``), with its schedule.

        Lightning calls it after :meth:`configure_model`, and steps the schedule after every optimizer step. Sets
        ``planned_epochs``; rank 0 prints :meth:`_notes_on_the_pace`.

        Raises:
            UserError: settings of ``optim`` that need another batch size, loader or number of processes.
        """
        self.trainer.fit_loop.setup_data()  # else a run bounded by steps alone does not know its epoch's length
        batch_size = self.data.batch_size if self.data is not None else None
        pace = pace_of(self.trainer, batch_size)
        optimizer, schedule = self.student.build_optimizer(pace)
        self.planned_epochs = pace.epochs(self.trainer.max_epochs)
        if self.trainer.is_global_zero:
            for line in self._notes_on_the_pace(pace):
                print(line, flush=True)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _notes_on_the_pace(self, pace: Pace) -> Iterator[str]:
        """A message to the user for each setting of steps, batches or epochs that may have an unexpected effect in this run.

        ``pace``: steps of the run and of an epoch.
        """
        if math.isinf(pace.total_steps):
            yield (
                "optim: the run's end is not known in steps (trainer.max_steps), so the learning rate stays at its peak"
            )
        objective = self.student.objective
        windows_are_known = self.data is not None and self.data.windows_are_known
        lacking = objective.lacks_labels and not windows_are_known
        if self.trainer.accumulate_grad_batches > 1 and lacking:
            yield (
                "trainer.accumulate_grad_batches: where labels are missing, losses over labels or pixels are means "
                "over those of one batch, so that each counts more in a batch with few"
            )
        shorter = self.student.optim.note(pace)
        if shorter:
            yield shorter
        for name, loss in objective.active.items():
            if getattr(loss, "final_temperature", None) and self.planned_epochs < 2:
                yield (
                    f"model.distill_losses.{name}.final_temperature: moves over the epochs, and the run has one: it is "
                    "not reached"
                )

    def on_fit_start(self) -> None:
        """Keeps the optimizers' settings before Lightning loads a checkpoint's over them.

        Raises:
            UserError: the checkpoint's optimizers or schedules do not fit this run's
                (:meth:`kd.module.resume.Resume.note`).
        """
        self.resume.note(self.trainer, self)

    def on_train_start(self) -> None:
        """Puts a resumed run's schedule, with this run's own settings, at its position; see :meth:`Resume.settle`. Any other
        run's stays as it is.
        """
        self.resume.settle(self.trainer, self.data)
        self._first = None

    def on_before_batch_transfer(self, batch: object, dataloader_idx: int) -> Batch:
        """Any loader's batch as kd's own (:func:`as_batch`); adds what a cache knows while the batch is on the host.

        Warns of float pictures in 0..255 in the first batch, the only one that is looked at.
        Lightning calls it before the batch goes to the device.

        Returns:
            In training the batch with a cache's answers, in validation with the teacher's known decisions; else neither.

        Raises:
            UserError: targets of a loader of the user's own that the task can't read.
        """
        batch = as_batch(batch)
        self.distillation.range_check.look(batch.get("image"))
        trainer = self.trainer
        if self.data is None:
            self._check_targets(batch)
        if trainer.training and self.answering_teacher is not None:
            return self.answering_teacher.fetch(batch)
        if trainer.validating or trainer.sanity_checking:
            return self.validation.with_known(batch)
        return batch

    def _check_targets(self, batch: Batch) -> None:
        """Raises a UserError for targets of the user's own loader, still on the host, that have not the task's form.

        In training the student's objective checks them. Targets that nothing reads (prediction, no metrics) pass.
        """
        if self.trainer.training:
            self.student.objective.check_targets(batch)
            return
        is_read = self.student.is_measured and not self.trainer.predicting
        if is_read:
            self.task.check_targets(batch["target"], len(batch["image"]), training=False)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Prepares a step: passes the epoch to the losses, whose schedules follow it, and seeds dropout and the like.

        Keeps, for :meth:`training_step`, whether the step is logged, and the factor of its loss. The seed is made of the
        data's seed, the epoch, the batch and the rank, so that a resumed run draws the numbers of an uninterrupted one. With
        loaders of the user's own nothing is seeded. ``batch_idx`` counts from the epoch's start.
        """
        self.student.objective.set_epoch(self.current_epoch, self.planned_epochs)
        self._logs = logs_now(self.trainer)
        if self._first is None or batch_idx == 0:
            self._first = batch_idx
        trainer = self.trainer
        batches = trainer.num_training_batches
        accumulate = trainer.accumulate_grad_batches
        self._factor = window_factor(batches, accumulate, batch_idx, self._first)
        if self.data is not None:
            step = self.current_epoch * 1_000_003 + batch_idx
            seed_of_step = self.data.seed * 7_919 + step
            seed_step(seed_of_step * 4_096 + self.global_rank, self.device)

    def training_step(self, batch: object, batch_idx: int) -> StepOutput:
        """One batch of any loader (see :func:`kd.data.batch.as_batch`): the teacher's answer, then the student's terms.

        Logs the terms where that is due (:func:`kd.module.pace.logs_now`). In an accumulation window of fewer batches the
        returned loss is scaled up, the logged one is not.
        """
        batch = as_batch(batch)
        answer = self.distillation.answer(batch)
        terms = self.distillation.learn(batch, answer)
        if self._logs:
            for term, value in terms.named.items():
                self.log(f"train/{term}", value)
        loss = terms.total
        if self._factor != 1:
            loss = loss * self._factor
        return {"loss": loss, "terms": terms.named, "answer": answer}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradients (:func:`kd.module.pace.clip`), in place.

        Lightning calls it once an accumulation window, before the optimizer's step, with ``trainer.gradient_clip_val`` and
        ``gradient_clip_algorithm``.
        """
        clip(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Steps the optimizer, then moves the average of the weights; once an accumulation window.

        Args:
            epoch: from 0.
            batch_idx: number of the window's last batch in the epoch.
            optimizer: the student's.
            optimizer_closure: runs forward and backward passes.
        """
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.student.move_average(self.trainer.global_step + 1)  # this step is not counted yet

    def on_validation_start(self) -> None:
        """Brings a classifier that is made of the teacher's up to date (SimKD)."""
        self.student.take_classifier()

    def on_train_end(self) -> None:
        """Brings a classifier that is made of the teacher's up to date (SimKD), for the export: there may have been no
        validation after the last step, which does so too.
        """
        self.student.take_classifier()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores what a run that resumes from it needs, as :meth:`kd.module.resume.Resume.content` lists it.

        Lightning calls it with all other parts in ``checkpoint`` already. A classifier that is made of the teacher's (SimKD)
        is brought up to date first. The weights in ``checkpoint`` share the model's memory, so they change too; those of
        DeepSpeed are copies, and stay.
        """
        self.student.take_classifier()
        checkpoint.update(self.resume.content(self.data, bool(self.caches), self.compiled))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses another teacher, other data or classes, or states that do not fit; restores what ``auto`` had chosen.

        Lightning calls it with the checkpoint as read, before it loads anything of it (FSDP has loaded weights and
        optimizers itself). Weights, loops, and states of optimizers and schedules
        are compared, and models compiled as before, for a fit alone; with kd's data module the batch size and the cache that
        ``auto`` had chosen are restored in any case.

        Raises:
            UserError: the first difference, by its key.
        """
        self.resume.check(checkpoint, self.data)
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.resume.check_states(checkpoint, self.trainer, self)
            self.compiled = compile_chosen(self, checkpoint.get("kd_compiled", {}))
        if self.data is not None:
            cached = checkpoint.get("kd_cached", False)
            self.answer_by(restore_auto(self, self.answering_teacher, self.data, cached))

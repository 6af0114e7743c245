"""The LightningModule: a frozen teacher, a trainable student, a task and distillation losses."""

from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

from kd.cached import CachedTeacher, open_cache
from kd.data.datamodule import Batch, DataInfo
from kd.errors import UserError
from kd.losses import DistillLoss, FeatureLoss
from kd.losses.topk import TopKLogits
from kd.measure import cache_pays, tune_batch_size, tune_num_workers
from kd.models import StudentSpec, Taps, TapSpec, TeacherSpec, build_model, preprocess_for
from kd.optim import OptimSpec, build_optimizer, build_schedule, scaled_to_batch
from kd.tasks import Classification
from kd.teacher import Teacher, dtype_for

INHERIT_PICTURES = 256  # pictures whose activations guide kd.inherit: more changed nothing, fewer were noisier


class DistillationModule(LightningModule):
    """Trains a student from labels and from a teacher's answers.

    The total is ``task_loss_weight * task_loss + sum(loss.weight * loss)``; each term is logged unweighted under its
    own name (``train/task_loss``, ``train/<name>_loss``), the total as ``train/loss``.

    Args:
        data: classes and sizes of the data.
        student: the model to train.
        teacher: the model to learn from; without one the student learns from labels alone.
        task: what the labels mean.
        task_loss_weight: weight of the task's own loss, >= 0.
        distill_losses: distillation losses by name, each with its weight.
        taps: the layers that a feature loss of the same name looks at.
        ema_decay: keep an exponential moving average of the student, validate and export that.
        optim: optimizer and schedule.

    Raises:
        ValueError: weights that leave nothing to learn from.
        UserError: models or checkpoints that do not fit.
    """

    def __init__(
        self,
        data: DataInfo,
        student: StudentSpec,
        teacher: TeacherSpec | None = None,
        task: Classification | None = None,
        task_loss_weight: float = 1.0,
        distill_losses: dict[str, DistillLoss] | None = None,
        taps: dict[str, TapSpec] | None = None,
        ema_decay: float | None = None,
        optim: OptimSpec | None = None,
    ) -> None:
        super().__init__()
        losses = distill_losses or {}
        if not task_loss_weight >= 0:
            raise ValueError(f"task_loss_weight must be >= 0, got {task_loss_weight}")
        if task_loss_weight == 0 and not any(loss.weight for loss in losses.values()):
            raise UserError("model.task_loss_weight: all loss weights are 0, there is nothing to learn from")
        if losses and teacher is None:
            raise UserError(
                f"model.teacher: the distillation losses {', '.join(losses)} need one (or config=no_teacher)"
            )
        if ema_decay is not None and not 0 < ema_decay < 1:
            raise ValueError(f"ema_decay must be > 0 and < 1, got {ema_decay}")
        self.data_info, self.student_spec, self.optim_spec = data, student, optim or OptimSpec()
        self.lr = self.optim_spec.lr
        self.task_loss_weight = task_loss_weight
        self.task = task or Classification()
        self.task.build(len(data.classes))

        self.student = build_model(student, len(data.classes), "model.student", data.classes)
        self.student.train()  # Lightning leaves modes as it finds them
        self.student_input = preprocess_for(self.student, student.img_size, student.channels_last)
        self.student_ema = ModelEmaV3(self.student, decay=ema_decay) if ema_decay else None

        object.__setattr__(self, "teacher", Teacher(teacher, len(data.classes), data.classes) if teacher else None)
        self.teacher: Teacher | None
        self.teacher_identity = self.teacher.identity() if self.teacher else {}
        object.__setattr__(self, "cached", None)
        self.cached: CachedTeacher | None
        self.teacher_predictions: Tensor | None = None  # class ids by validation index, from the preflight

        self.distill_losses = nn.ModuleDict(losses)
        self._build_feature_losses(taps or {})

    # -- feature losses ----------------------------------------------------------------------------------------------

    def _build_feature_losses(self, taps: dict[str, TapSpec]) -> None:
        wanted = [name for name, loss in self.distill_losses.items() if isinstance(loss, FeatureLoss)]
        for name in wanted:
            if name not in taps:
                raise UserError(f"model.taps.{name}: the loss {name} needs the layers to look at (student, teacher)")
        for name in taps:
            if name not in wanted:
                raise UserError(f"model.taps.{name}: there is no feature loss '{name}'")
        self._tap_paths = taps
        self._student_taps = Taps(self.student, [t.student for t in taps.values()], "model.taps")
        if self.teacher is None or not wanted:
            return
        self._teacher_taps = Taps(self.teacher.model, [t.teacher for t in taps.values()], "model.taps")
        student_shapes, teacher_shapes = self._tap_shapes(self.teacher)
        for name in wanted:
            loss = self.distill_losses[name]
            assert isinstance(loss, FeatureLoss)
            try:
                loss.build(student_shapes[taps[name].student], teacher_shapes[taps[name].teacher])
            except ValueError as error:
                raise UserError(f"model.taps.{name}: {error}") from error

    @torch.no_grad()
    def _tap_shapes(self, teacher: Teacher) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        size = self.student_input.img_size
        pictures = torch.zeros(2, 3, size, size, dtype=torch.uint8)
        self.student.eval()(self.student_input(pictures))
        self.student.train()
        teacher(pictures)
        caught = self._student_taps.pop(), self._teacher_taps.pop()
        student, teacher_ = ({k: tuple(v.shape) for k, v in taps.items()} for taps in caught)
        return student, teacher_

    # -- life cycle --------------------------------------------------------------------------------------------------

    @property
    def _datamodule(self) -> Any:
        return getattr(self.trainer, "datamodule", None)

    def setup(self, stage: str) -> None:
        """Starts the student from the teacher's layers where asked; puts the teacher on its device."""
        if self.student_spec.inherit and self.teacher is None:
            raise UserError("model.student.inherit: needs a model.teacher")
        if self.teacher is not None:
            if stage == "fit" and self.student_spec.inherit and not self.trainer.ckpt_path:
                self._inherit(self.teacher)
            self.teacher.to(self.trainer.strategy.root_device, dtype_for(str(self.trainer.precision)))
        if stage == "fit":
            self._tune()
            if self.teacher is not None:
                self._choose_cache(self.teacher)
            self.student_spec.compile_in_place(self.student)

    def _tune(self) -> None:
        """Finds by measuring what is left to it; rank 0 measures for all."""
        data, trainer = self._datamodule, self.trainer
        if "batch_size" in data.auto and self.optim_spec.lr_batch is None:
            raise UserError(
                f"optim.lr_batch: say which global batch optim.lr={self.optim_spec.lr:g} is meant for; "
                "data.batch_size=auto changes the batch"
            )
        for name, tune in (("batch_size", tune_batch_size), ("num_workers", tune_num_workers)):
            if name not in data.auto:
                continue
            if trainer.is_global_zero:
                print(tune(self, data), flush=True)
            setattr(data, name, trainer.strategy.broadcast(getattr(data, name)))

    @property
    def active_losses(self) -> dict[str, Any]:
        """The distillation losses with a weight."""
        return {name: loss for name, loss in self.distill_losses.items() if loss.weight}

    def _choose_cache(self, teacher: Teacher) -> None:
        """Opens the cache of the teacher's answers where it is asked for, or pays."""
        mode, losses = teacher.spec.cache, self.active_losses
        if mode == "off" or not losses:
            return
        if mode == "auto":
            answer = cache_pays(self, teacher, losses, self._datamodule) if self.trainer.is_global_zero else (False, "")
            pays, why = self.trainer.strategy.broadcast(answer)
            if self.trainer.is_global_zero:
                print(f"cache: {why}", flush=True)
            if not pays:
                return
        self._open_cache(teacher)

    def _open_cache(self, teacher: Teacher) -> None:
        object.__setattr__(self, "cached", open_cache(teacher, self.active_losses, self._datamodule))
        self._datamodule.views = teacher.spec.cache_views

    def _inherit(self, teacher: Teacher) -> None:
        from kd.inherit import inherit

        pictures = self._datamodule.sample_pictures(INHERIT_PICTURES)
        try:
            inherit(self.student, teacher.model, pictures, self.student_input, teacher.preprocess)
        except ValueError as error:
            raise UserError(f"model.student.inherit: {error}") from error
        if self.student_ema is not None:
            self.student_ema.set(self.student)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW (or as asked), sharded where asked, with warm-up and cosine stepped every optimizer step."""
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        per_step = self._datamodule.batch_size * self.trainer.world_size * self.trainer.accumulate_grad_batches
        spec = scaled_to_batch(self.optim_spec, per_step)
        self.lr = spec.lr
        optimizer = build_optimizer([self.student, self.distill_losses], spec, fused=not scaled)
        self.trainer.fit_loop.setup_data()  # else a run bounded by steps alone does not know its epoch's length
        total = int(self.trainer.estimated_stepping_batches)
        per_epoch = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        schedule = build_schedule(optimizer, self.optim_spec, total, per_epoch)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seeds dropout and the like by (seed, step, rank): a resumed run draws what the uninterrupted one drew."""
        seed = self._datamodule.seed
        step = self.current_epoch * 1_000_003 + batch_idx
        torch.manual_seed((seed * 7_919 + step) * 4_096 + self.global_rank)

    # -- training ----------------------------------------------------------------------------------------------------

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Adds the teacher's cached answers while the batch is on the host: a look-up later would stop the device."""
        if self.cached is None or not self.trainer.training:
            return batch
        records = self.cached.look_up(batch["index"], self._view)
        return batch if records is None else {**batch, "answers": records}

    @property
    def _view(self) -> int:
        return self.current_epoch % self._datamodule.views

    def _answers(self, batch: Batch) -> Tensor | TopKLogits:
        """The teacher's answers to a batch, cached or live."""
        assert self.teacher is not None
        if self.cached is None:
            return self.teacher(batch["image"])
        return self.cached(batch["image"], batch["index"], self._view, batch.get("answers"))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One batch (see :data:`kd.data.datamodule.Batch`) -> the total loss, a scalar."""
        images, target = batch["image"], batch["target"]
        logits = self.student(self.student_input(images))
        terms = self._distillation_terms(batch, logits)
        total = logits.new_zeros((), dtype=torch.float32)
        if self.task_loss_weight:
            terms["task"] = (self.task_loss_weight, self.task.loss(logits, target))
        for name, (weight, value) in terms.items():
            total = total + weight * value
            self.log(f"train/{name}_loss", value.detach())
        self.log("train/loss", total.detach())
        return total

    def _distillation_terms(self, batch: Batch, logits: Tensor) -> dict[str, tuple[float, Tensor]]:
        active, target = self.active_losses, batch["target"]
        student_features = self._student_taps.pop()
        if not active or self.teacher is None:
            return {}
        answers = self._answers(batch)
        teacher_features = self._teacher_taps.pop() if self._tap_paths else {}
        terms = {}
        for name, loss in active.items():
            if isinstance(loss, FeatureLoss):
                tap = self._tap_paths[name]
                value = loss(student_features[tap.student], teacher_features[tap.teacher].float(), target)
            elif isinstance(answers, TopKLogits):
                value = loss.forward_topk(logits, answers, target)
            else:
                value = loss(logits, answers, target)
            terms[name] = (loss.weight, value)
        return terms

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips as Lightning does, but also beside a fused optimizer, which Lightning refuses even without a scaler."""
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if scaled or gradient_clip_algorithm == "value" or not gradient_clip_val:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Steps, then moves the average."""
        super().optimizer_step(*args, **kwargs)
        if self.student_ema is not None:
            self.student_ema.update(self.student)

    # -- validation --------------------------------------------------------------------------------------------------

    @property
    def final_student(self) -> nn.Module:
        """The weights that are validated and exported: the average where there is one."""
        return self.student_ema.module if self.student_ema is not None else self.student

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds one batch to the task's metrics; padding (index -1) is left out."""
        real = batch["index"] >= 0
        images, target, index = (batch[k][real] for k in ("image", "target", "index"))
        if not len(images):
            return
        logits = self.final_student(self.student_input(images))
        self._student_taps.pop()
        self.task.update(logits, target, self._teacher_prediction(images, index))

    def _teacher_prediction(self, images: Tensor, index: Tensor) -> Tensor | None:
        if self.teacher is None:
            return None
        if self.teacher_predictions is not None:
            return self.teacher_predictions[index]
        prediction = self.teacher(images).argmax(1)
        if self._tap_paths:
            self._teacher_taps.pop()
        return prediction

    def on_validation_epoch_end(self) -> None:
        """Logs ``val/acc1``, ``val/acc5`` and ``val/agreement`` over all processes."""
        self.log_dict({f"val/{name}": value for name, value in self.task.compute().items()})
        self.task.reset()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores who the teacher was (its weights stay out)."""
        checkpoint["kd_teacher"] = self.teacher_identity
        checkpoint["kd_classes"] = list(self.data_info.classes)
        checkpoint["kd_cached"] = self.cached is not None
        checkpoint["kd_batch_size"] = self._datamodule.batch_size

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses to go on with another teacher or other classes."""
        for key, now in (("kd_teacher", self.teacher_identity), ("kd_classes", list(self.data_info.classes))):
            before = checkpoint.get(key, now)
            if before != now:
                raise UserError(
                    f"resume: the checkpoint was made with another {key.removeprefix('kd_')} ({before}, now {now})"
                )
        if "batch_size" in self._datamodule.auto:
            self._datamodule.batch_size = checkpoint.get("kd_batch_size", self._datamodule.batch_size)
        if self.teacher is not None and self.teacher.spec.cache == "auto":
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

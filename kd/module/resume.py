"""What a checkpoint holds beside weights, and how another run resumes from it."""

import math
from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Trainer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from kd.data.datamodule import DistillationDataModule, check_same_samples
from kd.distill.student import Student
from kd.errors import UserError
from kd.module.resumed_state import check_form, check_optimizers, check_weights
from kd.optim import group_settings, settle_resumed, steps_done, take_words


class Resume:
    """A run's way into a checkpoint and back.

    A run that saves calls :meth:`content`. One that resumes goes through the other methods in this order, by the hooks of
    its module: :meth:`check` and :meth:`check_states` when Lightning has read the checkpoint, :meth:`note` when the
    optimizers are made and nothing is loaded into them yet, :meth:`settle` when all is loaded. With FSDP :meth:`note` comes
    first: the strategy itself reads the checkpoint, and checks and loads weights and optimizers, before Lightning has it.

    Args:
        student: that is trained.
        teacher: who teaches it (:meth:`kd.Teacher.identity`); {} without one.
    """

    optim_before: dict[str, Any] | None = None
    """Settings of the optimizer of the run whose checkpoint :meth:`check` has read; None: it has read none."""
    _made_with: list[list[dict[str, Any]]]
    """Settings of each of this run's optimizers, by parameter group; set by :meth:`note`."""
    _schedules: object = None
    """States of a checkpoint's schedules, from :meth:`check_states` on; None: before it."""
    _optimizer_states: tuple[object, Mapping[str, Any]] | None = None
    """States of a checkpoint's optimizers, and the weights by name that they are for, from :meth:`check_states` to
    :meth:`note`; None: there is nothing to check."""

    def __init__(self, student: Student, teacher: Mapping[str, Any]) -> None:
        self.student = student
        self.teacher = teacher
        self._classes = list(student.data.classes)

    def content(
        self, data: DistillationDataModule | None, cached: bool, compiled: Mapping[str, str]
    ) -> dict[str, Any]:
        """What a checkpoint stores beside Lightning's own parts, for a run that resumes from it.

        That run's :meth:`check` and :meth:`settle` read it, but ``kd_cached`` is for
        :func:`kd.fit_to_machine.restore_auto`, ``kd_compiled`` for :func:`kd.fit_to_machine.compilation.compile_chosen`.

        Args:
            data: of this run; None where the loader is the user's own.
            cached: whether a cache answers in the teacher's place.
            compiled: how the models run that ``compile=auto`` leaves to the machine, by key.

        Returns:
            ``kd_teacher`` (who it was; its weights stay out), ``kd_classes`` (names by id), ``kd_cached``,
                ``kd_compiled``, ``kd_optim`` (its settings); with ``data`` also ``kd_batch_size`` (pictures of a
                process) and ``kd_data`` (which pictures in which order).
        """
        content = {
            "kd_teacher": self.teacher,
            "kd_classes": self._classes,
            "kd_cached": cached,
            "kd_compiled": dict(compiled),
            "kd_optim": self.student.optim.settings(),
        }
        if data is not None:
            content["kd_batch_size"] = data.batch_size
            content["kd_data"] = data.samples_identity
        return content

    def check(self, checkpoint: Mapping[str, Any], data: DistillationDataModule | None) -> None:
        """Compares a checkpoint with this run, and takes over what its run had measured (batch size).

        What a checkpoint does not have is not compared. The batch size is taken over only where this run's is ``auto``.

        Args:
            checkpoint: as loaded, with the keys of :meth:`content`.
            data: of this run; None where it is not kd's.

        Raises:
            UserError: another teacher, other data or classes, an optimizer that the saved state does not fit, or a batch
                size that is no whole number above 0.
        """
        before = self.optim_before = checkpoint.get("kd_optim", {})
        self.student.optim.check_resumed(before)
        if data is not None:
            check_same_samples(checkpoint.get("kd_data", {}), data.samples_identity)
        for key, now in (("kd_teacher", self.teacher), ("kd_classes", self._classes)):
            then = checkpoint.get(key, now)
            if then != now:
                made = f"the checkpoint was made with another {key.removeprefix('kd_')}"
                raise UserError(f"resume: {made} ({then}, now {now})")
        if data is not None and "batch_size" in data.auto:
            size = checkpoint.get("kd_batch_size", data.batch_size)
            if type(size) is not int or size < 1:
                raise UserError(
                    f"resume: the checkpoint's data.batch_size must be >= 1, got {size!r:.60}"
                )
            data.batch_size = size

    def check_states(
        self, checkpoint: Mapping[str, Any], trainer: Trainer, module: nn.Module
    ) -> None:
        """Checks that what Lightning loads from a checkpoint has the form of this run's own (:func:`check_form`,
        :func:`check_weights`), before it loads any of it.

        Weights, the loop of the fit, precision and counters are compared now. The optimizers are made later: their states,
        and those of the schedules, are kept for :meth:`note`. With FSDP they are made and loaded already, and the schedules
        are compared now.

        Args:
            checkpoint: as read.
            trainer: of this run; its fit loop and precision are compared, its ``ckpt_path`` begins a message.
            module: whose weights are compared.

        Raises:
            UserError: the first part that does not fit.
        """
        place = f"resume: {trainer.ckpt_path}"
        check_weights(checkpoint.get("state_dict", {}), module, place)
        loops = checkpoint.get("loops")
        others = loops if isinstance(loops, Mapping) else {}  # of validation and the like: anything
        precision = trainer.precision_plugin
        expected: dict[str, object] = {
            "loops": {**others, "fit_loop": trainer.fit_loop.state_dict()},
            type(precision).__qualname__: precision.state_dict(),
            "global_step": 0,
            "epoch": 0,
        }
        for key, form in expected.items():
            if key in checkpoint:
                check_form(checkpoint[key], form, f"{place}: {key}")
        self._schedules = checkpoint.get("lr_schedulers", [])
        if trainer.strategy.restore_checkpoint_after_setup:
            self._check_schedules(trainer)
            return
        self._optimizer_states = (
            checkpoint.get("optimizer_states"),
            checkpoint.get("state_dict", {}),
        )

    def note(self, trainer: Trainer, module: nn.Module) -> None:
        """Keeps all settings of this run's optimizers, by parameter group (rates, decays, switches), before Lightning
        loads a checkpoint's over them.

        :meth:`settle` applies them afterwards. Of a resumed run the checkpoint's states are checked against the optimizers
        here, where these exist and nothing is loaded yet; with FSDP, which reads the checkpoint later, they are not.

        Raises:
            UserError: the checkpoint's optimizers or schedules do not fit this run's.
        """
        self._made_with = [group_settings(optimizer) for optimizer in trainer.optimizers]
        if self._optimizer_states is None:
            return
        states, weights = self._optimizer_states
        self._optimizer_states = None  # it is as large as the model
        place = f"resume: {trainer.ckpt_path}"
        check_optimizers(trainer.optimizers, states, weights, module, place)
        self._check_schedules(trainer)

    def _check_schedules(self, trainer: Trainer) -> None:
        """Compares the states of the checkpoint's schedules with this run's; a UserError where they do not fit."""
        schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        check_form(self._schedules, schedules, f"resume: {trainer.ckpt_path}: lr_schedulers")

    def settle(self, trainer: Trainer, data: DistillationDataModule | None) -> None:
        """Applies this run's own settings to the restored optimizer (rates, decays, switches), and moves its schedule to
        where this run continues (:func:`_position`).

        Nothing is done in a run that does not resume. With a loader of the user's own only switches and words are applied
        (:func:`kd.optim.take_words`); the checkpoint's numbers stay.

        Args:
            trainer: with one optimizer, and its schedule.
            data: its position says how many epochs and samples of the next one were seen, so that another batch size or
                number of processes continues at the same share of the schedule. Where the data has no position, the
                checkpoint's step of the schedule stays.
        """
        if self.optim_before is None:
            return
        for made, settings in zip(trainer.optimizers, self._made_with, strict=True):
            take_words(made, settings)
        if data is None:
            return
        kwargs_before = self.optim_before.get("kwargs", {})
        keys = {"weight_decay", *kwargs_before, *self.student.optim.kwargs}
        (optimizer,) = trainer.optimizers
        (config,) = trainer.lr_scheduler_configs
        schedule = config.scheduler
        assert isinstance(schedule, LambdaLR)
        position = schedule.last_epoch
        if data.resumed_at is not None:
            epoch, samples = data.resumed_at
            position = _position(trainer, epoch, data.batches_before(samples))
        settle_resumed(optimizer, schedule, self._made_with[0], keys, position)


def _position(trainer: Trainer, epoch: int, batches: int) -> int:
    """The optimizer step at which this run's schedule continues after ``epoch`` epochs and ``batches`` batches of the next
    one.

    It is the number of steps that these make; with ``trainer.max_steps`` it is chosen so that the schedule ends where the
    run ends (:func:`kd.optim.steps_done`). Batches are this run's, of one process; ``trainer.accumulate_grad_batches`` of
    them make a step.
    """
    accumulate = trainer.accumulate_grad_batches
    per_epoch = math.ceil(trainer.num_training_batches / accumulate)
    by_epochs = epoch * per_epoch + batches // accumulate
    total = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        total = trainer.max_epochs * per_epoch
    return steps_done(trainer.global_step, by_epochs, total, trainer.max_steps)

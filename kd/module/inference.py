"""What the LightningModule does without gradients: forward, prediction, validation, test."""

from pathlib import Path
from typing import Self

import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from kd.data.batch import as_batch
from kd.distill.sharding import Sharding
from kd.distill.student import Student
from kd.errors import UserError, plain
from kd.lightning_internals import trainer_of
from kd.module.evaluation import Validation, ValidationLogits
from kd.storage.tensors import read_checkpoint


class Inference(LightningModule):
    """The hooks of :class:`kd.DistillationModule` outside training."""

    student: Student
    """The model that is trained, with its losses."""
    validation: Validation
    """Its metrics."""
    _validated: frozenset[str] = frozenset()
    """Names of the metrics that the newest validation has logged."""

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: torch.device | str | None = None,
        *,
        strict: bool = True,
        **arguments: object,
    ) -> Self:
        """Makes the module from the caller's arguments and loads a training checkpoint's weights into it.

        Nothing else is read from the file: Lightning's own method would take arguments, and classes to import, from
        its ``hyper_parameters``. The file runs no code.

        Args:
            checkpoint_path: the checkpoint.
            map_location: the device to put the module on; default: where the arguments have it.
            strict: whether the names of the weights must be exactly those of the module.
            **arguments: of the class's constructor (``student``, ``teacher``, ...), as no model or loss is in the file.

        Raises:
            UserError: the file can't be read, or its weights don't fit the module.
        """
        module = cls(**arguments)
        try:
            state = read_checkpoint(checkpoint_path)["state_dict"]
            module.load_state_dict(state, strict=strict)
        except Exception as error:  # whatever a damaged or foreign file makes the readers raise
            raise UserError(
                f"checkpoint_path: {checkpoint_path} can't be loaded: {plain(error)}"
            ) from error
        if map_location is None:
            return module
        return module.to(map_location)

    def validation_step(self, batch: object, batch_idx: int) -> ValidationLogits | None:
        """Adds one batch to the student's metrics; padding (index -1) is left out. None as of :meth:`Validation.add`.

        Lightning hands the result to callbacks as ``outputs``, which read it by
        :func:`kd.callbacks.context.validation_logits`.
        """
        return self.validation.add(as_batch(batch), self._runs_in_step())

    def _runs_in_step(self) -> bool:
        """Whether all processes must run the student equally often; False without a trainer (called by hand)."""
        return isinstance(getattr(trainer_of(self), "strategy", None), Sharding)

    def on_validation_epoch_end(self) -> None:
        """Logs the task's metrics over all processes, as ``val/<name>``. Lightning would keep one that only an earlier
        validation had (``miou_of_targets``): the trainer loses it.
        """
        metrics = self.validation.results()
        for gone in self._validated - metrics.keys():
            self.trainer.callback_metrics.pop(gone, None)
        self._validated = frozenset(metrics)
        self.log_dict(metrics)

    def forward(self, images: Tensor) -> Tensor:
        """Runs the student, with the moving average's weights where there is one.

        The mode (training or not) and gradients are the caller's.

        Args:
            images: ``(N, 3, H, W)``, uint8, or float as the model wants them.

        Returns:
            Logits ``(N, C)`` (dense: ``(N, C, H', W')``), without a classifier features ``(N, D)``.
        """
        return self.student.logits(images)

    def predict_step(self, batch: object, batch_idx: int) -> Tensor:
        """What :meth:`forward` gives for a batch of any loader, with targets or without."""
        return self(as_batch(batch)["image"])

    def test_step(self, batch: object, batch_idx: int) -> ValidationLogits | None:
        """As :meth:`validation_step`, with the same metrics, which :meth:`on_test_epoch_end` logs under ``test/``.

        The teacher's stored decisions and answers are not used, as they are of other pictures.
        """
        return self.validation.add(as_batch(batch), self._runs_in_step(), "test")

    def on_test_epoch_end(self) -> None:
        """Logs the task's metrics over all processes, as ``test/<name>``."""
        self.log_dict(self.validation.results("test"))

"""What the LightningModule does without gradients: forward, prediction, validation, test."""

from pathlib import Path
from typing import IO, Self

from pytorch_lightning import LightningModule
from torch import Tensor

from kd.data.batch import as_batch
from kd.distill.sharding import Sharding
from kd.distill.students import Students
from kd.lightning_internals import trainer_of
from kd.module.evaluation import Validation, ValidationLogits


class Inference(LightningModule):
    """The hooks of :class:`kd.DistillationModule` outside training."""

    students: Students
    """The models that are trained."""
    validation: Validation
    """Their metrics."""

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path | IO[bytes], *, weights_only: bool = True, **kwargs: object
    ) -> Self:
        """As Lightning's, but the file runs no code unless ``weights_only=False`` allows it.

        ``kwargs``: Lightning's (``map_location``, ``strict``) and the class's, as no model or loss is in the file.
        """
        return super().load_from_checkpoint(checkpoint_path, weights_only=weights_only, **kwargs)  # type: ignore[arg-type]

    def validation_step(self, batch: object, batch_idx: int) -> ValidationLogits:
        """Adds one batch to each student's metrics; padding (index -1) is left out."""
        trainer = trainer_of(self)  # none where it is called by hand
        return self.validation.add(as_batch(batch), trainer is not None and isinstance(trainer.strategy, Sharding))

    def on_validation_epoch_end(self) -> None:
        """Logs the task's metrics over all processes, as ``val/<name>`` or ``<student>/val/<name>``."""
        self.log_dict(self.validation.results())

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        """Pictures ``(N, 3, H, W)``, uint8 or as the model wants them -> what the weights that count give, float.

        Logits ``(N, C)`` (dense: ``(N, C, H', W')``; without a classifier features ``(N, D)``); of several by name.
        """
        found = {name: student.logits(images) for name, student in self.students.named().items()}
        return found.get("", found)

    def predict_step(self, batch: object, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Logits of a batch of any loader, with targets or without."""
        return self(as_batch(batch)["image"])

    def test_step(self, batch: object, batch_idx: int) -> ValidationLogits:
        """As a step of validation."""
        return self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Logs the metrics under ``test/``."""
        self.log_dict({name.replace("val/", "test/"): value for name, value in self.validation.results().items()})

"""Where a run is in its samples: kept in checkpoints, so that a resumed run sees each sample once."""

from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Trainer

from kd.data.sampler import TrainBatches
from kd.errors import UserError
from kd.lightning_internals import make_loader_again


class Position:
    """A place in the order of the training samples; ``at``: epoch and samples after which a resumed run starts."""

    def __init__(self) -> None:
        self.at: tuple[int, int] | None = None
        self._batches: TrainBatches | None = None

    def begin(self, batches: TrainBatches) -> None:
        if self.at:
            batches.skip(*self.at)
        self._batches = batches

    def state(self, trainer: Trainer | None) -> dict[str, Any]:
        if trainer is None or self._batches is None:
            return {}
        epoch, done = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if done >= trainer.num_training_batches:
            return {"epoch": epoch + 1, "samples": 0}
        return {"epoch": epoch, "samples": self._batches.samples_after(epoch, done)}

    def load(self, state: Mapping[str, Any], trainer: Trainer | None) -> None:
        if state:
            self.at = (state["epoch"], state["samples"])
        if state and trainer and self._batches is not None:
            # a sharded strategy reads the checkpoint after the loader was made: it must be made again
            make_loader_again(trainer)


def check_same_samples(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to resume with other samples, labels or order than the checkpoint's run had."""
    for name in ("seed", "unlabeled_ratio", "balance_classes"):
        if before.get(name, now[name]) != now[name]:
            key = "seed" if name == "seed" else f"data.{name}"
            raise UserError(f"{key}: a resumed run keeps it ({before[name]}, given {now[name]}): it orders the samples")
    if before.get("content", now["content"]) != now["content"]:
        raise UserError(
            f"data.source: these are not the training pictures and labels of the resumed run ({before['train']:,}, "
            f"now {now['train']:,}); with other data start a new run from its student: model.student.checkpoint=RUN"
        )

"""Callbacks that hold something open while a run trains: a file, a thread, a bar, signals."""

from pytorch_lightning import Callback, LightningModule, Trainer


class Closing(Callback):
    """Closes what it holds when training ends, well or not."""

    def close(self, trainer: Trainer) -> None:
        """Closes it; does nothing where nothing is open."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close(trainer)

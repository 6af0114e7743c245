"""Which validation is a student's best so far: decided here alone, read by whatever keeps or reports it."""

from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.context import RunContext
from kd.callbacks.run_folder import RunFolder


class Best(Callback):
    """Compares each validation with the best one before, where it ends; a single student's weights go to ``best.ckpt``.

    Must precede the callbacks that read it. :class:`kd.callbacks.summary.Summary` saves and restores its state.
    """

    def __init__(self, folder: RunFolder, monitor: str, mode: str) -> None:
        self.folder = folder
        self.metric, self.sign = monitor.removeprefix("val/"), -1 if mode == "min" else 1
        self.newest: dict[str, dict[str, float]] = {}
        self.best: dict[str, dict[str, float]] = {}
        self.improved: set[str] = set()

    @property
    def file(self) -> Path:
        assert self.folder.path is not None
        return self.folder.path / "checkpoints" / "best.ckpt"

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.improved = set()
        if trainer.sanity_checking:
            return
        for name in RunContext.of(trainer).students.named():
            prefix = f"{name}/val/" if name else "val/"
            found = {k: v for k, v in trainer.callback_metrics.items() if k.startswith(prefix)}
            now = self.newest[name] = {k.removeprefix(prefix): float(v) for k, v in found.items()}
            if self.metric in now and trainer.strategy.reduce_boolean_decision(self._is_better(name)):
                self.best[name] = {**now, "epoch": trainer.current_epoch + 1, "step": trainer.global_step}
                self.improved.add(name)
        if "" in self.improved:
            trainer.save_checkpoint(self.file, weights_only=True)

    def _is_better(self, name: str) -> bool:
        value, before = self.newest[name][self.metric], self.best.get(name, {}).get(self.metric)
        return value == value and (before is None or self.sign * value > self.sign * before)  # NaN is never the best

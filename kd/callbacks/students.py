"""The folders of several students of one run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.context import RunContext
from kd.callbacks.run_folder import RunFolder
from kd.callbacks.summary import Summary


@dataclass
class StudentFolders(Callback):
    """Writes ``students/<name>/config.yaml`` and, at each student's best epoch, its ``student.safetensors``.

    Must stand behind :class:`Summary`, which knows the best epochs.

    Attributes:
        folder: of the run.
        summary: of the run.
        configs: each student's own configuration, YAML: it repeats that student's run alone.
        save: writes a student's weights to a file.
    """

    folder: RunFolder
    summary: Summary
    configs: dict[str, str]
    save: Callable[[Any, Path], None]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the folders."""
        if trainer.is_global_zero:
            for name, config in self.configs.items():
                path = self.folder.student_path(name)
                path.mkdir(parents=True, exist_ok=True)
                (path / "config.yaml").write_text(config)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the students whose best epoch this is."""
        run = RunContext.of(trainer)
        if not trainer.is_global_zero:
            return
        for name, module in run.students.named().items():
            if self.summary.is_best(name, trainer.current_epoch + 1):
                self.save(module, self.folder.student_path(name) / "student.safetensors")

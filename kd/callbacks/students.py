"""The folders of several students of one run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.best import Best
from kd.callbacks.context import RunContext
from kd.callbacks.run_folder import RunFolder
from kd.storage.checkpoints import write_text


@dataclass
class StudentFolders(Callback):
    """Writes ``students/<name>/config.yaml`` and, at each student's best validation, its ``student.safetensors``."""

    folder: RunFolder  # of the run
    best: Best  # which validation is each student's best
    configs: dict[str, str]  # each student's own configuration, YAML: it repeats that student's run alone
    save: Callable[[Any, Path], None]  # writes a student's weights to a file

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for name, config in self.configs.items():
                write_text(self.folder.student_path(name) / "config.yaml", config)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = RunContext.of(trainer)
        if not trainer.is_global_zero:
            return
        for name, module in run.students.named().items():
            if name in self.best.improved:
                self.save(module, self.folder.student_path(name) / "student.safetensors")

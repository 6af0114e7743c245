"""A run's proof of what it trained on: which samples, in which step, with which loss."""

import json
from collections.abc import Iterable
from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT

from kd.callbacks.context import RunContext, output_of
from kd.callbacks.hooks import after_step
from kd.data.batch import Batch
from kd.storage.elsewhere import LARGEST_LOG, Json, json_of, text_of
from kd.storage.writing import appended, write_text


class Audit(Callback):
    """Appends a line an optimizer step to ``records/samples.rank<r>.jsonl`` in the run folder.

    ``{"epoch": e, "step": s, "index": [...], "loss": x}``: ``e`` counts from 0; ``s`` is how many optimizer steps are
    done, this one included; ``index`` names the samples of this process; the loss is the mean over its batches of the
    step. A resumed run first drops the lines of steps that its checkpoint lacks. Reading indices and loss makes each step
    wait for the device.
    """

    def __init__(self) -> None:
        self._index: list[int] = []
        self._losses: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Chooses this rank's file, and drops from it the steps after the one that training resumes at.

        Rank 0 does the same for files of ranks that this run no longer has.
        """
        folder = RunContext.of(trainer).folder / "records"
        self._file = folder / f"samples.rank{trainer.global_rank}.jsonl"
        for file in folder.glob("samples.rank*.jsonl"):
            rank = int(file.stem.removeprefix("samples.rank"))
            is_gone = rank >= trainer.world_size
            if file == self._file or (is_gone and trainer.is_global_zero):
                lines = []
                for record in read_audit(file):
                    if record["step"] <= trainer.global_step:
                        lines.append(json.dumps(record) + "\n")
                write_text(file, "".join(lines))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Adds the batch to its step, and writes the step's line, as of the class, once it is complete."""
        self._index += batch["index"].tolist()
        self._losses.append(float(output_of(outputs)["terms"]["loss"]))
        if not after_step(trainer, batch_idx):
            return
        loss = sum(self._losses) / len(self._losses)
        line = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "index": self._index,
            "loss": loss,
        }
        with appended(self._file) as file:
            file.write(json.dumps(line) + "\n")
        self._index = []
        self._losses = []


def read_audit(file: Path) -> Iterable[Json]:
    """The lines of :class:`Audit`'s file, in order; a torn one, after a power cut, ends them, with all after it."""
    for line in text_of(file, LARGEST_LOG, errors="replace").splitlines():
        try:
            content = json_of(line)
        except ValueError:
            return
        if not isinstance(content, dict) or "step" not in content:
            return
        yield content

"""Records what the data tier does (``data.engine=ray``)."""

import time

from pytorch_lightning import LightningModule, Trainer

from kd.callbacks.context import RunContext
from kd.callbacks.hooks import Recording
from kd.report.records import Writer

EVERY_S = 2.0
"""Seconds between two records at least: one is written after a batch."""


class TierRecord(Recording):
    """Writes ``records/tier.rank<r>.jsonl``: the queue, and what each machine has made so far; nothing without a tier."""

    _last = 0.0  # when the newest record was written, by ``time.monotonic``

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens this rank's file, where the run has a data tier, and writes the first record."""
        run = RunContext.of(trainer)
        tier = run.data.tier
        if tier is None:
            return
        header = {
            "of": "tier",
            "rank": trainer.global_rank,
            "label": tier.spec.label,
            "queue_mb": tier.spec.queue_mb,
        }
        file = run.folder / "records" / f"tier.rank{trainer.global_rank}.jsonl"
        self._writer = Writer(file, {**header, "t": time.time()})
        self._write(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Writes a line every :data:`EVERY_S` seconds."""
        if self._writer is not None and time.monotonic() > self._last + EVERY_S:
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        """Writes what the tier has done so far, a record of kind ``tier``; nothing where there is no tier."""
        tier = RunContext.of(trainer).data.tier
        reading = {}
        if tier is not None:
            reading = tier.reading()
        if reading and self._writer is not None:
            self._writer.write({"kind": "tier", "t": round(time.time(), 3), **reading})
        self._last = time.monotonic()

    def close(self, trainer: Trainer) -> None:
        """Writes the last line and closes the file."""
        if self._writer is not None:
            self._write(trainer)
        super().close(trainer)

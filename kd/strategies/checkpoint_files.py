"""How Lightning's strategies write and read checkpoints here: atomically, with the one before kept."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import Strategy

from kd.errors import RunError, cause_of_kind
from kd.processes import any_process, in_each
from kd.storage.checkpoints import LAST, PREVIOUS
from kd.storage.tensors import check_readable, read_checkpoint
from kd.storage.writing import write_whole


class CheckpointFiles(TorchCheckpointIO):
    """Whole files only. Before ``last.ckpt`` is replaced, the old one becomes ``previous.ckpt``.

    A run's trainer gets one as its checkpoint plugin; :mod:`kd.storage.checkpoints` names the files.
    """

    def __init__(self) -> None:
        # whether this run was resumed from previous.ckpt and has not saved since
        self._last_is_damaged = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes one file, whole or not at all; when it returns, the file is on the disk.

        The ``last.ckpt`` before is kept as ``previous.ckpt``, unless it was found damaged when the run was resumed.
        Lightning calls it, on rank 0 alone; with ``checkpoint.asynchronous`` from a thread.

        Args:
            checkpoint: saved by ``torch.save``.
            path: of the file; only one that is called ``last.ckpt`` leaves a ``previous.ckpt``.
            storage_options: of Lightning's interface; not read.

        Raises:
            UserError: what it holds could not be read back (:func:`kd.storage.tensors.check_readable`); nothing is written.
            RunError: it can't be written (an ``OSError``, also where torch has wrapped it). Older checkpoints are unchanged.
                Only if the last step fails, the renaming, the old ``last.ckpt`` is ``previous.ckpt`` already, in place of
                the older one.
        """
        check_readable(checkpoint)
        path = Path(path)
        keep = None
        if path.name == LAST and not self._last_is_damaged:
            keep = path.with_name(PREVIOUS)
        try:
            write_whole(path, lambda file: torch.save(checkpoint, file), keep)
        except (OSError, RuntimeError) as error:
            of_disk = cause_of_kind(error, OSError)
            if of_disk is None:
                raise
            reason = of_disk.strerror or of_disk
            kept = "; the one before is kept" if path.exists() else ""
            raise RunError(f"the checkpoint {path} can't be written: {reason}{kept}") from error
        if path.name == LAST:
            self._last_is_damaged = False

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads one file. Never runs code from it: what is no tensor or plain value is refused.

        Lightning calls it, on every rank. Whether the file is ``previous.ckpt`` is noted for the next save.

        Args:
            path: of the file.
            map_location: as of ``torch.load``; by default every tensor stays on the CPU.
            weights_only: of Lightning's interface; not read, as no file may run code.

        Raises:
            ValueError: it is no training checkpoint, or one of its tensors is refused
                (:func:`kd.storage.tensors.check_values`).
            Exception: whatever torch raises for a damaged file, or for one that holds other objects.
        """
        # previous.ckpt is loaded only where last.ckpt is damaged: the next save must not keep that one as previous.ckpt
        self._last_is_damaged = Path(path).name == PREVIOUS
        return read_checkpoint(path, map_location)


def fail_together(strategy: Strategy) -> None:
    """Makes all processes fail when one of them can't save a checkpoint, with its reason, whichever callback saves.

    It replaces the strategy's ``save_checkpoint``, which all processes call. Rank 0 alone writes; without this an error of
    its own would leave the others waiting in Lightning's barrier for ``rank_timeout_s``. Each save costs one more
    collective of a number (:func:`kd.processes.any_process`).

    Args:
        strategy: of a trainer; changed in place.
    """
    save_alone = strategy.save_checkpoint

    def save_checkpoint(
        checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Saves as Lightning does; every process must call it, and each fails where one of them can't save.

        Raises:
            Exception: this process can't save, for whatever reason.
            RunError: another process can't save; names its rank and reason.
            UserError: likewise, where the other process has raised a UserError.
        """
        failure = None
        try:
            save_alone(checkpoint, filepath, storage_options=storage_options)
        except Exception as error:
            failure = error
        if any_process(strategy, failure is not None):
            in_each(partial(_raise, failure))  # raises this process's failure, or else another's

    strategy.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


def _raise(failure: Exception | None) -> None:
    """Raises this process's own failure, if it has one."""
    if failure is not None:
        raise failure

"""Batches that know the targets of their accumulation window.

With ``trainer.accumulate_grad_batches=K`` one optimizer step reads a window of K batches. A loss over labels is a mean
over the labelled pictures (or valid pixels) of one batch. Where labels are missing, K such means do not add up to the
mean over the window: with ``n_b`` labels in batch b and ``N = sum_b n_b`` the factor of batch b must be

    K * n_b / N

instead of 1. ``N`` is known once all batches of the window are loaded, so this loader reads them ahead.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader


class WindowedLoader:
    """A training loader that adds ``window`` to each batch: a list of the ``target`` of each batch of its window.

    Args:
        loader: gives batches as dicts with ``target``.
        size: K, batches of a window; the epoch's last window may be shorter, and the first of a resumed epoch.
        progress: how many batches of the epoch the trainer has taken when iteration begins (a resumed epoch), and how many
            it takes in all (``limit_train_batches``); infinite where that is not known. Windows are counted in these, as
            the trainer counts its steps, so that a batch which is never trained on counts in none.
    """

    def __init__(
        self, loader: DataLoader, size: int, progress: Callable[[], tuple[int, float]]
    ) -> None:
        """Arguments as of the class; Lightning reads ``batch_sampler``, to set its epoch."""
        self.loader = loader
        self.size = size
        self.progress = progress
        self.batch_sampler = loader.batch_sampler  # Lightning sets its epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches in the loader's order, each once its whole window is loaded."""
        taken, total = self.progress()
        window: list[dict[str, Any]] = []
        for batch in self.loader:
            window.append(batch)
            taken += 1
            # once the trainer takes no more each batch is a window of its own
            if taken % self.size == 0 or taken >= total:
                yield from with_window(window)
                window = []
        yield from with_window(window)


def with_window(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The batches of one window, each with the targets of all of them, its own too, in a list under ``window``."""
    targets: list[Tensor] = [batch["target"] for batch in batches]
    return [{**batch, "window": targets} for batch in batches]

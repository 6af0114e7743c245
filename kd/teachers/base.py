"""What a teacher is, for a training step."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kd.data.batch import Batch
from kd.teachers.answer import Answer, Wanted


@runtime_checkable
class Teacher(Protocol):
    """Answers for a batch, always without gradients and in eval mode.

    Deliberately no ``nn.Module``: a LightningModule that holds one keeps it out of its checkpoints, its optimizer,
    DDP's broadcasts and ``train()`` without further care. It moves by :meth:`to` alone.

    Attributes:
        arch: its name, for people.
        model: the weights, to count and to hash.
        has_head: whether it gives logits.
        members: the teachers that it is made of, by name; a single one is itself under the name of all.
        is_shared_out: whether it answers only where all processes ask.
    """

    arch: str
    model: nn.Module

    @property
    def has_head(self) -> bool:
        """See above."""

    @property
    def members(self) -> Mapping[str, Any]:
        """See above."""

    @property
    def is_shared_out(self) -> bool:
        """See above."""

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False) -> "Teacher":
        """Moves to where it is asked from; ``keep`` keeps its weights as loaded until :meth:`forget_original`."""

    def forget_original(self) -> None:
        """Lets go of what :meth:`to` has kept."""

    def fetch(self, batch: Batch) -> Batch:
        """On the host, before the batch travels: adds what it knows already (a cache's records)."""

    def answer(self, batch: Batch, wanted: Wanted) -> Answer:
        """The answer to a batch, with at least what is wanted."""

    def __call__(self, images: Tensor) -> Tensor:
        """Logits ``(N, C)`` of all together."""

    def identity(self) -> dict[str, Any]:
        """Who it is: stored in checkpoints instead of its weights."""

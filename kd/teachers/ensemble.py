"""Several teachers as one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kd.data.batch import Batch
from kd.models import Images
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.cached import CachedTeacher
from kd.teachers.frozen import FrozenTeacher


class Ensemble:
    """Several teachers: each answers with its own input size and normalisation, all together with the weighted mean.

    The mean is of the logits: ``sum(weight_i * logits_i) / sum(weight_i)``. It exists where each has a classifier.

    Args:
        members: the teachers by name, each itself or behind a cache.
    """

    def __init__(self, members: Mapping[str, FrozenTeacher | CachedTeacher]) -> None:
        self.members = dict(members)
        self.arch = " + ".join(teacher.arch for teacher in members.values())
        self.model: nn.Module = nn.ModuleList([teacher.model for teacher in members.values()])
        self.has_head = all(teacher.has_head for teacher in members.values())
        weights = torch.tensor([teacher.weight for teacher in members.values()])
        self._shares = (weights / weights.sum()).tolist()

    @property
    def is_shared_out(self) -> bool:
        """Whether it answers only where all processes ask."""
        return any(teacher.is_shared_out for teacher in self.members.values())

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False) -> "Ensemble":
        for teacher in self.members.values():
            teacher.to(device, dtype, keep)
        return self

    def forget_original(self) -> None:
        for teacher in self.members.values():
            teacher.forget_original()

    def fetch(self, batch: Batch) -> Batch:
        for name, teacher in self.members.items():
            batch = teacher.fetch(batch, name)
        return batch

    def answer(self, batch: Batch, wanted: Wanted) -> Answer:
        """The logits of each teacher by name and of all together, and what is wanted of their layers.

        Dense answers are brought to the size of the first teacher's. A teacher of which nothing is wanted is not asked.
        """
        found = Answer()
        for name, teacher in self.members.items():
            if not wanted.of(name):
                continue
            own = teacher.answer(batch, wanted, name)
            found.features |= own.features
            found.logits |= own.logits
        if self.has_head and ALL in wanted.logits:
            found.logits = {ALL: self._mean(list(found.logits.values())), **found.logits}
        return found

    def _mean(self, logits: list[Any]) -> Tensor:
        size = logits[0].shape[2:]
        if any(x.shape[2:] != size for x in logits):
            logits = [nn.functional.interpolate(x, size, mode="bilinear") for x in logits]
        parts = [share * x for share, x in zip(self._shares, logits, strict=True)]
        return sum(parts[1:], parts[0])

    def __call__(self, images: Images) -> Tensor:
        return self._mean([teacher(images) for teacher in self.members.values()])

    def identity(self) -> dict[str, Any]:
        return {name: teacher.identity() for name, teacher in self.members.items()}

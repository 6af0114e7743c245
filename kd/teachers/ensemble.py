"""Several teachers as one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kd.data.batch import Batch
from kd.models import Images
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.base import RunTeacher


class Ensemble(RunTeacher):
    """Several teachers: each answers with its own input size and normalisation, all together with the weighted mean.

    The mean is of the logits: ``sum(weight_i * logits_i) / sum(weight_i)``. It exists where each has a classifier.
    """

    def __init__(self, members: Mapping[str, RunTeacher]) -> None:
        self._members = dict(members)
        self.arch = " + ".join(teacher.arch for teacher in members.values())
        self.model: nn.Module = nn.ModuleList([teacher.model for teacher in members.values()])
        self.has_head = all(teacher.has_head for teacher in members.values())
        weights = torch.tensor([teacher.weight for teacher in members.values()])
        self._shares = (weights / weights.sum()).tolist()

    @property
    def members(self) -> Mapping[str, RunTeacher]:
        return self._members

    @property
    def is_shared_out(self) -> bool:  # type: ignore[override]
        return any(teacher.is_shared_out for teacher in self.members.values())

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False) -> "Ensemble":
        for teacher in self.members.values():
            teacher.to(device, dtype, keep)
        return self

    def forget_original(self) -> None:
        for teacher in self.members.values():
            teacher.forget_original()

    def fetch(self, batch: Batch, name: str = ALL) -> Batch:
        for own, teacher in self.members.items():
            batch = teacher.fetch(batch, own)
        return batch

    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        found = Answer()
        for member, teacher in self.members.items():
            if not wanted.of(member):
                continue
            own = teacher.answer(batch, wanted, member)
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

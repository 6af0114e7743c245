"""What a preflight has found, kept for the next run of the same teacher on the same pictures: a search has many."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from kd.callbacks.context import RunContext
from kd.data.sources import fingerprint
from kd.storage.checkpoints import write_whole
from kd.tasks.fidelity import KeptLogits
from kd.teachers import dtype_for

FOLDER = "KD_PREFLIGHT"  # The environment's name for the folder; without it nothing is kept


@dataclass
class Found:
    """A preflight's findings."""

    val: dict[str, dict[str, float]]  # the metrics of each teacher, and of all together
    counts: Tensor  # how often each class is the target, ``(C,)``, in the whole split where it lists class ids
    total: int  # the number of targets seen
    decided: Tensor | None  # the teacher's decisions by index, of this process's share
    index: list[int] = field(default_factory=list)  # numbers of the pictures whose logits are kept
    logits: Tensor | None = None  # of all teachers together, float16, ``(len(index), C, ...)``
    hints: dict[str, str] = field(default_factory=dict)  # what to do about a weak teacher, by name
    classes: int = 0  # how many classes were the target of a picture that the teachers have seen

    def give(self, kept: KeptLogits) -> None:
        if self.logits is not None:
            kept.add(torch.tensor(self.index), self.logits)


class SharedPreflight:
    """The file of one teacher, validation set and process."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        folder = os.environ.get(FOLDER)
        self.file = Path(folder, f"{self._key()}.pt") if folder else None

    def _key(self) -> str:
        trainer, data = self.run.trainer, self.run.data
        teachers = [[name, t.weight, t.identity(), t.described()] for name, t in self.run.teacher.members.items()]
        facts = [
            teachers, str(dtype_for(str(trainer.precision))), self.run.device.type, torch.__version__,
            fingerprint(data.split("val")), list(data.source.classes), data.size, data.crop_ratio,
            type(self.run.module.task).__name__, hashlib.sha256(data.eval_batches("val").order.tobytes()).hexdigest(),
            str(trainer.limit_val_batches), data.batch_size, trainer.world_size, trainer.global_rank,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]

    def read(self) -> Found | None:
        """What an earlier run has found; None unless all processes have their file."""
        found = None
        try:
            if self.file is not None:
                found = Found(**torch.load(self.file, weights_only=True))
        except (OSError, RuntimeError, ValueError, TypeError, EOFError):  # not there, or damaged: it is made anew
            pass
        if self.file is None or self.run.trainer.world_size == 1:
            return found
        there = self.run.trainer.strategy.reduce(torch.tensor(float(found is not None)), reduce_op="sum")
        return found if int(there) == self.run.trainer.world_size else None

    def write(self, found: Found, kept: KeptLogits) -> None:
        if self.file is None:
            return
        rows = kept.rows
        found = replace(found, index=list(rows), logits=torch.stack(list(rows.values())) if rows else None)
        part = self.file.with_name(f"{self.file.stem}-{os.getpid()}.pt")  # several runs may find it at once
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(part, lambda opened: torch.save(asdict(found), opened))
        part.replace(self.file)

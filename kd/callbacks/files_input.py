"""Whether a teacher would be right more often with the input size, mean and std that its weights name."""

import math

import torch
from torch import Tensor

from kd.callbacks.class_order import SIGMAS
from kd.callbacks.context import RunContext
from kd.data.batch import Batch, real_rows
from kd.teachers.frozen import FrozenTeacher

PICTURES = 512  # that are compared at most, fewer where the weights' own input is larger
FEWEST = 64
LEAST_GAIN = 0.02  # of accuracy that is worth a word


class FilesInput:
    """A teacher with the input that its weights name, beside the same teacher as it is set, on some of the pictures.

    Args:
        teacher: as it is set.
        batches: of the validation set; from each as many pictures are compared.
    """

    def __init__(self, teacher: FrozenTeacher, batches: int) -> None:
        assert teacher.named_input is not None
        self.key, self.settings = teacher.key, teacher.named_input.settings
        self.teacher = teacher.named_input.build(teacher)
        self.teacher.to(teacher.device, teacher.dtype)
        pixels = math.prod(teacher.prepare.size) / math.prod(self.teacher.prepare.size)
        pictures = max(FEWEST, min(PICTURES, int(PICTURES * pixels)))
        self.of_each_batch = math.ceil(pictures / max(1, batches))
        # pictures: that both get right, that only the weights' own input does, that only the settings' does, all
        self.counts = torch.zeros(4, dtype=torch.long, device=teacher.device)

    @torch.no_grad()
    def look(self, batch: Batch, logits: Tensor, target: Tensor) -> None:
        """Compares on a batch.

        Args:
            batch: with uint8 pictures; padding is left out. Float pictures are prepared already and not compared.
            logits: of the teacher as it is set, ``(N, C)``.
            target: class ids ``(N,)``.
        """
        images = batch["image"][real_rows(batch)][: self.of_each_batch]
        if images.is_floating_point():
            return
        target = target[: len(images)]
        as_named = self.teacher(images.to(target.device)).argmax(1) == target
        as_set = logits[: len(images)].argmax(1) == target
        sums = [(as_named & as_set).sum(), (as_named & ~as_set).sum(), (~as_named & as_set).sum()]
        self.counts += torch.stack([*sums, torch.full_like(sums[0], len(images))]).to(
            self.counts.device
        )

    def remedy(self, run: RunContext) -> str:
        """The keys that mend it, where the weights' own input is clearly better (a paired test); otherwise empty."""
        counts = run.trainer.strategy.reduce(self.counts, reduce_op="sum")
        both, named, given, pictures = (int(count) for count in counts)
        gain = named - given
        if gain <= SIGMAS * max(1, named + given) ** 0.5 or gain < LEAST_GAIN * pictures:
            return ""
        keys = " ".join(f"{self.key}.{name}={value}" for name, value in self.settings.items())
        before, after = ((both + count) / pictures for count in (given, named))
        compared = f"it reaches {after:.1%} of {pictures} pictures and not {before:.1%}"
        return f"; with the input that its weights name {compared}: {keys}"


def files_inputs(run: RunContext) -> dict[str, FilesInput]:
    """For each teacher whose weights name another input than it has, by name."""
    batches = run.data.eval_batches("val").used
    return {
        name: FilesInput(teacher, batches)
        for name, teacher in run.teacher.members.items()
        if isinstance(teacher, FrozenTeacher)
        and teacher.named_input is not None
        and not teacher.is_shared_out
    }

"""Whether a teacher would be right more often with the input size, mean and std that its weights name."""

import math

import torch
from torch import Tensor

from kd.callbacks.context import RunContext
from kd.data.batch import Batch, real_rows
from kd.processes import total_of_tensors
from kd.proof.luck import is_clearly_more
from kd.teachers.frozen import FrozenTeacher

PICTURES = 512
"""How many pictures each process compares, rounded up to equally many of each batch; fewer where the weights' own input
is larger.
"""

FEWEST = 64
"""The least number in place of :data:`PICTURES`, however large the weights' own input is."""

LEAST_GAIN = 0.02
"""Share of the pictures by which the weights' own input must be right more often."""


class FilesInput:
    """A teacher with the input that its weights name, beside the same teacher as it is set, on some of the pictures.

    Args:
        teacher: as it is set; its weights name another input (``named_input``).
        batches: of the validation, in this process; of each equally many pictures are compared.
    """

    def __init__(self, teacher: FrozenTeacher, batches: int) -> None:
        """Builds the teacher again with the input that its weights name, and decides how many pictures compare the two;
        arguments as of the class.
        """
        named = teacher.named_input
        assert named is not None
        self.key = teacher.key
        self.settings = named.settings
        self.teacher = named.build(teacher)
        self.teacher.to(teacher.device, teacher.dtype)
        # as many pixels as PICTURES have at the size that is set
        pixels = math.prod(teacher.prepare.size)
        pixels_named = math.prod(self.teacher.prepare.size)
        pictures = min(PICTURES, PICTURES * pixels // pixels_named)
        pictures = max(FEWEST, pictures)
        self.of_each_batch = math.ceil(pictures / max(1, batches))
        self.counts = torch.zeros(4, dtype=torch.long, device=teacher.device)
        """Pictures of this process that both inputs get right, the weights' own alone, the set one alone, and all that
        were compared: ``(4,)``.
        """

    @torch.no_grad()
    def look(self, batch: Batch, logits: Tensor, target: Tensor) -> None:
        """Adds a batch's first pictures to :attr:`counts`; nothing waits for the device.

        Args:
            batch: with uint8 pictures; padding is left out. Float pictures are prepared already and not compared.
            logits: of the teacher as it is set, without padding, ``(N, C)``.
            target: class ids ``(N,)``, likewise; a picture without a label (-1) is not compared.
        """
        rows = real_rows(batch)
        images = batch["image"][rows][: self.of_each_batch]
        if images.is_floating_point():
            return
        target = target[: len(images)]
        logits_as_named = self.teacher(images.to(target.device))
        as_named = logits_as_named.argmax(1) == target
        as_set = logits[: len(images)].argmax(1) == target
        both = (as_named & as_set).sum()
        named_alone = (as_named & ~as_set).sum()
        set_alone = (~as_named & as_set).sum()
        pictures = (target >= 0).sum()
        counts = torch.stack([both, named_alone, set_alone, pictures])
        self.counts += counts.to(self.counts.device)

    def remedy(self, run: RunContext) -> str:
        """The settings that mend the teacher's input, for the message, where the weights' own is clearly better; else
        "".

        A sign test and :data:`LEAST_GAIN` decide; all ranks must call this.
        """
        counts = total_of_tensors(run.trainer.strategy, self.counts)
        both, named_alone, set_alone, pictures = counts.tolist()
        gain = named_alone - set_alone
        changed = named_alone + set_alone
        if not is_clearly_more(named_alone, changed, 0.5) or gain < LEAST_GAIN * pictures:
            return ""
        before = (both + set_alone) / pictures
        after = (both + named_alone) / pictures
        words = []
        for name, value in self.settings.items():
            words.append(f"{self.key}.{name}={value}")
        keys = " ".join(words)
        compared = f"it reaches {after:.1%} of {pictures} pictures and not {before:.1%}"
        return f"; with the input that its weights name {compared}: {keys}"


def files_inputs(run: RunContext) -> dict[str, FilesInput]:
    """For each teacher whose weights name another input than it has, by name; not for one whose weights are sharded."""
    batches = run.data.eval_batches("val").used
    inputs: dict[str, FilesInput] = {}
    for name, teacher in run.teacher.members.items():
        if not isinstance(teacher, FrozenTeacher) or teacher.is_shared_out:
            continue
        if teacher.named_input is not None:
            inputs[name] = FilesInput(teacher, batches)
    return inputs

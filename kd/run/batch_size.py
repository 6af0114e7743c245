"""A smaller batch where a run that trains weights on has few pictures."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kd.launch.processes import processes_asked_for

LEAST_STEPS = 8
"""Of an epoch, where trained weights are fine-tuned: fewer and longer steps undo what the weights have learnt."""
AUTO_STAYS = 256
"""``data.batch_size=auto`` stays where so many pictures a batch leave an epoch its steps: a number in its place could be too
large for the memory, which nobody has measured yet."""


def may_shrink(config: Mapping[str, Any], typed: Iterable[str]) -> bool:
    """Whether a run's batch may be made smaller where pictures are few.

    It may in a new run whose student's first weights were trained by its settings (``inherit``, ``pretrained``, a
    checkpoint), unless the batch size was typed.

    Args:
        config: its settings, resolved.
        typed: ``key=value`` items of the command line.
    """
    student = config["model"]["student"]
    was_trained = student["inherit"] or student["pretrained"] or student["checkpoint"]
    if not was_trained or config["resume"]:
        return False
    return not any(item.startswith("data.batch_size=") for item in typed)


def smaller_batch(config: Mapping[str, Any], pictures: int) -> int | None:
    """The batch size of each process with which an epoch has :data:`LEAST_STEPS` batches at least; None: as it is set.

    An epoch of a single step moves trained weights too far (80 pictures in batches of 64: from a fitted classifier's 86 %
    to chance; in batches of 16 up to 90 %). The result is a power of two, 4 at least, so fewer than 32 pictures of a process
    have fewer batches. Several batches in an optimizer step (``trainer.accumulate_grad_batches``) are not considered.

    Args:
        config: the run's settings, resolved; all its processes share the pictures.
        pictures: that it trains on.
    """
    size = config["data"]["batch_size"]
    most = AUTO_STAYS if size == "auto" else size
    of_process = pictures // processes_asked_for(config["trainer"])
    if most <= 4 or of_process >= LEAST_STEPS * most:
        return None
    largest = max(1, of_process // LEAST_STEPS)
    power = int(math.log2(largest))
    return 2 ** max(2, power)

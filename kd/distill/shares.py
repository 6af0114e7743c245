"""Where labels are missing, each term is a mean over all targets of an optimizer step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kd.distill.objective import Objective
from kd.losses.ranks import share_of_the_step


def by_share(
    objective: Objective,
    values: Mapping[str, Tensor],
    target: Tensor,
    window: Sequence[Tensor] | None,
) -> dict[str, Tensor]:
    """Each term times its batch's share of the targets of the optimizer step (:func:`kd.losses.ranks.share_of_the_step`).

    In several processes all must call it (an all-reduce).

    Args:
        objective: counts the targets of each term.
        values: the terms by name, ``task`` among them.
        target: of this batch, ``(N, ...)``.
        window: targets of all batches of the step on this process; None: this batch alone is read.
    """
    batches = [target] if window is None else window
    counts = []
    of_window = []
    for name in values:
        source: Any = objective.task if name == "task" else objective.losses[name]
        counts.append(source.counted(target))
        in_each_batch = [source.counted(other) for other in batches]
        of_window.append(torch.stack(in_each_batch).sum())
    shares = share_of_the_step(torch.stack(counts), torch.stack(of_window), len(batches))
    pairs = zip(values.items(), shares, strict=True)
    return {name: value * share for (name, value), share in pairs}

"""A validation part taken from the training pictures, where a source has none of its own."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np


def held_out(targets: Sequence[Any], fraction: float, seed: int) -> np.ndarray:
    """Numbers of the held-out training pictures, ascending: ``fraction`` of each class, at least one of two or more.

    Pictures of several labels, with masks or without labels are drawn from all of them alike.
    """
    rng = np.random.default_rng([seed, 2])
    classes: dict[Hashable, list[int]] = {}
    for i, target in enumerate(targets):
        classes.setdefault(target if isinstance(target, int) else None, []).append(i)
    counts = {kind: min(max(1, round(fraction * len(found))), len(found) - 1) for kind, found in classes.items()}
    return np.sort(np.concatenate([rng.permutation(found)[: counts[kind]] for kind, found in classes.items()]))

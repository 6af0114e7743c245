"""How faithful a student that answers in numbers is to its teacher."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.tasks.fidelity import MODELS

PARTS = 10


class NumbersFidelity:
    """Keeps the numbers of both models and the targets, picture by picture; :meth:`result` compares them."""

    kind = "numbers"

    def __init__(self) -> None:
        self.rows: dict[
            int, Tensor
        ] = {}  # by the picture's number: (3, C) of student, teacher and target
        self.mistakes: dict[str, list[Any]] = {}

    def update(
        self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor
    ) -> None:
        """Adds a batch, ``(N, C)`` each; ``index``: the pictures' numbers ``(N,)``."""
        missing = torch.full_like(student, torch.nan) if teacher is None else teacher
        rows = torch.stack([student.float(), missing.float(), target.float()], 1).cpu()
        self.rows |= dict(zip(index.tolist(), rows, strict=True))

    def add(self, other: "NumbersFidelity") -> None:
        """Adds the pictures that another process has seen; a picture counts once."""
        self.rows |= other.rows

    def result(self, classes: Sequence[str]) -> dict[str, Any]:
        """By target: the correlation of student and teacher, their mean difference and, in units, each one's error.

        Returns:
            ``kind``, ``pictures``, and ``targets``: of each its ``name``, ``correlation`` and ``difference`` (mean
            absolute) where there is a teacher, ``mae`` by model, and ``deciles``: the mean absolute error of each tenth
            of the pictures, ordered by the target, as ``from``, ``to``, ``student`` and ``teacher``.
        """
        values = torch.stack([self.rows[i] for i in sorted(self.rows)]).double().numpy()
        targets = [_of_target(name, *values[:, :, i].T) for i, name in enumerate(classes)]
        return {"kind": self.kind, "pictures": len(values), "targets": targets}


def _of_target(
    name: str, student: np.ndarray, teacher: np.ndarray, target: np.ndarray
) -> dict[str, Any]:
    models = {
        n: x for n, x in zip(MODELS, (student, teacher), strict=True) if not np.isnan(x).any()
    }
    known = ~np.isnan(target)
    order = np.flatnonzero(known)[np.argsort(target[known], kind="stable")]
    errors = {n: np.abs(x - target) for n, x in models.items()}
    found: dict[str, Any] = {
        "name": name,
        "mae": {n: float(e[known].mean()) for n, e in errors.items() if known.any()},
    }
    if "teacher" in models and student.std() and teacher.std():
        found["correlation"] = float(np.corrcoef(student, teacher)[0, 1])
        found["difference"] = float(np.abs(student - teacher).mean())
    found["deciles"] = [
        {
            "from": float(target[part[0]]),
            "to": float(target[part[-1]]),
            **{n: float(e[part].mean()) for n, e in errors.items()},
        }
        for part in np.array_split(order, PARTS)
        if len(part)
    ]
    return found

"""How faithful a student that answers in numbers is to its teacher."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.tasks.fidelity import MODELS

PARTS = 10
"""Groups of pictures, by the target, whose errors are reported separately."""


class NumbersFidelity:
    """Keeps the numbers of both models and the targets, picture by picture; :meth:`result` compares them."""

    kind = "numbers"

    def __init__(self) -> None:
        """Begins without pictures; mistakes are not kept."""
        self.rows: dict[int, Tensor] = {}
        """By the picture's number: ``(3, C)`` of student, teacher and target."""
        self.mistakes: dict[str, list[Any]] = {}
        """Always empty: a number is not right or wrong, so no picture is kept to be shown."""

    def update(
        self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor
    ) -> None:
        """Adds a batch, in the targets' units.

        Args:
            student: its numbers, ``(N, C)``.
            teacher: likewise; None for a student alone.
            target: ``(N, C)``, NaN where missing.
            index: the pictures' numbers in their split, ``(N,)``.
        """
        if teacher is None:
            teacher = torch.full_like(student, torch.nan)
        columns = [student.float(), teacher.float(), target.float()]
        rows_N3C = torch.stack(columns, 1).cpu()
        numbers = index.tolist()
        self.rows |= dict(zip(numbers, rows_N3C, strict=True))

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
        in_order = [self.rows[number] for number in sorted(self.rows)]
        values_N3C = torch.stack(in_order).double().numpy()
        targets = []
        for i, name in enumerate(classes):
            values_N3 = values_N3C[:, :, i]
            student, teacher, target = values_N3.T
            targets.append(_result_of(name, student, teacher, target))
        pictures = len(values_N3C)
        return {"kind": self.kind, "pictures": pictures, "targets": targets}


def _result_of(
    name: str, student: np.ndarray, teacher: np.ndarray, target: np.ndarray
) -> dict[str, Any]:
    """The result of one target, ``(N,)`` each; a model that gave NaN or infinity is left out."""
    errors = {}
    for model, numbers in zip(MODELS, (student, teacher), strict=True):
        if np.isfinite(numbers).all():
            errors[model] = np.abs(numbers - target)
    known = ~np.isnan(target)
    result: dict[str, Any] = {"name": name, "mae": {}}
    if known.any():
        for model, error in errors.items():
            result["mae"][model] = float(error[known].mean())
    if len(errors) == len(MODELS) and student.std() and teacher.std():
        result["correlation"] = float(np.corrcoef(student, teacher)[0, 1])
        result["difference"] = float(np.abs(student - teacher).mean())
    result["deciles"] = _deciles(target, errors)
    return result


def _deciles(target: np.ndarray, errors: Mapping[str, np.ndarray]) -> list[dict[str, float]]:
    """Each model's mean error in each tenth of the known targets, ``(N,)`` each, by their size."""
    known = np.flatnonzero(~np.isnan(target))
    order = np.argsort(target[known], kind="stable")
    deciles = []
    for rows in np.array_split(known[order], PARTS):
        if not len(rows):
            continue
        smallest, largest = target[rows[0]], target[rows[-1]]
        decile = {"from": float(smallest), "to": float(largest)}
        for model, error in errors.items():
            decile[model] = float(error[rows].mean())
        deciles.append(decile)
    return deciles

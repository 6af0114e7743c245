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
        """Adds a batch, in the targets' units; a picture that came before is replaced.

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
        """By target: how student and teacher correlate and differ, and each one's error; after the last batch.

        ``fidelity.json`` and ``eval_*.json`` hold it for the report.

        Args:
            classes: names of the C targets, in the order of the columns.

        Returns:
            ``kind``, ``pictures`` (how many), and ``targets``, a dict for each: its ``name``; ``mae`` by model, over the
            pictures whose target is known ({} where none is); ``correlation`` and ``difference`` (mean absolute) of the
            two models, over all pictures; ``deciles``, a dict for each tenth of the pictures with a known target, ordered
            by it: the smallest and the largest target, ``from`` and ``to``, and the mean absolute error of ``student`` and
            ``teacher``. All but the correlation are in the target's units. A model that is not there, or gave NaN or
            infinity for any picture, is missing; ``correlation`` and ``difference`` are missing without both models, and
            where one always answers the same.
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
    """The entry of one target, as :meth:`NumbersFidelity.result` lists it.

    Args:
        name: of the target.
        student: its numbers, ``(N,)``.
        teacher: likewise; NaN without one.
        target: ``(N,)``, NaN where missing.
    """
    errors = {}
    for model, numbers in zip(MODELS, (student, teacher), strict=True):
        if np.isfinite(numbers).all():
            errors[model] = np.abs(numbers - target)
    known = ~np.isnan(target)
    result: dict[str, Any] = {"name": name, "mae": {}}
    if known.any():
        for model, error in errors.items():
            result["mae"][model] = float(error[known].mean())
    both = len(errors) == len(MODELS)
    if both and student.std() and teacher.std():
        correlations = np.corrcoef(student, teacher)
        differences = np.abs(student - teacher)
        result["correlation"] = float(correlations[0, 1])
        result["difference"] = float(differences.mean())
    result["deciles"] = _deciles(target, errors)
    return result


def _deciles(target: np.ndarray, errors: Mapping[str, np.ndarray]) -> list[dict[str, float]]:
    """Each model's mean error in each tenth of the pictures with a known target, ordered by the target.

    Args:
        target: ``(N,)``, NaN where missing.
        errors: absolute errors ``(N,)``, by model.

    Returns:
        :data:`PARTS` dicts (fewer of fewer pictures) with ``from`` and ``to``, the smallest and the largest target, and
        each model's error.
    """
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

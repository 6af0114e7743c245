"""The rule of a cascade as ``kd-eval cascade=true`` has measured it: when the teacher is asked."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kd.errors import UserError
from kd.proof.cascade import sureness
from kd.storage.of_weights import CASCADE, read_of_weights


@dataclass(frozen=True)
class CascadeRule:
    """Asks the teacher for pictures on which the student's largest probability is below a threshold."""

    threshold: float
    """In 0..1 (1.01: always asks)."""

    def asks(self, probabilities: np.ndarray) -> np.ndarray:
        """Which pictures ask the teacher, bool ``(N,)``, by the student's probabilities ``(N, C)``; NaN ask, too."""
        return sureness(np.asarray(probabilities, np.float64)) < self.threshold


def read_rule(run: Path, key: str = "defer") -> CascadeRule:
    """A run's rule: the threshold that was chosen.

    Args:
        run: its folder.
        key: what messages begin with.

    Raises:
        UserError: no threshold was found, or for other weights, or the file can't be read.
    """
    measures = f"kd-eval {run} cascade=true measures it"
    why = [f"{run} has no {CASCADE}"]
    found = read_of_weights(run, CASCADE, why.append)
    if not found:
        raise UserError(f"{key}: {why[-1]}; {measures}")
    try:
        return CascadeRule(float(found["threshold"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{key}: {run}: {CASCADE} can't be read; {measures} anew") from error

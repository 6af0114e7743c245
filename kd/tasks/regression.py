"""Regression: numbers as targets, such as calories, weight, age."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kd.errors import REFUSED_LOSSES
from kd.losses import LogitLoss
from kd.losses.numbers import FORMS
from kd.tasks.base import ExactMetric, FirstClassifier, Task, within
from kd.tasks.features import starting_numbers
from kd.tasks.fidelity_numbers import NumbersFidelity


class Regression(Task):
    """Numbers a picture, each with a name. A loss on standardised targets; R2, MAE and RMSE.

    Models answer in the targets' units. In training the training targets' mean is subtracted from targets and answers,
    which are then divided by the training targets' standard deviations, so that no target outweighs another. A missing
    value (NaN) takes no part.

    Args:
        num_classes: how many numbers; default: as the data says.
        loss: ``smooth_l1``, ``l1`` or ``l2``.
    """

    kind = "numbers"
    primary = "r2"
    certified = "mean absolute error"
    in_rows = True
    no_class_id = "has numbers in place of classes"
    means: Tensor
    """Of the training targets, ``(C,)``, in their units; 0 until :meth:`scale`."""
    deviations: Tensor
    """Their standard deviations, ``(C,)``; 1 until :meth:`scale`."""

    def __init__(self, num_classes: int | None = None, loss: str = "smooth_l1") -> None:
        """Checks the form of the loss; arguments as of the class.

        Raises:
            ValueError: another form, or fewer numbers than one.
        """
        super().__init__(num_classes)
        if loss not in FORMS:
            raise ValueError(f"loss must be one of {', '.join(FORMS)}, got {loss}")
        self.form = loss
        # of the C numbers, set by `build` and `name_metrics`; a single one needs none
        self.names = [""]

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        """Makes the errors' metric for ``num_classes`` numbers a picture, and the buffers that standardise targets.

        Until :meth:`scale` these leave targets as they are, and until :meth:`name_metrics` several numbers are named by
        their place, 0, 1, ...; ``ignore_index`` is not read.
        """
        self.errors = NumberErrors(num_classes)
        self.name_metrics([str(i) for i in range(num_classes)])
        self.register_buffer(
            "means", torch.zeros(num_classes, dtype=torch.float32), persistent=False
        )
        self.register_buffer(
            "deviations", torch.ones(num_classes, dtype=torch.float32), persistent=False
        )

    def name_metrics(self, classes: Sequence[str]) -> None:
        """Takes the numbers' names; a single number's metrics have no name in theirs."""
        if len(classes) == 1:
            self.names = [""]
        else:
            self.names = list(classes)

    def scale(self, means: Sequence[float], deviations: Sequence[float]) -> None:
        """Sets mean and standard deviation of the training targets, by which :meth:`compared` standardises."""
        self.means.copy_(torch.tensor(means))
        self.deviations.copy_(torch.tensor(deviations))

    def first_classifier(self, features: Tensor, targets: Tensor) -> FirstClassifier | None:
        """A ridge regression in units: features ``(M, D)``, targets ``(M, C)``.

        Pictures that lack one of the targets (NaN) are left out; None where fewer than two are left.
        """
        known = ~targets.isnan().any(dim=1)
        if known.sum() < 2:
            return None
        weight, bias, r2 = starting_numbers(features[known], targets[known])
        return FirstClassifier(weight, bias, f"R2 {r2:.3f}")

    def metric_names(self, teacher: bool) -> list[str]:
        """``r2`` (the mean over the numbers), ``mae``, ``rmse``; of several numbers ``r2``, then ``r2_NAME`` of each,
        ``mae_NAME`` of each, ``rmse_NAME`` of each. With a teacher they are the same.
        """
        return [
            "r2",
            *(
                _metric_name(kind, name)
                for kind in ("r2", "mae", "rmse")
                for name in self.names
                if kind != "r2" or name
            ),
        ]

    def compared(self, answer: Tensor) -> Tensor:
        """Numbers in standard deviations from the training targets' mean, ``(N, C)``."""
        return (answer - self.means) / self.deviations

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of standardised answers and targets (:meth:`compared`), the mean over the known targets; 0 without.

        Args:
            logits: answers in units, ``(N, C)``.
            target: in units, ``(N, C)``, NaN where missing.
        """
        known = ~target.isnan()
        answers = self.compared(logits.float())
        targets = self.compared(target).nan_to_num()
        losses = FORMS[self.form](answers, targets, reduction="none")
        of_known = losses * known
        return of_known.sum() / known.sum().clamp_min(1)

    def wanted_targets(self, training: bool) -> str:
        """The numbers of each picture."""
        return f"floats (N, {self.num_classes}), the numbers of each picture (NaN: missing)"

    def takes(self, target: Tensor, pictures: int, training: bool) -> bool:
        """Whether targets are finite floats ``(N, C)``, or NaN."""
        shape = (pictures, self.num_classes)
        most = torch.finfo(torch.float32).max
        return target.is_floating_point() and target.shape == shape and within(target, -most, most)

    def counted(self, target: Tensor) -> Tensor:
        """How many numbers of the targets ``(N, C)`` are known, not NaN: int64, a scalar."""
        return (~target.isnan()).sum()

    def decide(self, logits: Tensor) -> Tensor:
        """The numbers themselves, ``(N, C)`` in the targets' units."""
        return logits

    def same(self, logits: Tensor, others: Tensor) -> Tensor:
        """Where numbers ``(N, C)`` differ by at most one per cent of the first plus 1e-6: bool ``(N, C)``."""
        return (logits - others).abs() <= 0.01 * logits.abs() + 1e-6

    def refuses(self, loss: LogitLoss) -> str:
        """Refuses every loss that is not defined for numbers."""
        if loss.for_numbers and not loss.exclusive:  # StandardizedLoss standardises over classes
            return ""
        return REFUSED_LOSSES["Regression"]

    def fidelity(self, classes: int) -> NumbersFidelity:
        """A comparison of the student's numbers with the teacher's."""
        return NumbersFidelity()

    def rows(self, answer: Tensor, classes: Sequence[str]) -> dict[str, list[str]]:
        """A column of text for each number, with six significant digits; empty where a number is NaN: a missing target.

        The key of a column is ``_`` and the number's name.

        Args:
            answer: numbers or targets, ``(N, C)``, in units.
            classes: the numbers' names.
        """
        columns = answer.float().T.tolist()
        texts: dict[str, list[str]] = {}
        for name, column in zip(classes, columns, strict=True):
            cells = []
            for number in column:
                cells.append("" if math.isnan(number) else f"{number:.6g}")
            texts[f"_{name}"] = cells
        return texts

    def judged(self, value: float, total: int) -> str:
        """The coefficient of determination in words: 0 is as good as the targets' mean, 1 without an error."""
        return f"reaches R2 {value:.3f} on {total} validation pictures (0: the targets' mean, 1: without an error)"

    def outcome(self, answer: Tensor, target: Tensor) -> Tensor:
        """Absolute errors in the targets' units, NaN where a target is missing: ``(N, C)``."""
        return (answer.float() - target).abs()

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        """Adds the errors of a batch of numbers ``(N, C)``; the teacher's answer is not used."""
        self.errors.update(logits, target)

    def compute(self) -> dict[str, Tensor]:
        """``r2``, the mean over the targets, and ``mae`` and ``rmse`` in units: scalars.

        Of several targets each also has its own ``r2``, and only its own ``mae`` and ``rmse``: ``r2_fat``, ``mae_fat``,
        ``rmse_fat``. {} where no process has a batch.
        """
        errors: Any = super().compute().get("errors")
        if errors is None:
            return {}
        metrics = {}
        for kind in ("r2", "mae", "rmse"):
            values_C = errors[kind].reshape(-1)  # torchmetrics makes one number a scalar
            for i, name in enumerate(self.names):
                metrics[_metric_name(kind, name)] = values_C[i]
        metrics["r2"] = errors["r2"].reshape(-1).mean()
        return metrics

    def chance(self, counts: Tensor, total: int) -> float:
        """The R2 of the targets' mean."""
        return 0.0


def _metric_name(kind: str, name: str) -> str:
    """The name of a target's metric, without blanks and slashes.

    >>> _metric_name("mae", "fat (g)"), _metric_name("mae", "")
    ('mae_fat_(g)', 'mae')
    """
    if not name:
        return kind
    words = "_".join(name.split())
    return f"{kind}_{words}".replace("/", "_")


class NumberErrors(ExactMetric):
    """R2, mean absolute error and root mean squared error of each of C numbers; missing targets take no part.

    The sums are in float64.
    """

    sums: Tensor
    """``(5, C)``: known targets, and over these the sums of ``|e|``, ``e^2``, ``y`` and ``y^2``."""

    def __init__(self, count: int) -> None:
        """Begins without targets; ``count``: of the numbers, C."""
        super().__init__()
        self.add_state("sums", torch.zeros(5, count, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, answer: Tensor, target: Tensor) -> None:
        """Adds a batch, ``(N, C)`` each, in units; a missing target is NaN."""
        is_known = ~target.isnan()
        known = is_known.double()
        y = target.nan_to_num().double()
        difference = answer.double() - y
        error = difference * known
        columns_5NC = torch.stack([known, error.abs(), error**2, y, y**2])
        sums_5C = columns_5NC.sum(1)
        self.sums += sums_5C

    def compute(self) -> dict[str, Tensor]:
        """``r2`` (0 where the targets are all the same), ``mae`` and ``rmse``, float32 ``(C,)``; without a target all are 0.

        ``r2 = 1 - sum e^2 / (sum y^2 - (sum y)^2 / n)``. Targets whose deviation is below 3e-7 of their size, which float32
        hardly tells apart, count as the same: of equal ones rounding leaves a deviation.
        """
        count, absolute, squared, total, squares = self.sums
        count = count.clamp_min(1)
        spread = squares - total**2 / count
        varies = spread > 1e-13 * squares
        r2 = torch.where(varies, 1 - squared / spread.clamp_min(1e-300), 0.0)
        return {
            "r2": r2.float(),
            "mae": (absolute / count).float(),
            "rmse": (squared / count).sqrt().float(),
        }

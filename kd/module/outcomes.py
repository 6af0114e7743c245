"""What models made of each picture, kept while they are evaluated: for certificates."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kd.proof.certificate import Outcomes
from kd.tasks import Task


@dataclass
class PictureOutcomes:
    """Takes in batches of logits (:class:`kd.module.evaluation.Listener`) and keeps each picture's outcome."""

    task: Task
    """Says what is counted of an answer: whether it is right, or its error."""
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """By model, ``student`` and ``teacher``: rows ``(N, ...)`` of :meth:`kd.tasks.Task.outcome`, batch by batch; NaN
    where a picture has no label, of a regression or of several labels a picture also where the answer is NaN.
    ``kd-export`` compares an export as ``student`` with the student as ``teacher``."""
    numbers: list[np.ndarray] = field(default_factory=list)
    """The pictures' numbers ``(N,)``, batch by batch."""
    class_ids: list[np.ndarray] = field(default_factory=list)
    """Class ids ``(N,)``, batch by batch; [] for tasks in which a picture has not just one class."""
    invalid: dict[str, int] = field(default_factory=dict)
    """By model: how many pictures' answers have a NaN, of numbers (a regression) also an infinite one."""

    def update(
        self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor
    ) -> None:
        """Adds a batch: logits ``(N, C, ...)`` of both, targets ``(N, ...)``, the pictures' numbers ``(N,)``.

        Unusable answers are counted in :attr:`invalid`. ``teacher`` is None for a run without one; then ``of("teacher")`` is
        None.
        """
        for model, answer in (("student", student), ("teacher", teacher)):
            if answer is None:
                continue
            unusable = answer.isnan()
            if self._measures_errors:
                unusable = ~answer.isfinite()
            of_picture = unusable.flatten(1).any(1)
            pictures = int(of_picture.sum())
            self.invalid[model] = self.invalid.get(model, 0) + pictures
            outcome = self.task.outcome(answer, target).cpu().numpy()
            self.values.setdefault(model, []).append(outcome.astype(np.float64))
        self.numbers.append(index.cpu().numpy())
        if self.task.one_class:
            self.class_ids.append(target.cpu().numpy())

    @property
    def _measures_errors(self) -> bool:
        return self.task.certified == "mean absolute error"

    def order(self) -> np.ndarray:
        """The places of the labelled pictures in the joined batches, ordered by the pictures' numbers.

        A regression keeps all places: :class:`kd.proof.certificate.Outcomes` takes its NaN rows. With several labels a
        picture, a NaN in the student's answer leaves the picture out too.
        """
        places = np.argsort(np.concatenate(self.numbers))
        values = np.concatenate(self.values["student"])
        if self._measures_errors:
            return places
        is_labelled = ~np.isnan(values.reshape(len(values), -1)).any(1)
        return places[is_labelled[places]]

    def of(self, model: str) -> Outcomes | None:
        """The outcomes of ``student`` or ``teacher``, ordered by the pictures' numbers.

        None without that model, and for a task whose outcomes can't be certified.
        """
        if model not in self.values or self.task.certified is None:
            return None
        order = self.order()
        class_ids = None
        if self.class_ids:
            class_ids = np.concatenate(self.class_ids)[order]
        values = np.concatenate(self.values[model])[order]
        return Outcomes(self.task.certified, values, class_ids, self.invalid[model])

    def picture_numbers(self) -> np.ndarray:
        """The numbers of the pictures in :meth:`of`, ascending, ``(N,)``: the row of each."""
        return np.concatenate(self.numbers)[self.order()]

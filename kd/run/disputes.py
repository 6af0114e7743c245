"""``kd-eval disputed=true``: labels that the teacher disputes, for people to look at."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kd.callbacks.fidelity import as_validated, thumbnail
from kd.data.sources import printable
from kd.errors import UserError
from kd.models.taps import classifier_of
from kd.report.evaluated import DISPUTED, disputed_parts
from kd.report.tables import write_parts
from kd.run.subject import Subject
from kd.storage.elsewhere import Json
from kd.storage.shown import csv_text
from kd.storage.writing import write_text
from kd.tasks.disputed import disputed_labels

TABLE = "disputed_labels.csv"
"""The table of all disputed pictures, in the run's folder."""
COLUMNS = ("picture", "label", "suggested", "p_label", "p_suggested", "teacher", "student")
"""Of the table: names of the picture and of classes (its label, what the classifier suggests, what each model answers), and
the probabilities of label and suggestion in 0..1."""


@dataclass
class Disputes:
    """Takes in every batch (:class:`kd.module.evaluation.Listener`), and keeps what a classifier's input was.

    The judge is the teacher where its classifier can be found, else the student.
    """

    judge: str
    """``teacher`` or ``student``."""
    features: list[Tensor] = field(default_factory=list)
    """``(N, D)``, float32 on the CPU, batch by batch, of all pictures."""
    logits: list[Tensor] = field(default_factory=list)
    """``(N, C)``, of the judge."""
    labels: list[Tensor] = field(default_factory=list)
    """``(N,)`` class ids, -1 where there is none."""
    numbers: list[Tensor] = field(default_factory=list)
    """``(N,)`` numbers of the pictures in their split."""
    answers: dict[str, list[Tensor]] = field(default_factory=dict)
    """By model, ``(N,)`` class ids."""
    _newest: Tensor | None = None
    """The newest input of the judge's classifier."""

    @classmethod
    def of(cls, subject: Subject) -> "Disputes":
        """Listens to the classifier's input of the teacher, or of the student.

        Raises:
            UserError: neither has a last layer.
        """
        if subject.teacher is not None:
            try:
                return cls._listening("teacher", subject.teacher.model)
            except UserError:
                pass  # a teacher of the user's own: the student's features serve
        return cls._listening("student", subject.model)

    @classmethod
    def _listening(cls, name: str, model: nn.Module) -> "Disputes":
        """With a hook on the input of a model's classifier; ``name``: ``teacher`` or ``student``."""
        disputes = cls(name)
        classifier_of(model, "disputed").register_forward_pre_hook(disputes._take)
        return disputes

    def _take(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """The classifier's input, ``(N, D)`` or ``(N, D, 1, 1)``, of whatever the judge is shown."""
        self._newest = inputs[0].detach().flatten(1)

    def update(
        self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor
    ) -> None:
        """Adds a batch: logits ``(N, C)`` of both, class ids ``(N,)``, numbers of the pictures ``(N,)``.

        The judge has just answered it, so the newest input of its classifier is this batch's.
        """
        assert self._newest is not None
        models = {"student": student}
        if teacher is not None:
            models["teacher"] = teacher
        self.features.append(self._newest.float().cpu())
        self.logits.append(models[self.judge].float().cpu())
        self.labels.append(target.cpu())
        self.numbers.append(index.cpu())
        for name, logits in models.items():
            self.answers.setdefault(name, []).append(logits.argmax(1).cpu())

    def found(self, subject: Subject, place: str) -> Json:
        """The disputed labels; also written into the run's folder, with pictures for the page; not of a bare weights file.

        Args:
            subject: the models.
            place: the pictures' split.

        Returns:
            ``split``, ``pictures`` (how many have a label), ``disputed`` (how many of these), ``accuracy`` in 0..1 of the
            classifier that has not seen the picture, ``judge``, and ``labels``: rows of :data:`COLUMNS` (``teacher`` only
            where there is one), the least likely labels first.

        Raises:
            UserError: too many pictures, or none with a label.
        """
        labels_N = torch.cat(self.labels)
        is_known_N = labels_N >= 0
        features = torch.cat(self.features)
        logits = torch.cat(self.logits)
        try:
            disputed = disputed_labels(
                features[is_known_N], logits[is_known_N], labels_N[is_known_N]
            )
        except ValueError as error:
            raise UserError(f"disputed: {error}") from error
        # `disputed` has rows of labelled pictures alone; `worst` are the same among all pictures
        worst = is_known_N.nonzero().flatten()[disputed.worst_first]
        numbers = torch.cat(self.numbers)[worst].tolist()
        answers = {name: torch.cat(ids) for name, ids in self.answers.items()}
        pictures = subject.data.split(place)
        classes = subject.classes
        rows = []
        for i, at, number in zip(disputed.worst_first, worst, numbers, strict=True):
            label = int(labels_N[at])
            suggested = int(disputed.suggested[i])
            row: Json = {
                "picture": printable(pictures.name(number)),
                "label": classes[label],
                "suggested": classes[suggested],
                "p_label": round(float(disputed.probabilities[i, label]), 4),
                "p_suggested": round(float(disputed.probabilities[i, suggested]), 4),
            }
            rows.append({**row, **{name: classes[int(ids[at])] for name, ids in answers.items()}})
        found = {
            "split": place,
            "pictures": int(is_known_N.sum()),
            "disputed": len(rows),
            "accuracy": disputed.accuracy,
            "judge": self.judge,
            "labels": rows,
        }
        if subject.run is not None:
            _write(found, subject, subject.run, numbers)
        return found


def _write(found: Json, subject: Subject, run: Path, numbers: list[int]) -> None:
    """Writes the table of all rows, and what the page shows, into a run's folder.

    Args:
        found: as of :meth:`Disputes.found`; ``labels`` are the rows.
        subject: the models.
        run: the folder.
        numbers: of the disputed pictures in the split, the least likely labels first.
    """
    rows: list[Sequence[object]] = [COLUMNS]
    for row in found["labels"]:
        cells = [row.get(column, "") for column in COLUMNS]
        rows.append(cells)
    text = csv_text(rows, "\n")
    write_text(run / TABLE, text)
    shown = as_validated(subject.data, found["split"], numbers[:DISPUTED])
    parts = disputed_parts(found, [thumbnail(picture) for picture in shown])
    write_parts(run, "disputed", parts)

"""``kd-eval disputed=true``: labels that the teacher disputes, for people to look at."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kd.callbacks.fidelity import as_validated, thumbnail
from kd.data.sources import printable
from kd.errors import UserError
from kd.models.taps import classifier_of
from kd.report.evaluated import disputed_parts
from kd.report.tables import write_parts
from kd.run.eval_options import needs_one_class
from kd.run.subject import Subject
from kd.storage.shown import CsvTable
from kd.storage.writing import write_text
from kd.tasks.disputed import Disputed, disputed_labels

TABLE = "disputed_labels.csv"
"""The table of all disputed pictures, in the run's folder."""
EXAMPLES = 24
"""Pictures on the page."""
COLUMNS = ("picture", "label", "suggested", "p_label", "p_suggested", "teacher", "student")
"""Of the table: names of the picture and of classes (its label, what the classifier suggests, what each model answers), and
the probabilities of label and suggestion in 0..1."""


def check_disputes(measured: Sequence[Subject]) -> None:
    """Refuses what has no labels to dispute.

    Raises:
        UserError: a task without one class a picture, of two or more.
    """
    if not measured[0].task.one_class or len(measured[0].classes) < 2:
        raise needs_one_class("disputed")


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
        models = {"student": student}
        if teacher is not None:
            models["teacher"] = teacher
        assert self._newest is not None
        self.features.append(self._newest.float().cpu())
        self.logits.append(models[self.judge].float().cpu())
        self.labels.append(target.cpu())
        self.numbers.append(index.cpu())
        for name, logits in models.items():
            answers = self.answers.setdefault(name, [])
            answers.append(logits.argmax(1).cpu())

    def found(self, subject: Subject, place: str) -> dict[str, Any]:
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
        try:
            disputed = disputed_labels(
                torch.cat(self.features)[is_known_N],
                torch.cat(self.logits)[is_known_N],
                labels_N[is_known_N],
            )
        except ValueError as error:
            raise UserError(f"disputed: {error}") from error
        rows = self._rows(disputed, is_known_N, subject, place)
        found = {
            "split": place,
            "pictures": int(is_known_N.sum()),
            "disputed": len(rows),
            "accuracy": disputed.accuracy,
            "judge": self.judge,
            "labels": rows,
        }
        if subject.run is not None:
            numbers_N = torch.cat(self.numbers)[is_known_N]
            _write(found, subject, place, numbers_N[disputed.worst_first])
        return found

    def _rows(
        self, disputed: Disputed, is_known_N: Tensor, subject: Subject, place: str
    ) -> list[dict[str, Any]]:
        """A row of each disputed picture, the least likely labels first; they become the table's lines.

        Args:
            disputed: which labels of the known ones are doubted.
            is_known_N: which pictures have a label.
            subject: student, teacher and data.
            place: the split's name.
        """
        labels = torch.cat(self.labels)[is_known_N].tolist()
        numbers = torch.cat(self.numbers)[is_known_N].tolist()
        answers = {name: torch.cat(ids)[is_known_N].tolist() for name, ids in self.answers.items()}
        pictures = subject.data.split(place)
        rows = []
        for i in disputed.worst_first.tolist():
            suggested = int(disputed.suggested[i])
            row: dict[str, Any] = {
                "picture": printable(pictures.name(numbers[i])),
                "label": subject.classes[labels[i]],
                "suggested": subject.classes[suggested],
                "p_label": round(float(disputed.probabilities[i, labels[i]]), 4),
                "p_suggested": round(float(disputed.probabilities[i, suggested]), 4),
            }
            for name, ids in answers.items():
                row[name] = subject.classes[ids[i]]
            rows.append(row)
        return rows


def _write(found: dict[str, Any], subject: Subject, place: str, numbers: Tensor) -> None:
    """Writes the table of all rows, and what the page shows, into the run's folder.

    Args:
        found: as of :meth:`Disputes.found`; ``labels`` are the rows.
        subject: whose run's folder is written to.
        place: the split's name.
        numbers: of the disputed pictures in the split, the least likely labels first.
    """
    assert subject.run is not None
    rows = found["labels"]
    text = io.StringIO()
    table = CsvTable(text, "\n")
    table.add(COLUMNS)
    for row in rows:
        table.add([row.get(column, "") for column in COLUMNS])
    write_text(subject.run / TABLE, text.getvalue())

    shown = numbers[:EXAMPLES].tolist()
    images = [thumbnail(picture) for picture in as_validated(subject.data, place, shown)]
    write_parts(subject.run, "disputed", disputed_parts(found, images))

"""Batches without gradients, padding left out: validation, the preflight, and the accuracy of finished models."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

from kd.data.batch import Batch, real_rows
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import Joined
from kd.distill.student import Student
from kd.losses.ranks import of_all_ranks
from kd.models import Prepare
from kd.models.own import logits_of
from kd.progress import bar
from kd.proof.paired import PairedCounts
from kd.tasks import Task
from kd.tasks.features import knn_accuracy, ridge_accuracy
from kd.tasks.label_free import PROBE
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Wanted


@dataclass
class Seen:
    """What models answered to the N real pictures of a batch, on one device (but for ``index``); padding is left out."""

    target: Tensor
    """Labels: class ids ``(N,)``, or what else the task has as targets ``(N, ...)``."""
    index: Tensor | None
    """Numbers of the pictures ``(N,)``, on the batch's device; None where the loader gives none."""
    taught: dict[str, Tensor] = field(default_factory=dict)
    """The teacher's logits ``(N, C, ...)``, of several their mean, under :data:`kd.teachers.answer.ALL`, and each one's
    under its name. Empty without a teacher that has run."""
    decided: Tensor | None = None
    """The teacher's decisions (:meth:`kd.tasks.Task.decide`); None without a teacher that gives logits."""
    logits: dict[str, Tensor] = field(default_factory=dict)
    """The students' logits ``(N, C, ...)`` by name."""


@torch.no_grad()
def look(
    batch: Batch,
    task: Task,
    teacher: RunTeacher | None,
    students: Mapping[str, Callable[[Tensor], Tensor]],
    device: torch.device | None = None,
    in_step: bool = False,
) -> Seen | None:
    """Runs a batch through a teacher and students; padding (index -1) is left out.

    Args:
        batch: ``image`` and ``target`` of N pictures; ``index``, where the loader gives it; ``decided``, the teacher's
            decisions, where they are known: then the teacher does not run, and ``taught`` is empty.
        task: fits logits to targets: those of a segmentation are resized to the masks.
        teacher: its logits may be of several teachers; None: without one.
        students: what gives each student's logits ``(N, C, ...)`` of pictures ``(N, 3, H, W)``; called once for each.
        device: to run on; None: the batch's.
        in_step: the students may be in shards, so other ranks may wait for this one's: the students run although all is
            padding. A teacher in shards that has a classifier runs on padding in any case, unless its decisions are known.

    Returns:
        None where all is padding.
    """
    real = real_rows(batch)
    images = batch["image"][real]
    target = batch["target"][real]
    if "decided" in batch:
        teacher = None
    if not len(images):
        images = batch["image"].to(device)
        for student in students.values() if in_step else ():
            student(images)
        if teacher is not None and teacher.is_shared_out:
            teacher.answer({"image": images}, Wanted())
        return None
    images = images.to(device, non_blocking=True)
    target = target.to(device, non_blocking=True)
    pictures: Batch = {"image": images}
    if "index" in batch:
        pictures["index"] = batch["index"][real]
    seen = Seen(target, pictures.get("index"))
    if "decided" in batch:
        seen.decided = batch["decided"][real].to(images.device)
    if teacher is not None:
        taught: Mapping[str, Any] = teacher.answer(pictures, Wanted()).logits
        seen.taught = {name: task.fit(logits, target) for name, logits in taught.items()}
        if ALL in seen.taught:
            seen.decided = task.decide(seen.taught[ALL])
    seen.logits = {name: task.fit(student(images), target) for name, student in students.items()}
    return seen


class ValidationLogits(TypedDict):
    """What a validation step returns of a batch, its padding left out."""

    logits: Tensor
    """The student's, ``(N, C, ...)``."""
    target: Tensor
    """``(N, ...)``."""
    index: Tensor | None
    """Numbers of the pictures ``(N,)``; None where the loader gives none."""


class Validation:
    """A run's validation: the metrics of the student, batch by batch, on all processes."""

    known: Tensor | None = None
    """The teacher's decisions by the number of the validation picture, which the preflight has made
    (:mod:`kd.callbacks.preflight`): the teacher does not run again. None: it runs."""
    taught: tuple[Tensor, Tensor] | None = None
    """Numbers ``(N,)`` of the last batch's pictures, and the teacher's logits ``(N, C, ...)``, which the preflight reads;
    None where the teacher gave none, or the loader no numbers."""

    def __init__(self, student: Student, teacher: RunTeacher | None) -> None:
        self.student = student
        self.teacher = teacher

    def with_known(self, batch: Batch) -> Batch:
        """A validation batch with ``decided``, what the teacher decided on its pictures before, where that is known.

        Not for batches of another split, whose pictures have the same numbers. Called while the batch is on the host, as
        :attr:`known` is; :meth:`add` calls it again for a batch that came otherwise.
        """
        if self.known is None or "index" not in batch or "decided" in batch:
            return batch
        return {**batch, "decided": self.known[batch["index"].to(self.known.device)]}

    @torch.no_grad()
    def add(self, batch: Batch, in_step: bool, split: str = "val") -> ValidationLogits | None:
        """Adds a batch to the metrics; padding is left out.

        A student without a classifier is compared with the teacher's features instead; without a teacher nothing is
        added. Sets :attr:`taught` for a student with a classifier.

        Args:
            batch: on the student's device.
            in_step: all processes must run the student equally often, as it may be in shards.
            split: ``val`` or ``test``. Decisions that are known of ``val`` (:attr:`known`, stored answers) are not
                used for ``test``: there the teacher runs, and with stored answers nothing is compared with it.

        Returns:
            What was added; None where all was padding, for a student without a classifier, and where it is not measured.
        """
        student = self.student
        teacher = self.teacher
        if student.gives_features:
            if teacher is not None:
                images = batch["image"][real_rows(batch)]
                pictures = len(images)
                # padding alone runs all the same: others may wait for this process
                if not pictures:
                    images = batch["image"]
                answer = teacher.answer({"image": images}, student.objective.wanted)
                student.measure(images, answer, pictures)
            return None
        if not student.is_measured:
            return None
        if split == "val":
            batch = self.with_known(batch)
        elif teacher is not None and teacher.stored:
            teacher = None
        seen = look(batch, student.task, teacher, {"": student.logits}, in_step=in_step)
        self.taught = None
        if seen is None:
            return None
        if seen.index is not None and ALL in seen.taught:
            self.taught = seen.index, seen.taught[ALL]
        logits = seen.logits[""]
        student.task.update(logits, seen.target, seen.decided)
        return {"logits": logits, "target": seen.target, "index": seen.index}

    def results(self, split: str = "val") -> dict[str, Tensor]:
        """The metrics of all batches that were added since the last call, over all processes; then counts from zero.

        Every process must call it, at the end of a validation.

        Args:
            split: stands before each metric's name: ``val`` or ``test``.

        Returns:
            Scalars, as ``<split>/<metric>``; {} where the student is not measured.
        """
        if not self.student.is_measured:
            return {}
        metrics = self.student.task.compute()
        self.student.task.reset()
        return {f"{split}/{metric}": value for metric, value in metrics.items()}


@dataclass
class Labelled:
    """Features of M labelled pictures by model: the first ``bank`` of them are the reference, the others are
    classified by it.
    """

    features: dict[str, Tensor]
    """``(M, D)`` by model, in the pictures' order, float32, on the models' device; D is each model's own."""
    class_ids: Tensor
    """``(M,)``, in the same order."""
    bank: int
    """How many of the pictures, the first, are the reference."""

    def accuracy(self, name: str) -> dict[str, float]:
        """The share of classified pictures, in 0..1, that the features of the model ``name`` classify rightly.

        Returns:
            ``knn1`` by the nearest neighbours (:func:`knn_accuracy`), ``probe1`` by a ridge regression
                (:func:`ridge_accuracy`), rounded to six decimals.
        """
        features = self.features[name]
        bank = self.bank
        reference = features[:bank]
        of_reference = self.class_ids[:bank]
        classified = features[bank:]
        of_classified = self.class_ids[bank:]
        knn = knn_accuracy(reference, of_reference, classified, of_classified)
        probe = ridge_accuracy(reference, of_reference, classified, of_classified)
        name_of_knn, name_of_probe = PROBE
        return {
            name_of_knn: round(knn, 6),
            name_of_probe: round(probe, 6),
        }


@torch.no_grad()
def look_at(
    models: Mapping[str, Callable[[Tensor], Tensor]],
    data: DistillationDataModule,
    batches: Iterable[Batch],
    device: torch.device,
) -> Labelled:
    """Features of the split ``probe`` by model, in the order of its pictures; each process runs its share, and all get the
    whole.

    Every process must call this, with equally many batches: a batch's padding (index -1) is run and then left out.

    Args:
        models: each gives features ``(N, D)`` for N pictures ``(N, 3, H, W)``; called for every batch.
        data: holds the split, whose reference pictures come first.
        batches: this process's share of it.
        device: of the models.
    """
    indices = []
    targets = []
    features: dict[str, list[Tensor]] = {name: [] for name in models}
    for batch in batches:
        images = batch["image"].to(device)
        for name, model in models.items():
            features[name].append(model(images).float())
        indices.append(batch["index"].to(device))
        targets.append(batch["target"].to(device))
    index = _of_all_ranks(indices)
    order = index.argsort()[int((index < 0).sum()) :]  # padding comes first
    pictures = data.split("probe")
    assert isinstance(pictures, Joined)
    class_ids = _of_all_ranks(targets)[order]
    by_model = {name: _of_all_ranks(parts)[order] for name, parts in features.items()}
    return Labelled(by_model, class_ids, pictures.border)


def _of_all_ranks(parts: list[Tensor]) -> Tensor:
    """The rows of all batches of all processes, one process after the other; all must call this with equally many."""
    return of_all_ranks(torch.cat(parts))[0]


class Listener(Protocol):
    """Takes in every batch's logits while a model is measured, as :class:`kd.tasks.fidelity.Fidelity` and :class:`Answers`
    do.
    """

    def update(
        self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor
    ) -> None:
        """A batch of N pictures, without padding.

        Args:
            student: logits ``(N, C, ...)``, at the target's size.
            teacher: likewise; None without a teacher.
            target: labels ``(N, ...)``.
            index: the pictures' numbers ``(N,)``.
        """


@torch.inference_mode()
def metrics_of_student(
    student: nn.Module,
    prepare: Prepare,
    batches: Iterable[Batch],
    task: Task,
    teacher: RunTeacher | None = None,
    device: torch.device | None = None,
    listeners: Sequence[Listener] = (),
) -> dict[str, dict[str, float]]:
    """The task's metrics, computed in float32: ``{"student": {"acc1", ..., "agreement"}, "teacher": {...}}``.

    Shares are in 0..1, errors of a regression in the targets' units. ``teacher`` is there only where one is given.

    Args:
        student: gives logits; moved to the device and in eval mode afterwards.
        prepare: uint8 pictures -> its input.
        batches: of one split, in one process.
        task: counts the student's metrics, a copy of it the teacher's. It is moved to the device, and not reset: what it has
            counted before is part of both.
        teacher: for ``agreement`` and its own metrics; moved to the device, in float32; None: without.
        device: of the computation; None: the CPU.
        listeners: receive each batch's logits, in order; nothing from a loader that gives no numbers of pictures.
    """
    device = device or torch.device("cpu")
    student = student.to(device).eval()
    tasks = {"student": task.to(device)}
    if teacher is not None:
        teacher.to(device)
        tasks["teacher"] = copy.deepcopy(task)
    students = {"": lambda images: logits_of(student(prepare(images)))}
    for batch in bar(batches, label="evaluating", unit=" batches"):
        seen = look(batch, task, teacher, students, device)
        if seen is None:
            continue
        taught = seen.taught.get(ALL)
        if taught is not None:
            tasks["teacher"].update(taught, seen.target, None)
        tasks["student"].update(seen.logits[""], seen.target, seen.decided)
        if seen.index is not None:
            for listener in listeners:
                listener.update(seen.logits[""], taught, seen.target, seen.index)
    return {
        name: {metric: float(value) for metric, value in measured.compute().items()}
        for name, measured in tasks.items()
    }


@dataclass
class Answers:
    """Each picture's target and each model's answer, as rows of a table; of tasks whose answers fit one (``in_rows``)."""

    task: Task
    """Writes answers as rows of a table."""
    classes: list[str]
    """Names by class id."""
    rows: dict[int, dict[str, str]] = field(default_factory=dict)
    """Cells by column, by the picture's number."""

    def update(
        self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor
    ) -> None:
        """Adds a batch: a row for each picture; it replaces an earlier row of the same picture.

        A column's name is ``label``, ``student`` or ``teacher``, followed by an ending from :meth:`kd.tasks.Task.rows`,
        which may be empty.

        Args:
            student: its logits, or numbers that it predicts, ``(N, C)``.
            teacher: likewise; None without a teacher.
            target: class ids ``(N,)``, or labels or numbers ``(N, C)``.
            index: the pictures' numbers ``(N,)``.
        """
        columns: dict[str, Sequence[str]] = {}
        named = {"label": target, "student": student, "teacher": teacher}
        for name, answer in named.items():
            if answer is None:
                continue
            of_model = self.task.rows(answer, self.classes)
            for ending, cells in of_model.items():
                columns[name + ending] = cells
        rows = zip(*columns.values(), strict=True)
        numbers = index.tolist()
        for i, row in zip(numbers, rows, strict=True):
            cells_by_column = zip(columns, row, strict=True)
            self.rows[i] = dict(cells_by_column)

    @property
    def are_names(self) -> bool:
        """Whether an answer is one or more names, right or wrong (there is a column ``label``); numbers are neither.

        False before the first batch.
        """
        first_row: Mapping[str, str] = next(iter(self.rows.values()), {})
        return "label" in first_row

    def right(self) -> dict[int, bool]:
        """Whether the student's answer equals the label, by the picture's number; only where :attr:`are_names`."""
        return {i: row["student"] == row["label"] for i, row in self.rows.items()}

    def beside(self, other: "Answers") -> PairedCounts:
        """How many pictures this student alone is right on, and how many the ``other`` alone; the pictures are the
        same, and the answers names (:attr:`are_names`).
        """
        others_right = other.right()
        pairs = [(is_right, others_right[i]) for i, is_right in self.right().items()]
        return PairedCounts(len(pairs), pairs.count((True, False)), pairs.count((False, True)))

"""How faithful a student is to its teacher, from the logits of both on the same pictures.

*Agreement* is how often both answer alike, right or wrong. What is counted are pictures, labels (``multilabel``) or
pixels (``segmentation``); a picture is *lost* where the teacher is right and the student is wrong.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kd.proof.paired import PairedCounts

BINS = 15
"""Bins of confidence, equally wide, of the calibration."""
KEPT = 12
"""Pictures of each kind of mistake."""
TOP = 3
"""Answers of each model that are kept of such a picture."""
CONFUSIONS = 200
"""Pairs of classes in the result, the most frequent first."""
MODELS = ("student", "teacher")
OUTCOMES = ("both_right", "only_teacher", "only_student", "both_wrong")

Kind = Literal["classification", "multilabel", "segmentation"]
KINDS = get_args(Kind)
SCORES = {"classification": "accuracy", "multilabel": "f1", "segmentation": "iou"}
"""The score of a class, by kind."""
ByModel = dict[str, Tensor]
"""A tensor of each of :data:`MODELS`, by name."""


@dataclass
class _Batch:
    """A batch with what each model makes of it.

    Shapes: ``(N,)`` of classification, ``(N, H, W)`` of segmentation, ``(N, C)`` of multilabel, below ``(N, ...)``.
    """

    probabilities: ByModel
    """``(N, K, ...)``; a label has K = 2, no and yes."""
    answers: ByModel
    """The likeliest of the K, ``(N, ...)``."""
    right: ByModel
    """Whether that is the truth, bool ``(N, ...)``; false where the truth is not known."""
    truth: Tensor
    """Ids, -1 where unknown, or labels of 0 and 1, int64 ``(N, ...)``."""
    known: Tensor
    """Whether the truth is known, bool ``(N, ...)``."""
    index: Tensor
    """The pictures' numbers in their split, ``(N,)``."""


class Mistake(NamedTuple):
    """A picture that a model is wrong on. They are ordered by score, of equal scores the first picture is larger."""

    score: float
    """How bad it is: of classification the probability of the judging model's answer; else the share of the picture's
    labels or pixels that are such a mistake."""
    negative_index: int
    """The picture's number in its split, times -1: so the same pictures are kept in any order of batches."""
    entry: dict[str, Any]
    """The ``truth``, and what each model answered."""


@dataclass
class Fidelity:
    """Adds up batches; what is counted are pictures, or of ``multilabel`` labels, or of ``segmentation`` pixels.

    Only counts, sums and a few pictures' answers are kept, so its size does not grow with the data or the square of the
    classes. torchmetrics gives the same numbers (``tests/tasks/test_fidelity.py``), but keeps each confidence, counts the
    pixels of a bin in float32, up to 2**24, and makes a dense ``(C, C)`` for each batch.
    """

    kind: Kind
    """What an answer is."""
    num_classes: int
    """C."""
    ignore_index: int | None = None
    """Id of pixels that take no part, which may be one of the classes; None: none."""
    pictures: int = 0
    """So far."""
    compared: int = 0
    """On how many student and teacher were compared."""
    agreed: int = 0
    """On how many of these both answer alike."""
    divergence: float = 0.0
    """Sum of KL(teacher || student) over these, in nats."""
    outcomes: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int64))
    """How often each of :data:`OUTCOMES` is the case, where the truth is known."""
    bins: dict[str, Tensor] = field(default_factory=dict)
    """By model, float64 ``(3, BINS)``: of each bin of confidence its count, sum of confidences, number right."""
    pairs: dict[str, Counter[tuple[int, int]]] = field(default_factory=dict)
    """By model: how often a class is answered with a class, by (true, answered); of multilabel how often a label is 2
    (missed), 1 (answered, and wrong) or 3 (right), by (label, case)."""
    mistakes: dict[str, list[Mistake]] = field(default_factory=dict)
    """By kind, ``lost`` or ``both_wrong``: a heap of the worst :data:`KEPT`."""

    @torch.no_grad()
    def update(
        self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor
    ) -> None:
        """Adds a batch.

        Args:
            student: logits ``(N, C)``, dense ``(N, C, H, W)`` at the target's size.
            teacher: likewise; None for a student alone.
            target: ids ``(N,)`` or ``(N, H, W)`` (others than 0..C-1, and :attr:`ignore_index`, count as unknown), labels
                ``(N, C)`` of 0 and 1.
            index: the pictures' numbers in their split, ``(N,)``; no picture may come twice.
        """
        self.pictures += len(index)
        logits = {"student": student}
        if teacher is not None:
            logits["teacher"] = teacher
        truth = target.to(student.device).long()
        if self.kind == "multilabel":
            known = torch.ones_like(truth).bool()
        else:
            known = (truth >= 0) & (truth < self.num_classes) & (truth != self.ignore_index)
            truth = truth.masked_fill(~known, -1)
        batch = _Batch({}, {}, {}, truth, known, index)
        for model, model_logits in logits.items():
            probabilities = self._probabilities(model_logits)
            batch.probabilities[model] = probabilities
            batch.answers[model] = probabilities.argmax(1)
            batch.right[model] = (batch.answers[model] == truth) & known

        if teacher is not None:
            self._compare(batch)
        for model in logits:
            confidence = batch.probabilities[model].amax(1)
            self._add_to_bins(model, confidence[known], batch.right[model][known])
            self._count_classes(model, batch.answers[model][known], truth[known])
        self._keep_mistakes(batch)

    def _probabilities(self, logits: Tensor) -> Tensor:
        """``(N, C, ...)`` -> ``(N, K, ...)``; a label has K = 2, no and yes.

        Float64 would be slow on the CPU, and float32 is exact enough.
        """
        logits = logits.float()
        if self.kind == "multilabel":
            return torch.stack([(-logits).sigmoid(), logits.sigmoid()], 1)
        return logits.softmax(1)

    def _compare(self, batch: _Batch) -> None:
        """Adds a batch to agreement, KL(teacher || student) in nats and outcomes.

        Agreement and KL also count pictures without a label, but no pixels of an unknown class. Outcomes count only what has
        a known truth.
        """
        counted = batch.known
        if self.kind != "segmentation":
            counted = torch.ones_like(batch.known)
        self.compared += int(counted.sum())
        is_alike = batch.answers["student"] == batch.answers["teacher"]
        self.agreed += int((is_alike & counted).sum())

        # KL(teacher || student) = sum_k t_k (log t_k - log s_k)
        smallest = torch.finfo(torch.float32).tiny
        student = batch.probabilities["student"].clamp_min(smallest)
        teacher = batch.probabilities["teacher"].clamp_min(smallest)
        log_ratio = teacher.log() - student.log()
        divergence = (teacher * log_ratio).sum(1)
        of_counted = divergence * counted
        self.divergence += float(of_counted.sum(dtype=torch.float64))

        # in the order of OUTCOMES: a wrong student counts 1, a wrong teacher 2
        student_wrong = ~batch.right["student"][batch.known]
        teacher_wrong = ~batch.right["teacher"][batch.known]
        cases = student_wrong + 2 * teacher_wrong.long()
        self.outcomes += torch.bincount(cases, minlength=4).cpu()

    def _add_to_bins(self, model: str, confidence: Tensor, right: Tensor) -> None:
        """Adds a model's answers whose truth is known, ``(M,)`` each, to :attr:`bins`.

        Args:
            model: its name.
            confidence: the probability of its answer, in 0..1.
            right: bool.
        """
        place = (confidence * BINS).long()
        place = place.clamp(0, BINS - 1)
        ones = torch.ones_like(confidence)
        sums = []
        for column in (ones, confidence, right):
            sum_of_bins = torch.bincount(place, column.double(), BINS)
            sums.append(sum_of_bins)
        _add_to(self.bins, model, torch.stack(sums).cpu())

    def _count_classes(self, model: str, answers: Tensor, truth: Tensor) -> None:
        """Adds a model's answers whose truth is known to :attr:`pairs`.

        Args:
            model: its name.
            answers: class ids ``(M,)``; of multilabel yes (1) and no (0), ``(N * C,)``, a picture's labels in a row.
            truth: likewise.
        """
        base = self.num_classes
        if self.kind == "multilabel":
            base = 4
            labels = torch.arange(len(truth), device=truth.device) % self.num_classes
            codes = labels * base + 2 * truth + answers
        else:
            codes = truth * base + answers  # a number for each pair
        different, counts = torch.unique(codes, return_counts=True)
        pairs = self.pairs.setdefault(model, Counter())
        for code, count in zip(different.tolist(), counts.tolist(), strict=True):
            pairs[divmod(code, base)] += count

    # -- a few pictures ----------------------------------------------------------------------------------------------
    def _keep_mistakes(self, batch: _Batch) -> None:
        """Keeps the worst pictures of ``lost``, the teacher right and the student wrong, and of ``both_wrong``, all wrong.

        Without a teacher ``both_wrong`` has the pictures that the student is wrong on. A picture of several labels, or of
        pixels, may be kept as both: each is right or wrong for itself.
        """
        student_wrong = batch.known & ~batch.right["student"]
        both_wrong = student_wrong
        teacher_right = batch.right.get("teacher")
        if teacher_right is not None:
            self._keep("lost", "teacher", student_wrong & teacher_right, batch)
            both_wrong = student_wrong & ~teacher_right
        self._keep("both_wrong", "student", both_wrong, batch)

    def _keep(self, kind: str, judge: str, is_mistake: Tensor, batch: _Batch) -> None:
        """Keeps the worst of a batch's mistakes, by :attr:`Mistake.score`.

        Args:
            kind: of the mistakes, ``lost`` or ``both_wrong``.
            judge: the model whose confidence orders pictures of one answer; not read of labels and pixels.
            is_mistake: which pictures, labels or pixels are such mistakes, bool ``(N, ...)``.
            batch: the batch.
        """
        part_of_picture = is_mistake[:, None].flatten(1).float()
        share_N = part_of_picture.mean(1)
        scores_N = share_N
        if is_mistake.ndim == 1:
            confidence_N = batch.probabilities[judge].amax(1)
            scores_N = share_N * confidence_N
        rows = torch.nonzero(share_N).flatten()
        for row in rows.tolist():
            score = float(scores_N[row])
            number = int(batch.index[row])
            self._push(kind, Mistake(score, -number, self._entry(row, batch)))

    def _entry(self, row: int, batch: _Batch) -> dict[str, Any]:
        """The truth, and each model's answer, of one picture of a batch.

        Maps are int16 ``(H, W)`` on the CPU; else the truth is a list of class ids, an answer the :data:`TOP`
        likeliest as (id, probability).
        """
        truth = batch.truth[row]
        entry: dict[str, Any] = {}
        if self.kind == "segmentation":
            entry["truth"] = truth.to(torch.int16).cpu()
            for model, answers in batch.answers.items():
                entry[model] = answers[row].to(torch.int16).cpu()
            return entry
        if self.kind == "multilabel":
            entry["truth"] = truth.nonzero().flatten().tolist()
        else:
            entry["truth"] = [int(truth)]
        for model, probabilities in batch.probabilities.items():
            of_classes = probabilities[row]
            if self.kind == "multilabel":
                of_classes = of_classes[1]  # of the answer yes
            top = of_classes.topk(min(TOP, self.num_classes))
            entry[model] = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return entry

    def _push(self, kind: str, mistake: Mistake) -> None:
        """Keeps a mistake if it is one of the worst :data:`KEPT` so far."""
        heap = self.mistakes.setdefault(kind, [])
        if len(heap) < KEPT:
            heapq.heappush(heap, mistake)
        elif mistake[:2] > heap[0][:2]:
            heapq.heapreplace(heap, mistake)

    # -- all together ------------------------------------------------------------------------------------------------
    def add(self, other: "Fidelity") -> None:
        """Adds, in place, what another process has counted and kept of other pictures."""
        self.pictures += other.pictures
        self.compared += other.compared
        self.agreed += other.agreed
        self.divergence += other.divergence
        self.outcomes += other.outcomes
        for model, sums in other.bins.items():
            _add_to(self.bins, model, sums)
        for model, pairs in other.pairs.items():
            self.pairs.setdefault(model, Counter()).update(pairs)
        for kind, mistakes in other.mistakes.items():
            for mistake in mistakes:
                self._push(kind, mistake)

    @property
    def kl(self) -> float:
        """Mean KL(teacher || student) at T = 1, in nats; NaN where nothing was compared."""
        if self.compared:
            return self.divergence / self.compared
        return math.nan

    def result(self, classes: Sequence[str]) -> dict[str, Any]:
        """The numbers as plain values, after the last batch: ``fidelity.json`` and ``eval_*.json`` hold them for the report.

        ``kind``, ``pictures``; with a teacher ``agreement`` in 0..1, ``outcomes`` (the share of each of :data:`OUTCOMES`
        where the truth is known), :attr:`kl` and, of classes, ``gap`` (:meth:`_gap`); by model ``ece`` in 0..1 and
        ``reliability`` (a row of mean confidence, share right and count for each of the 15 bins that has any); ``score``,
        the name of a class's score, and ``per_class`` (:meth:`_per_class`); the student's ``confusions``
        (:meth:`_confusions`).

        Args:
            classes: names by class id.
        """
        result: dict[str, Any] = {
            "kind": self.kind,
            "pictures": self.pictures,
            "score": SCORES[self.kind],
        }
        if self.compared:
            total = max(1, int(self.outcomes.sum()))
            result["agreement"] = self.agreed / self.compared
            result["kl"] = self.kl
            result["outcomes"] = {}
            for outcome, count in zip(OUTCOMES, self.outcomes.tolist(), strict=True):
                result["outcomes"][outcome] = count / total
            if self.kind == "classification" and self.outcomes.sum():
                result["gap"] = self._gap()
        result["ece"] = {model: ece(sums) for model, sums in self.bins.items()}
        result["reliability"] = {model: _curve(sums) for model, sums in self.bins.items()}
        result["per_class"] = self._per_class(classes)
        result["confusions"] = self._confusions(classes)
        return result

    def _gap(self) -> dict[str, float]:
        """The student's accuracy less the teacher's: ``difference``, and the ends ``low`` and ``high`` of its paired
        interval of 95 %, as shares; ``pictures`` that it is of.
        """
        counts = self.outcomes.tolist()
        by_outcome = dict(zip(OUTCOMES, counts, strict=True))
        pair = PairedCounts(sum(counts), by_outcome["only_teacher"], by_outcome["only_student"])
        return pair.gap

    def _per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Rows of the classes that occur, in their order.

        Returns:
            Each with ``name``, ``count`` (how many pictures or pixels have the class), the score in 0..1 under each
            model's name, and of segmentation ``recall``, the share of these pixels that the student names so.
        """
        hits = {model: self._hits(model) for model in self.pairs}
        rows = []
        for class_id, name in enumerate(classes):
            right, _, missed = hits["student"][class_id]
            count = right + missed
            if not count:  # a class that does not occur has no score
                continue
            row: dict[str, Any] = {"name": name, "count": count}
            for model, of_model in hits.items():
                row[model] = self._class_score(*of_model[class_id])
            if self.kind == "segmentation":
                row["recall"] = right / count
            rows.append(row)
        return rows

    def _hits(self, model: str) -> list[list[int]]:
        """Of each class a model's true positives, false positives and false negatives."""
        hits = [[0, 0, 0] for _ in range(self.num_classes)]
        for (first, second), count in self.pairs[model].items():
            if self.kind == "multilabel":
                # right, answered wrongly, missed; see `pairs`
                case = {3: 0, 1: 1, 2: 2}.get(second)
                if case is not None:
                    hits[first][case] += count
            elif first == second:
                hits[first][0] += count
            else:
                hits[second][1] += count
                hits[first][2] += count
        return hits

    def _class_score(self, right: int, false: int, missed: int) -> float:
        """The score of a class in [0, 1], see :data:`SCORES`, from its true positives, false positives and false
        negatives.
        """
        if self.kind == "classification":
            return right / (right + missed)
        if self.kind == "multilabel":
            return 2 * right / (2 * right + false + missed)
        return right / (right + false + missed)

    def _confusions(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """The :data:`CONFUSIONS` pairs of classes that the student confuses most often, the most frequent first.

        Returns:
            Rows with ``is`` and ``called``, names of the true and the answered class, and how often the ``student`` and
            the ``teacher`` (0 without one) answer so: pictures, or pixels. Empty for multilabel.
        """
        if self.kind == "multilabel":
            return []
        teacher_pairs = self.pairs.get("teacher", Counter())
        student_pairs = self.pairs.get("student", Counter())
        wrong = [(pair, times) for pair, times in student_pairs.items() if pair[0] != pair[1]]
        wrong.sort(key=lambda pair_and_times: (-pair_and_times[1], pair_and_times[0]))
        rows = []
        for (true_class, answer), count in wrong[:CONFUSIONS]:
            row = {
                "is": classes[true_class],
                "called": classes[answer],
                "student": count,
                "teacher": teacher_pairs[true_class, answer],
            }
            rows.append(row)
        return rows


def _add_to(sums: dict[str, Tensor], model: str, values: Tensor) -> None:
    """Adds to a model's sums, which are 0 before the first."""
    sums[model] = sums[model] + values if model in sums else values


def ece(sums: Tensor) -> float:
    """Expected calibration error: the mean of ``|confidence - share right|`` over bins, each by its count.

    Source: Guo et al., On Calibration of Modern Neural Networks, arXiv 1706.04599, equation 3.

    Args:
        sums: of each bin the count, the sum of confidences, the number right: ``(3, BINS)``.

    Returns:
        In 0..1.
    """
    count, confidence, right = sums
    return float((confidence - right).abs().sum() / count.sum().clamp_min(1))


def _curve(sums: Tensor) -> list[list[float]]:
    """Rows of mean confidence, share right and count, one for each bin that is not empty, and whose confidences are numbers;
    ``sums`` as of :func:`ece`.
    """
    points = []
    for count, confidence, right in sums.T.tolist():
        if count and math.isfinite(confidence):
            points.append([confidence / count, right / count, int(count)])
    return points


MOST_LOGITS = 2**29
"""Bytes of a teacher's logits that a process keeps of the validation pictures."""


class KeptLogits:
    """Logits by a picture's number, in ``dtype``, as long as they fit ``limit`` bytes; then none at all.

    Args:
        limit: bytes.
        dtype: of the kept logits.
        pictures: how many will come to this process; if they do not all fit, none is kept from the start. 0: not known.

    Attributes:
        rows: by the picture's number.
        full: whether they did not fit.
    """

    def __init__(
        self, limit: int = MOST_LOGITS, dtype: torch.dtype = torch.float16, pictures: int = 0
    ) -> None:
        """Keeps nothing yet.

        Args:
            limit: bytes; with more, nothing is kept.
            dtype: in which logits are kept.
            pictures: expected; if they would not all fit, nothing is kept from the first batch on. 0: not known.
        """
        self.limit = limit
        self.dtype = dtype
        self.pictures = pictures
        self.rows: dict[int, Tensor] = {}
        self.full = False

    def add(self, index: Tensor, logits: Tensor) -> None:
        """Keeps a batch on the CPU. Where that would pass the limit, it forgets all, sets :attr:`full`, and keeps no more.

        Args:
            index: numbers of the pictures, ``(N,)``.
            logits: ``(N, C, ...)``.
        """
        rows = logits.to(self.dtype).cpu()
        bytes_of_one = rows[:1].nbytes  # 0 of an empty batch
        pictures = max(self.pictures, len(self.rows) + len(rows))
        if self.full or pictures * bytes_of_one > self.limit:
            self.full = True
            self.rows.clear()
            return
        self.rows |= dict(zip(index.tolist(), rows, strict=True))

    def get(self, index: Tensor) -> Tensor | None:
        """Float32 ``(N, C, ...)`` on the CPU for pictures' numbers ``(N,)``; None where one is missing, or N is 0."""
        rows = []
        for number in index.tolist():
            if number not in self.rows:
                return None
            rows.append(self.rows[number])
        if rows:
            return torch.stack(rows).float()
        return None

"""How faithful a student is to its teacher, from the logits of both on the same pictures."""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

BINS = 15
KEPT = 12  # pictures of each kind of mistake
TOP = 3
MODELS = ("student", "teacher")
OUTCOMES = ("both_right", "only_teacher", "only_student", "both_wrong")

Kind = Literal["classification", "multilabel", "segmentation"]
KINDS = get_args(Kind)
ByModel = dict[str, Tensor]


@dataclass
class Fidelity:
    """Adds up batches; what is counted are pictures, or of ``multilabel`` labels, or of ``segmentation`` pixels.

    Only counts, sums and a few pictures' answers are kept, so its size does not grow with the data.
    """

    kind: Kind
    num_classes: int
    pictures: int = 0
    compared: int = 0
    agreed: int = 0
    divergence: float = 0.0
    outcomes: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int64))
    bins: dict[str, Tensor] = field(default_factory=dict)
    hits: dict[str, Tensor] = field(default_factory=dict)
    pairs: dict[str, Counter[tuple[int, int]]] = field(default_factory=dict)
    mistakes: dict[str, list[tuple[float, int, dict[str, Any]]]] = field(default_factory=dict)

    @torch.no_grad()
    def update(
        self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor
    ) -> None:
        """Adds a batch: logits ``(N, C, ...)``, ids (unknown beyond 0..C-1) or labels, pictures' numbers ``(N,)``.

        Args:
            student: logits ``(N, C)``, dense ``(N, C, H, W)`` at the target's size.
            teacher: likewise; None for a student alone.
            target: ids ``(N,)`` or ``(N, H, W)`` (others than 0..C-1 count as unknown), labels ``(N, C)``.
            index: of the pictures in their split, ``(N,)``.
        """
        self.pictures += len(index)
        logits = {"student": student} | ({} if teacher is None else {"teacher": teacher})
        p = {name: self._probabilities(x) for name, x in logits.items()}
        answer = {name: x.argmax(1) for name, x in p.items()}
        truth = target.to(student.device).long()
        several = self.kind == "multilabel"
        known = (
            torch.ones_like(truth).bool() if several else (truth >= 0) & (truth < self.num_classes)
        )
        right = {name: (a == truth) & known for name, a in answer.items()}
        if teacher is not None:
            self._compare(p, answer, right, known)
        for name in logits:
            self._score(name, p[name].amax(1)[known], right[name][known])
            self._count(name, answer[name][known], truth[known])
        self._keep(p, answer, right, truth, known, index)

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Float64 on the CPU would be slow, float32 is exact enough: ``(N, K, ...)``; a label has K = 2, no and yes."""
        logits = logits.float()
        if self.kind == "multilabel":
            return torch.stack([(-logits).sigmoid(), logits.sigmoid()], 1)
        return logits.softmax(1)

    def _compare(self, p: ByModel, answer: ByModel, right: ByModel, known: Tensor) -> None:
        """Agreement and KL(teacher || student): also on pictures without a label; of pixels on those that count."""
        counted = known if self.kind == "segmentation" else torch.ones_like(known)
        self.compared += int(counted.sum())
        self.agreed += int(((answer["student"] == answer["teacher"]) & counted).sum())
        tiny = torch.finfo(torch.float32).tiny
        student, teacher = (p[name].clamp_min(tiny) for name in MODELS)
        divergence = (teacher * (teacher.log() - student.log())).sum(1)
        self.divergence += float((divergence * counted).sum(dtype=torch.float64))
        a, b = (right[name][known] for name in MODELS)
        self.outcomes += torch.stack(
            [part.sum() for part in (a & b, ~a & b, a & ~b, ~a & ~b)]
        ).cpu()

    def _score(self, name: str, confidence: Tensor, right: Tensor) -> None:
        place = (confidence * BINS).long().clamp(0, BINS - 1)
        columns = (torch.ones_like(confidence), confidence, right)
        sums = torch.stack(
            [torch.bincount(place, column.double(), BINS) for column in columns]
        ).cpu()
        self.bins[name] = self.bins[name] + sums if name in self.bins else sums

    def _count(self, name: str, answer: Tensor, truth: Tensor) -> None:
        """Rows of ``hits``: true positives, false positives, false negatives by class."""
        hits = self.hits.setdefault(name, torch.zeros(3, self.num_classes, dtype=torch.int64))
        if self.kind == "multilabel":
            answer, truth = answer.view(-1, self.num_classes), truth.view(-1, self.num_classes)
            parts = (answer & truth, answer & ~truth & 1, ~answer & 1 & truth)
            hits += torch.stack([part.sum(0) for part in parts]).cpu()
            return
        flat, counts = torch.unique(truth * self.num_classes + answer, return_counts=True)
        codes = [divmod(code, self.num_classes) for code in flat.tolist()]
        self.pairs.setdefault(name, Counter()).update(
            dict(zip(codes, counts.tolist(), strict=True))
        )
        right = answer == truth
        parts = (truth[right], answer[~right], truth[~right])
        hits += torch.stack(
            [torch.bincount(part, minlength=self.num_classes) for part in parts]
        ).cpu()

    # -- a few pictures ----------------------------------------------------------------------------------------------
    def _keep(
        self,
        p: ByModel,
        answer: ByModel,
        right: ByModel,
        truth: Tensor,
        known: Tensor,
        index: Tensor,
    ) -> None:
        """The pictures where the teacher was surest and the student wrong, and where all are wrong."""
        wrong = {name: known & ~x for name, x in right.items()}
        kinds = {"lost": ("teacher", wrong["student"] & right["teacher"])} if "teacher" in p else {}
        kinds["both_wrong"] = "student", wrong["student"] & wrong.get("teacher", known)
        for kind, (judge, chosen) in kinds.items():
            share = chosen[:, None].flatten(1).float().mean(1)
            score = share * p[judge].amax(1) if chosen.ndim == 1 else share
            for i in torch.nonzero(share).flatten().tolist():
                self._push(kind, float(score[i]), int(index[i]), self._entry(i, p, answer, truth))

    def _entry(self, i: int, p: ByModel, answer: ByModel, truth: Tensor) -> dict[str, Any]:
        if self.kind == "segmentation":
            maps = {name: a[i].to(torch.int16).cpu() for name, a in answer.items()}
            return {"truth": truth[i].to(torch.int16).cpu(), **maps}
        several = self.kind == "multilabel"
        tops = {
            name: (x[i, 1] if several else x[i]).topk(min(TOP, self.num_classes))
            for name, x in p.items()
        }
        return {"truth": truth[i].nonzero().flatten().tolist() if several else [int(truth[i])]} | {
            name: list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            for name, top in tops.items()
        }

    def _push(self, kind: str, score: float, index: int, entry: dict[str, Any]) -> None:
        kept = self.mistakes.setdefault(kind, [])
        item = (
            score,
            -index,
            entry,
        )  # of equal scores the first picture stays, in any order of batches
        if len(kept) < KEPT:
            heapq.heappush(kept, item)
        elif item[:2] > kept[0][:2]:
            heapq.heapreplace(kept, item)

    # -- all together ------------------------------------------------------------------------------------------------
    def add(self, other: "Fidelity") -> None:
        """Adds the counts of another process, which has seen other pictures."""
        for name in ("pictures", "compared", "agreed", "divergence"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.outcomes += other.outcomes
        for mine, others in ((self.bins, other.bins), (self.hits, other.hits)):
            for name, values in others.items():
                mine[name] = mine[name] + values if name in mine else values
        for name, pairs in other.pairs.items():
            self.pairs.setdefault(name, Counter()).update(pairs)
        for kind, kept in other.mistakes.items():
            for score, place, entry in kept:
                self._push(kind, score, -place, entry)

    @property
    def kl(self) -> float:
        """Mean KL(teacher || student) at T = 1, in nats; NaN where nothing was compared."""
        return self.divergence / self.compared if self.compared else math.nan

    def result(self, classes: Sequence[str]) -> dict[str, Any]:
        """The numbers as plain values.

        ``kind``, ``pictures``; with a teacher ``agreement`` and ``outcomes`` in 0..1, :attr:`kl`; by model ``ece`` and
        ``reliability`` (mean confidence, share right, count of each of 15 bins); ``score`` and ``per_class``:
        ``accuracy``, ``iou`` (and the student's ``recall``) or ``f1``; the student's ``confusions``, largest first.
        """
        found: dict[str, Any] = {
            "kind": self.kind,
            "pictures": self.pictures,
            "score": SCORES[self.kind],
        }
        if self.compared:
            total = max(1, int(self.outcomes.sum()))
            found["agreement"] = self.agreed / self.compared
            found["kl"] = self.kl
            found["outcomes"] = {
                k: v / total for k, v in zip(OUTCOMES, self.outcomes.tolist(), strict=True)
            }
        found["ece"] = {name: ece(sums) for name, sums in self.bins.items()}
        found["reliability"] = {name: _curve(sums) for name, sums in self.bins.items()}
        found["per_class"] = self._per_class(classes)
        found["confusions"] = self._confusions(classes)
        return found

    def _per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        rows = []
        for c, name in enumerate(classes):
            right, _, missed = self.hits["student"][:, c].tolist()
            if right + missed:  # a class that does not occur has no score
                scores = {
                    model: self._class_score(hits[:, c].tolist())
                    for model, hits in self.hits.items()
                }
                recall = {"recall": right / (right + missed)} if self.kind == "segmentation" else {}
                rows.append({"name": name, "count": right + missed, **scores, **recall})
        return rows

    def _class_score(self, hits: list[int]) -> float:
        right, false, missed = hits
        if self.kind == "classification":
            return right / (right + missed)
        both = 2 * right if self.kind == "multilabel" else right
        return both / (both + false + missed)

    def _confusions(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        student, teacher = (
            self.pairs.get("student", Counter()),
            self.pairs.get("teacher", Counter()),
        )
        wrong = sorted(
            ((n, pair) for pair, n in student.items() if pair[0] != pair[1]),
            key=lambda x: (-x[0], x[1]),
        )
        return [
            {"is": classes[a], "called": classes[b], "student": n, "teacher": teacher[a, b]}
            for n, (a, b) in wrong[:CONFUSIONS]
        ]


SCORES = {"classification": "accuracy", "multilabel": "f1", "segmentation": "iou"}
CONFUSIONS = 200


def ece(sums: Tensor) -> float:
    """Expected calibration error (arXiv 1706.04599) of bins ``(3, BINS)``: count, sum of confidences, number right.

    Args:
        sums: of each bin the count, the sum of confidences, the number right: ``(3, BINS)``.
    """
    count, confidence, right = sums
    return float((confidence - right).abs().sum() / count.sum().clamp_min(1))


def _curve(sums: Tensor) -> list[list[float]]:
    """Mean confidence, share right and count of each bin that is not empty."""
    return [[c / n, r / n, int(n)] for n, c, r in sums.T.tolist() if n]


class KeptLogits:
    """Logits by a picture's number, in ``dtype``, as long as they fit ``limit`` bytes; then none at all.

    Args:
        limit: bytes.
        dtype: of the kept logits.
        pictures: how many will come, where that is known: if they do not all fit, none is kept from the start.

    Attributes:
        rows: by the picture's number.
    """

    def __init__(
        self, limit: int = 2**29, dtype: torch.dtype = torch.float16, pictures: int = 0
    ) -> None:
        self.limit, self.dtype, self.pictures = limit, dtype, pictures
        self.rows: dict[int, Tensor] = {}
        self._full = False

    def add(self, index: Tensor, logits: Tensor) -> None:
        """Keeps a batch: ``(N,)``, ``(N, C, ...)``."""
        rows = logits.to(self.dtype).cpu()
        size = rows[0].nbytes if len(rows) else 0
        if self._full or max(self.pictures, len(self.rows) + len(rows)) * size > self.limit:
            self._full = True
            self.rows.clear()
            return
        self.rows |= dict(zip(index.tolist(), rows, strict=True))

    def get(self, index: Tensor) -> Tensor | None:
        """Float32 ``(N, C, ...)``, or None where one is missing."""
        found = [self.rows.get(i) for i in index.tolist()]
        return torch.stack(found).float() if found and all(x is not None for x in found) else None  # type: ignore[arg-type]

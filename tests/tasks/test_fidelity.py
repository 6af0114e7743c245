"""Agreement, divergence, calibration, classes and confusions, against NumPy written from the definitions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
    multiclass_jaccard_index,
    multilabel_f1_score,
)

from kd.tasks.fidelity import Fidelity, KeptLogits, _curve
from tests._files import read_json
from tests._helpers import CLASSES, Command
from tests._runs import evaluated, run_of, summary_of
from tests._runs import run as trained


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def logits_of(n: int = 400, c: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    truth = rng.randint(0, c - 1, n)  # the last class never occurs
    teacher = rng.normal(0, 1, (n, c)) + 2 * np.eye(c)[truth]
    return teacher + rng.normal(0, 1, (n, c)), teacher, truth


def fed(
    kind: str, parts: int, student: np.ndarray, teacher: np.ndarray, truth: np.ndarray
) -> Fidelity:
    """In several objects of several batches each, put together."""
    index = np.arange(len(truth))
    each = [Fidelity(kind, 5) for _ in range(2)]  # type: ignore[arg-type]
    for i, rows in enumerate(np.array_split(index, parts)):
        x = [
            torch.from_numpy(np.ascontiguousarray(a[rows]))
            for a in (student, teacher, truth, index)
        ]
        each[i % 2].update(x[0].float(), x[1].float(), x[2], x[3])
    each[0].add(each[1])
    return each[0]


def test_a_bin_whose_confidences_are_no_numbers_is_no_point_of_the_curve() -> None:
    assert _curve(torch.tensor([[2, 1], [1, torch.nan], [2, 1]])) == [[0.5, 1.0, 2]]


def test_classes_against_the_definitions() -> None:
    student, teacher, truth = logits_of()
    p, q = softmax(student), softmax(teacher)
    s, t = p.argmax(1), q.argmax(1)
    found = fed("classification", 7, student, teacher, truth).result("abcde")
    assert found["agreement"] == pytest.approx((s == t).mean())
    assert found["kl"] == pytest.approx((q * np.log(q / p)).sum(1).mean(), rel=1e-4)
    assert found["outcomes"]["only_teacher"] == pytest.approx(((t == truth) & (s != truth)).mean())
    assert sum(found["outcomes"].values()) == pytest.approx(1)
    gap = found["gap"]
    assert gap["difference"] == pytest.approx((s == truth).mean() - (t == truth).mean())
    assert gap["low"] < gap["difference"] < gap["high"] and gap["pictures"] == len(truth)
    assert [row["name"] for row in found["per_class"]] == list("abcd")
    worst = found["confusions"][0]
    a, b = "abcde".index(worst["is"]), "abcde".index(worst["called"])
    assert worst["teacher"] == ((truth == a) & (t == b)).sum()


def test_the_examples_are_the_worst_in_any_order_of_batches() -> None:
    student, teacher, truth = logits_of()
    q, lost = softmax(teacher).max(1), (teacher.argmax(1) == truth) & (student.argmax(1) != truth)
    worst = set(np.argsort(-np.where(lost, q, -1))[:12].tolist())
    for parts in (7, 50):
        found = fed("classification", parts, student, teacher, truth)
        assert {-place for _, place, _ in found.mistakes["lost"]} == worst
        assert len(found.mistakes["both_wrong"]) == 12


def test_pixels_and_labels() -> None:
    rng = np.random.RandomState(1)
    truth = rng.randint(0, 6, (4, 6, 8))  # 5 is not a class
    student, teacher = (rng.normal(0, 1, (4, 5, 6, 8)) for _ in range(2))
    found = fed("segmentation", 4, student, teacher, truth).result("abcde")
    s, known = student.argmax(1), truth < 5
    assert found["agreement"] == pytest.approx((s == teacher.argmax(1))[known].mean())

    labels = (rng.rand(40, 5) < 0.3).astype(np.float32)
    student, teacher = (rng.normal(0, 1, (40, 5)) for _ in range(2))
    found = fed("multilabel", 4, student, teacher, labels).result("abcde")
    yes = student > 0
    assert found["agreement"] == pytest.approx((yes == (teacher > 0)).mean())


def confusion_of(found: dict[str, Any], per_class: np.ndarray) -> np.ndarray:
    """The student's pictures or pixels by class and answer, from the rows of confusions and how many are right of each."""
    confusion = np.diag(per_class)
    for row in found["confusions"]:
        confusion["abcde".index(row["is"]), "abcde".index(row["called"])] = row["student"]
    return confusion


def test_the_numbers_are_torchmetrics_own() -> None:
    """Also with pixels that are ignored, or of no class; one class never occurs."""
    arrays = logits_of()
    result = fed("classification", 7, *arrays).result("abcde")
    student, teacher, truth = map(torch.from_numpy, arrays)
    for model, logits in (("student", student.float()), ("teacher", teacher.float())):
        error = multiclass_calibration_error(logits, truth, 5, n_bins=15)
        assert result["ece"][model] == pytest.approx(float(error), abs=1e-6)
        recall = multiclass_accuracy(logits, truth, 5, average="none")
        shares = [row[model] for row in result["per_class"]]
        assert shares == pytest.approx(recall[:4].tolist(), abs=1e-6)
    confusion = multiclass_confusion_matrix(student, truth, 5).numpy()
    assert (confusion_of(result, confusion.diagonal()) == confusion).all()

    rng = np.random.RandomState(1)
    masks = torch.from_numpy(rng.choice([0, 1, 2, 3, 7, 255], (4, 6, 8)))  # 7 is no class
    maps = torch.from_numpy(rng.normal(0, 1, (4, 5, 6, 8))).float()
    found = Fidelity("segmentation", 5, ignore_index=255)
    found.update(maps, None, masks, torch.arange(4))
    result = found.result("abcde")
    known = masks.where(masks != 7, 255)
    error = multiclass_calibration_error(maps, known, 5, n_bins=15, ignore_index=255)
    assert result["ece"]["student"] == pytest.approx(float(error), abs=1e-6)
    confusion = multiclass_confusion_matrix(maps, known, 5, ignore_index=255).numpy()
    assert (confusion_of(result, confusion.diagonal()) == confusion).all()
    iou = multiclass_jaccard_index(maps, known, 5, average="none", ignore_index=255)
    scores = [row["student"] for row in result["per_class"]]
    assert scores == pytest.approx(iou[:4].tolist(), abs=1e-6)

    labels = torch.from_numpy(rng.rand(40, 5) < 0.3).long()
    logits = torch.from_numpy(rng.normal(0, 1, (40, 5))).float()
    found = Fidelity("multilabel", 5)
    found.update(logits, None, labels, torch.arange(40))
    f1 = multilabel_f1_score(logits, labels, 5, average="none")
    scores = [row["student"] for row in found.result("abcde")["per_class"]]
    assert scores == pytest.approx(f1.tolist(), abs=1e-6)


def test_kept_logits_end_at_their_limit() -> None:
    kept = KeptLogits(limit=100)
    kept.add(torch.tensor([3, 1]), torch.ones(2, 10))
    assert (
        kept.get(torch.tensor([1, 3])).shape == (2, 10) and kept.get(torch.tensor([1, 2])) is None
    )
    kept.add(torch.arange(10, 20), torch.ones(10, 10))
    assert kept.get(torch.tensor([1])) is None


def test_logits_that_do_not_fit_are_reported(
    recipe: Path, prints: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 21,841 classes 12,290 validation pictures fill what a process keeps."""
    monkeypatch.setattr("kd.callbacks.preflight.MOST_LOGITS", 100)
    for words in ([], ["preflight=off"]):
        assert (
            prints("train", [f"recipe={recipe}", "trainer.max_epochs=1", *words]).count(
                "so val/kl is not measured"
            )
            == 1
        )


def test_a_run_says_how_faithful_its_best_student_is(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own file, from passes it makes anyway, and kd-eval's over the exported weights tell the same."""
    trained(recipe, "trainer.precision=32-true")
    run = run_of(recipe)
    own = read_json(run / "fidelity.json")
    best = summary_of(run)["student"]["best_val"]
    assert own["agreement"] == pytest.approx(best["agreement"], abs=1e-6) and own["pictures"] == 16
    right = sum(row["student"] * row["count"] for row in own["per_class"]) / 16
    assert right == pytest.approx(best["acc1"], abs=1e-6)
    assert {row["name"] for row in own["per_class"]} == set(CLASSES)
    example = (own["examples"].get("lost") or own["examples"]["both_wrong"])[0]
    assert example["image"].startswith("data:image/jpeg;base64,") and example["truth"][0] in CLASSES
    found = evaluated(run)
    for key in ("agreement", "kl"):
        assert found["fidelity"][key] == pytest.approx(
            own[key], abs=2e-3
        )  # the run keeps logits in float16
    assert "expected calibration error of the student" in capsys.readouterr().out

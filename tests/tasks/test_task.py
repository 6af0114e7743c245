"""What a task says of its kind of target, once for all who depend on it."""

import numpy as np
import pytest
import torch

from kd.losses import (
    BinaryKDLoss,
    CWDLoss,
    DISTLoss,
    DKDLoss,
    HardKDLoss,
    KDLoss,
    LogitLoss,
    MLKDLoss,
    NKDLoss,
    WSLDLoss,
)
from kd.tasks import Classification, Features, MultiLabel, Regression, Segmentation, Task
from kd.tasks.segmentation import side_by_side

NAMES = ["apple", "bread", "corn"]
KINDS = {
    "one label a picture": Classification(3), "several labels a picture": MultiLabel(3), "masks": Segmentation(3),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_names_its_targets_and_its_answers(kind: str) -> None:
    assert KINDS[kind].kind == kind
    assert KINDS[kind].fidelity(3).kind == KINDS[kind].answers  # type: ignore[union-attr]


def test_a_task_of_ones_own_answers_in_numbers() -> None:
    assert (Task().answers, Task().fidelity(3), Task().entropy(torch.zeros(2, 3))) == (
        "numbers", None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("task", "loss", "reason"),
    [
        (Classification(3), KDLoss(), ""),
        (Classification(3), CWDLoss(), "is defined for masks alone"),
        (MultiLabel(3), KDLoss(), "compares classes that exclude each other"),
        (MultiLabel(3), BinaryKDLoss(), ""),
        (MultiLabel(3), CWDLoss(), "is defined for masks alone"),
        (Segmentation(3), CWDLoss(), ""),
        (Segmentation(3), KDLoss(), "is not defined for masks"),
        (Features(), KDLoss(), "the student has no classifier"),
    ],
)
def test_a_task_refuses_losses_that_it_is_not_defined_for(
    task: Task, loss: KDLoss, reason: str
) -> None:
    found = task.refuses(loss)
    assert (reason in found) if reason else not found


@pytest.mark.parametrize("kind", [HardKDLoss, DKDLoss, DISTLoss, NKDLoss, MLKDLoss, WSLDLoss])
def test_losses_over_classes_are_refused_for_masks_and_several_labels(
    kind: type[LogitLoss],
) -> None:
    assert "is not defined for masks; PixelKDLoss" in Segmentation(3).refuses(kind())
    if kind in (HardKDLoss, DISTLoss, MLKDLoss):  # the others need a class id, and say so
        assert "BinaryKDLoss and the losses over features are" in MultiLabel(3).refuses(kind())


def test_entropy_is_zero_one_hot_and_one_uniform() -> None:
    task = Classification(7)
    assert float(task.entropy(torch.zeros(3, 7))) == pytest.approx(1)
    assert float(task.entropy(100 * torch.eye(7))) == pytest.approx(0, abs=1e-6)
    p = torch.tensor([[0.5, 0.25, 0.25]])
    assert float(task.entropy(p.log())) == pytest.approx(1.5 / torch.log2(torch.tensor(3.0)).item())


def test_yes_or_no_of_each_class_has_an_entropy_of_its_own() -> None:
    assert float(MultiLabel(7).entropy(torch.zeros(3, 7))) == pytest.approx(1)
    assert float(MultiLabel(7).entropy(torch.full((3, 7), 50.0))) == pytest.approx(0, abs=1e-6)


def test_answers_as_rows_of_a_table() -> None:
    logits = torch.tensor([[2.0, 0, 0], [0, 0, 3]])
    found = Classification(3).rows(logits, NAMES)
    assert found[""] == ["apple", "corn"]
    assert [float(p) for p in found["_p"]] == pytest.approx(
        logits.softmax(1).amax(1).tolist(), abs=1e-6
    )
    assert Classification(3).rows(torch.tensor([1, -1]), NAMES) == {"": ["bread", ""]}
    assert MultiLabel(3).rows(torch.tensor([[1.0, -1, 2], [-1, -1, -1]]), NAMES) == {
        "": ["apple;corn", ""]
    }


def test_the_same_answer() -> None:
    ours, theirs = torch.tensor([[2.0, 0, 0], [0, 0, 3]]), torch.tensor([[5.0, 4, 0], [0, 4, 3]])
    assert Classification(3).same(ours, theirs).tolist() == [True, False]
    assert MultiLabel(3).same(ours, theirs).float().mean() == pytest.approx(4 / 6)
    assert Features().same(ours, 2 * ours).all()


def test_maps_are_black_where_the_truth_does_not_count() -> None:
    picture, truth = np.full((4, 4, 3), 7, np.uint8), torch.zeros(4, 4, dtype=torch.int64)
    truth[0, 0] = 255
    sheet = side_by_side(picture, {"truth": truth, "student": truth * 0}, truth < 3, 3)
    assert (sheet[0, 4 + 4] == 0).all()  # behind picture and truth
    assert sheet[0, 4 + 4 + 1].any()


def test_a_pixel_that_does_not_count_is_of_none_of_256_classes() -> None:
    """Class 255 has a colour, which such pixels had too."""
    picture, truth = np.full((4, 4, 3), 7, np.uint8), torch.zeros(4, 4, dtype=torch.int16)
    truth[0, 0] = -1
    sheet = side_by_side(picture, {"truth": truth, "student": truth * 0}, truth >= 0, 256)
    assert (sheet[0, 4 + 4] == 0).all()


@pytest.mark.parametrize("make", [Classification, MultiLabel, Regression, Segmentation])
def test_no_batch_makes_no_metric(make: type[Task]) -> None:
    """As where all pictures of a user's own validation loader are padding."""
    task = make()
    task.settle(3)
    assert task.compute() == {}


def test_a_judgement_in_words() -> None:
    assert Classification(3).judged(0.5, 16) == "is right on 8 of 16 validation pictures"
    assert MultiLabel(3).judged(0.5, 16) == "reaches map 50.0% on the validation set"


def test_settings_without_effect_are_named_where_no_picture_has_a_label() -> None:
    task = Classification(3, label_smoothing=0.1, class_weights=[1.0, 2.0, 3.0])
    assert task.note_on_labels(True) == ""
    note = task.note_on_labels(False)
    assert note.endswith(
        "model.task_loss_weight, model.task.label_smoothing, model.task.class_weights: without effect"
    )
    assert "class_weights" not in Classification(3).note_on_labels(False)
    masks = Segmentation(2, class_weights=[1.0, 2.0])
    assert "model.task.class_weights: without effect" in masks.note_on_labels(False)

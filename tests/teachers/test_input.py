"""A teacher's input and outputs against what its weights say: another mean, std or size; a softmax at its end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import kd
import kd.tasks
from kd.models import TeacherSpec, preprocess_for
from kd.teachers import build_teacher
from tests._good_teacher import recipe_of_a_good_teacher
from tests._helpers import ARCH, CLASSES, TINY, WITHOUT_TEACHER, Command, tiny_vit

MOMENTS = {"mean": "[0.5, 0.5, 0.5]", "std": "[0.5, 0.5, 0.5]"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with a good teacher whose file names its input."""
    home = tmp_path_factory.mktemp("input")
    return recipe_of_a_good_teacher(home, **MOMENTS, img_size="32")


@pytest.fixture(scope="module")
def named(good: Path) -> Path:
    """The file of this teacher."""
    return good.parent / "teacher.safetensors"


def test_a_wrong_mean_and_std_are_reported(
    good: Path,
    named: Path,
    prints: Command,
) -> None:
    items = [
        f"recipe={good}",
        "trainer.max_epochs=1",
        "preflight=warn",
    ]
    right = prints("train", items)
    assert "was trained with" not in right
    wrong = ["model.teacher.mean=[0.9,0.1,0.9]", "model.teacher.std=[0.02,2,0.05]"]
    report = prints("train", [*items, *wrong])
    assert (
        "model.teacher.mean=[0.9,0.1,0.9], not [0.5,0.5,0.5]; model.teacher.std=[0.02,2,0.05], not"
        in report
    )
    assert f"[0.5,0.5,0.5] as {named} was trained with" in report


def test_another_size_is_reported(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size, different in ((32, False), (64, True)):
        build_teacher(TeacherSpec(ARCH, size, checkpoint=str(named), kwargs=TINY), 4, CLASSES)
        line = f"model.teacher.img_size=[{size},{size}], not [32,32] as {named} was trained with"
        assert (line in capsys.readouterr().out) == different


# -- probabilities --------


class Ended(nn.Module):
    """A model with a function at its end."""

    def __init__(self, model: nn.Module, end: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.end = model, end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.model(x))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(1)


@pytest.mark.parametrize(
    ("several", "end", "task", "target"),
    [
        (False, softmax, None, torch.arange(6) % 4),
        (True, softmax, None, torch.arange(6) % 4),
        (False, torch.sigmoid, kd.tasks.MultiLabel(4), torch.ones(6, 4)),
    ],
)
def test_probabilities_teach_as_the_logits_that_they_are_made_of(
    several: bool, end: Any, task: Any, target: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    """A softmax of classes, and a sigmoid of each of several labels."""
    losses = []
    for function in (None, end):
        torch.manual_seed(0)
        plain = tiny_vit(seed=4)
        teacher = plain if function is None else Ended(plain, function)
        taught = {"a": teacher, "b": teacher} if several else teacher
        step = kd.Distillation(tiny_vit(seed=2), taught, task=task)
        losses.append(step(torch.rand(6, 3, 32, 32), target).named["kd_loss"])
        report = capsys.readouterr().out
        assert ("gives probabilities, not logits" in report) == (function is end)
        assert ("their log-odds" in report) == (function is torch.sigmoid)
    close = (1.3e-6, 1e-5) if end is softmax else (1e-4, 1e-5)
    torch.testing.assert_close(losses[0], losses[1], rtol=close[0], atol=close[1])


def test_numbers_and_labels_of_their_own_are_no_probabilities() -> None:
    """Shares that add up to 1 are a fine target of a regression, and are left alone."""
    teacher = Ended(tiny_vit(num_classes=2, seed=1), softmax)
    pictures, target = torch.rand(4, 3, 32, 32), torch.rand(4, 2)
    step = kd.Distillation(tiny_vit(num_classes=2, seed=2), teacher, task=kd.Regression(2))
    step(pictures, target)
    assert step.teacher is not None
    torch.testing.assert_close(step.teacher(pictures), teacher(pictures))


# -- from Python --------


@pytest.mark.parametrize(
    ("task", "target", "loss"),
    [(kd.Classification(4), torch.arange(4), "KDLoss"), (kd.tasks.MultiLabel(4), torch.ones(4, 4), "BinaryKDLoss"),
     (kd.Regression(4), torch.rand(4, 4), "RegressionKDLoss")],
)  # fmt: skip
def test_a_teacher_without_losses_teaches_as_is_usual(
    task: kd.tasks.Task, target: torch.Tensor, loss: str
) -> None:
    step = kd.Distillation(tiny_vit(seed=2), tiny_vit(seed=1), task=task)
    terms = step(torch.rand(4, 3, 32, 32), target)
    assert type(step.student.objective.losses["kd"]).__name__ == loss
    assert terms.named["kd_loss"] > 0
    assert terms.total > terms.named["task_loss"].detach()
    alone = kd.Distillation(tiny_vit(seed=2), tiny_vit(seed=1), task=type(task)(4), losses={})
    assert "kd_loss" not in alone(torch.rand(4, 3, 32, 32), target).named
    module = kd.DistillationModule(tiny_vit(seed=2), tiny_vit(seed=1), task=type(task)(4))
    assert list(module.student.objective.losses) == ["kd"]


@pytest.mark.parametrize(
    "arch", [ARCH, "mixer_s16_224", "swin_tiny_patch4_window7_224", "vit_small_patch16_dinov3"]
)
def test_a_timm_model_is_fed_pictures_of_the_size_it_was_built_for(arch: str) -> None:
    model = timm.create_model(arch, img_size=64, num_classes=4)
    assert preprocess_for(model, None).size == (64, 64)
    pictures = torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8)
    step = kd.Distillation(timm.create_model("resnet10t", num_classes=4), model)
    assert step(pictures, torch.tensor([0, 1])).total > 0


def test_a_students_own_mean_beside_its_files_gets_a_line(
    good: Path,
    named: Path,
    prints: Command,
) -> None:
    items = [
        f"recipe={good}",
        *WITHOUT_TEACHER,
        f"model.student.checkpoint={named}",
        f"model.student.kwargs={TINY}",
        "trainer.max_epochs=1",
    ]
    line = "model.student.mean=[0.1,0.1,0.1], not [0.5,0.5,0.5] as"
    for changes in ([], ["model.student.mean=[0.1,0.1,0.1]"]):
        assert (line in prints("train", [*items, *changes])) == bool(changes)

"""Frozen teachers: precision and classifier."""

import timm
import torch

from kd.models import Preprocess
from kd.tasks import Regression
from kd.teachers.frozen import FrozenTeacher, dtype_for
from tests._helpers import refuses

INPUT = Preprocess(2, (0.5,) * 3, (0.5,) * 3)


def test_a_teacher_stays_in_the_precision_of_the_training() -> None:
    assert [dtype_for(p) for p in ("bf16-mixed", "16-mixed", "32-true")] == [
        torch.bfloat16, torch.float16, torch.float32,
    ]  # fmt: skip


class TwoLayers(torch.nn.Sequential):
    """A model whose classifier has no weight of its own."""

    def get_classifier(self) -> torch.nn.Module:
        return self[0]


def test_a_classifier_of_several_layers_does_not_keep_a_teacher_from_half_precision() -> None:
    model = TwoLayers(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)))
    teacher = FrozenTeacher(model, INPUT).to(torch.device("cpu"), torch.bfloat16)
    assert teacher(torch.zeros(4, 3, 2, 2, dtype=torch.uint8)).shape == (4, 3)
    with refuses("has no single classifier"):
        teacher.classifier()


class NotOfTimm(torch.nn.Module):
    """A network whose last layer has a usual name, and no method that gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(12, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(images.flatten(1))


def test_a_network_that_timm_has_not_built_has_the_datas_classes_too() -> None:
    model = NotOfTimm()
    columns = torch.tensor([2, 0])
    teacher = FrozenTeacher(model, INPUT, columns=columns)
    images = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(teacher.in_the_datas_classes()(images), model(images)[:, columns])


def test_a_classifier_by_its_name_stays_as_loaded_in_half_precision() -> None:
    """A teacher of numbers is in none: 1990.3 would be 1984 in bfloat16, and 100,007 infinite in float16."""
    model = NotOfTimm()
    weight = model.fc.weight.detach().clone()
    teacher = FrozenTeacher(model, INPUT)
    teacher.to(torch.device("cpu"), torch.bfloat16)
    assert torch.equal(teacher.classifier()[0], weight)
    teacher.expect(Regression(3))
    assert teacher.to(torch.device("cpu"), torch.bfloat16).dtype == torch.float32


def test_a_teacher_with_two_classifiers_has_no_copy_in_the_datas_classes() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, depth=1)
    teacher = FrozenTeacher(
        model, Preprocess(224, (0.5,) * 3, (0.5,) * 3), columns=torch.tensor([2, 0])
    )
    with refuses(r"^model.teacher: .* has no single classifier$"):
        teacher.in_the_datas_classes()

"""A detector's backbone by a builder of one's own: distilled, and loaded by the package that it is from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests._detectors import distil
from tests._helpers import Command
from tests._runs import summary_of


class Stem(nn.Sequential):
    """Halves the picture three times."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 4), (4, 6), (6, 8)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.SiLU()]
        super().__init__(*layers)


class Levels(nn.Module):
    """A detector's backbone: its answer is a map for each of the strides 8, 16 and 32."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.stem = Stem()
        self.middle = nn.Conv2d(8, 10, 3, 2, 1)
        self.last = nn.Conv2d(10, 12, 3, 2, 1)
        self.head = nn.Conv2d(12, 12, 1)  # as a detector names its head

    def forward(self, x: torch.Tensor) -> Any:
        p3 = self.stem(x)
        p4 = self.middle(p3)
        p5 = self.head(self.last(p4))
        forms = {
            "dict": {"p3": p3, "p4": p4, "p5": p5},
            "tuple": (p3, p4, p5),
            "tokens": p5.flatten(2).transpose(1, 2),
        }
        return forms[self.form]


class Backbones:
    """Builds them."""

    def __init__(self, form: str = "tuple") -> None:
        self.form = form

    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> nn.Module:
        model = Levels(self.form)
        model.mean, model.std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return model


class CSP:
    """The backbone of LibreYOLO's YOLOv9, as recipes/DETECTOR.md builds it."""

    def __init__(self, size: str = "t") -> None:
        self.size = size

    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> nn.Module:
        from libreyolo.models.yolo9.nn import Backbone9

        model = Backbone9(self.size)
        model.mean, model.std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return model


def by(builder: str) -> str:
    """The word for a builder of this file."""
    return f"model.student.builder=tests.ship.export.test_own_backbone.{builder}"


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The run's student under the names of what the builder built."""
    student = load_file(run / "student.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in student.items()}


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_a_builders_backbone_from_pictures_to_its_own_names(
    form: str, tmp_path: Path, refusal: Command
) -> None:
    assert distil(tmp_path, by("Backbones"), f"model.student.builder.form={form}") == 0
    run = tmp_path / "detector_backbone" / "latest"
    summary = summary_of(run)
    assert {"stride8_loss", "stride16_loss", "stride32_loss"} <= set(summary["student"]["val"])
    Levels(form).load_state_dict(weights_of(run), strict=True)
    assert "its tensors are in student.safetensors" in refusal("export", [str(run), "to=backbone"])


def test_what_is_neither_features_nor_maps_is_refused_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taps = [f"model.taps.stride{s}.student=model.stem" for s in (8, 16, 32)]
    assert distil(tmp_path, by("Backbones"), "model.student.builder.form=tokens", *taps) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "kd-train: model.student: without a classifier Backbones gives numbers of shape (2, 4, 12) for two pictures, "
        "but features are (N, D), or maps (N, C, H, W)"
    )


def test_a_yolos_backbone_in_its_own_code(tmp_path: Path) -> None:
    """LibreYOLO (MIT): YOLOv9's detector loads the weights, gives the student's maps, and trains a step."""
    yolo9 = pytest.importorskip("libreyolo.models.yolo9.nn")
    from libreyolo import LibreYOLO9

    assert distil(tmp_path, by("CSP")) == 0
    weights = weights_of(tmp_path / "detector_backbone" / "latest")
    student = yolo9.Backbone9("t").eval()
    student.load_state_dict(weights)

    detector = LibreYOLO9(None, size="t", nb_classes=2, device="cpu").model
    detector.backbone.load_state_dict(weights, strict=True)
    images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    detector.eval()
    with torch.no_grad():
        maps = detector.backbone(images)
        expected = student(images)
    assert [x.shape[2:] for x in maps] == [(8, 12), (4, 6), (2, 3)]
    for of_detector, of_student in zip(maps, expected, strict=True):
        torch.testing.assert_close(of_detector, of_student)

    detector.train()
    boxes = torch.zeros(2, 1, 5)
    boxes[:, 0] = torch.tensor([1, 0.1, 0.1, 0.8, 0.9])  # class, two corners as shares of the sides
    optimizer = torch.optim.SGD(detector.parameters(), lr=0.01)
    loss = detector(images, boxes)["total_loss"]
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert not torch.equal(detector.backbone.conv0.conv.weight, student.conv0.conv.weight)

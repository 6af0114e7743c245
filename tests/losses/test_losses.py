"""What losses refuse, project and are called; their formulas are in test_formulas."""

from pathlib import Path

import pytest
import torch

from kd import losses
from kd.losses import HintLoss, KDLoss, RKDLoss, kd_loss
from tests._helpers import ROOT


def test_kd_over_positions_is_their_mean() -> None:
    student, teacher = torch.randn(2, 2, 5, 3, 4)
    flat = [x.permute(0, 2, 3, 1).reshape(-1, 5) for x in (student, teacher)]
    torch.testing.assert_close(kd_loss(student, teacher, 2.0), kd_loss(*flat, 2.0))


def test_errors_name_the_argument() -> None:
    for make in (lambda: KDLoss(temperature=-1.0), lambda: KDLoss(temperature=float("nan"))):
        with pytest.raises(ValueError, match="temperature"):
            make()
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight"):
            KDLoss(weight=weight)
    for argument in ("distance_weight", "angle_weight"):
        with pytest.raises(ValueError, match=f"^{argument} must be >= 0, got -1"):
            RKDLoss(**{argument: -1.0})


def test_hint_projects_to_the_teachers_shape() -> None:
    loss = HintLoss()
    loss.build((2, 8, 5, 5), (2, 16, 9, 9))
    assert loss.projection(torch.randn(3, 8, 5, 5)).shape == (3, 16, 9, 9)
    with pytest.raises(
        ValueError, match=r"no projection leads from the student's \(8,\) .* \(16, 9, 9\)"
    ):
        HintLoss().build((2, 8), (2, 16, 9, 9))


def test_the_readmes_list_every_loss() -> None:
    """Each in the guide by name, and as many in the README as there are."""
    bases = {"DistillLoss", "FeatureLoss", "LogitLoss", "FeatureRegression"}
    names = [name for name in losses.__all__ if name.endswith("Loss") and name not in bases]
    guide = (Path(losses.__file__).parent / "README.md").read_text()
    assert [name for name in names if f"`{name}`" not in guide] == []
    assert f"{len(names)} losses by name" in (ROOT / "README.md").read_text()

"""What losses refuse and are called; their formulas are in test_formulas."""

from pathlib import Path

import pytest

from kd import losses
from kd.losses import KDLoss, RKDLoss
from tests._helpers import ROOT


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


def test_the_readmes_list_every_loss() -> None:
    """Each in the guide by name, and as many in the README as there are."""
    bases = {"DistillLoss", "FeatureLoss", "LogitLoss", "FeatureRegression"}
    names = [name for name in losses.__all__ if name.endswith("Loss") and name not in bases]
    guide = (Path(losses.__file__).parent / "README.md").read_text()
    assert [name for name in names if f"`{name}`" not in guide] == []
    assert f"{len(names)} losses by name" in (ROOT / "README.md").read_text()

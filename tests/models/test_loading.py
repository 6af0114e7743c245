"""What loading does to a model's weights."""

import pytest

from kd.errors import UserError
from kd.models.loading import freeze_backbone
from tests.distill.inherit._vits import small_vit as vit


def test_freezing_leaves_a_gradient_to_the_classifier_alone() -> None:
    model = vit()
    assert freeze_backbone(model, "vit") == ("head",)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "head.weight",
        "head.bias",
    }
    with pytest.raises(UserError, match="nothing is left to train"):
        freeze_backbone(vit(num_classes=0), "vit")

"""The layers below the classifier of a model that a user's builder has built, under the names of that model."""

import copy

import torch
from torch import Tensor, nn

from kd.errors import UserError
from kd.models.own import OwnModel, features_of, maps_in


def backbone_of_builder(student: nn.Module) -> nn.Module | None:
    """The builder's model without its classifier; None of models that timm has built.

    A copy that shares the student's parameters, its buffers (statistics of norms) copied; of a student without a
    classifier the student's model itself.

    Raises:
        UserError: a model with classes, but without a last linear layer that gives them.
    """
    if not isinstance(student, OwnModel):
        return None
    if not student.num_classes:
        return student.model
    if not student.classifier:
        kind = type(student.model).__name__
        raise UserError(
            f"to=backbone: no linear layer of {kind} has {student.num_classes} outputs, so its classifier is not known "
            "(a student with head=false has none)"
        )
    memo = {id(parameter): parameter for parameter in student.model.parameters()}
    backbone = copy.deepcopy(student.model, memo)  # shares the parameters
    backbone.set_submodule(student.classifier, nn.Identity())
    return backbone


def same_with_weights(backbone: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """A second model of the same kind with other weights, in eval mode.

    Args:
        backbone: of :func:`backbone_of_builder`.
        state: its tensors, loaded strictly.
    """
    second = copy.deepcopy(backbone)
    second.load_state_dict(state, strict=True)
    return second.eval()


class AllMaps(nn.Module):
    """What a builder's backbone gives, flattened into one row a picture: its maps one after another, or its features."""

    def __init__(self, backbone: nn.Module) -> None:
        """Wraps a backbone.

        Args:
            backbone: takes normalised pictures ``(N, 3, H, W)``.
        """
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        """``(N, 3, H, W)`` -> ``(N, D)``."""
        output = self.backbone(images)
        outputs = maps_in(output) or [features_of(output)]
        return torch.cat([one.flatten(1) for one in outputs], dim=1)

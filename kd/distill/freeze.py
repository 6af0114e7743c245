"""Training the classifier alone."""

from torch import nn

from kd.errors import UserError
from kd.models.loading import classifier_names


def freeze_backbone(model: nn.Module, arch: str) -> tuple[str, ...]:
    """Leaves a gradient to the classifier alone; gives the paths of its layers.

    Raises:
        UserError: it has no weights.
    """
    trained = tuple(classifier_names(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(f"{head}." for head in trained)))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model.student.freeze: nothing is left to train of {arch}, whose classifier "
                        f"({', '.join(trained)}) has no weights")  # fmt: skip
    return trained

"""Small vision transformers that matter in every layer."""

import inspect

import pytest
import timm
import torch
from timm.models.eva import Eva
from torch import nn

from kd.distill.inherit import inherit_together
from kd.models import Preprocess
from tests._helpers import ARCH

OURS, THEIRS = (
    Preprocess(32, (0.5,) * 3, (0.5,) * 3),
    Preprocess(32, (0.48, 0.45, 0.40), (0.23, 0.22, 0.23)),
)
"""How the student's and the teacher's pictures are prepared."""


def inherit(
    student: nn.Module, teacher: nn.Module, pictures: torch.Tensor, theirs: Preprocess = THEIRS
) -> None:
    """Starts a student; ``theirs``: how the teacher's pictures are prepared."""
    inherit_together([(student, OURS)], teacher, pictures, theirs)


def vit(
    seed: int,
    width: int = 64,
    heads: int = 4,
    depth: int = 3,
    arch: str = ARCH,
    **kwargs: object,
) -> nn.Module:
    """A small model of five classes for pictures of 32 pixels, all of whose weights are drawn from ``seed``.

    Skips the test where the installed timm's Eva does not have one of the arguments yet.
    """
    module = timm.model_entrypoint(arch).__module__
    missing = kwargs.keys() - inspect.signature(Eva).parameters
    if module.endswith(".eva") and missing:
        pytest.skip(f"timm {timm.__version__} has no {', '.join(sorted(missing))}")
    torch.manual_seed(seed)
    shape = {"embed_dim": width, "num_heads": heads, "depth": depth, "img_size": 32, "patch_size": 8}  # fmt: skip
    model = timm.create_model(arch, **{"num_classes": 5, **shape, **kwargs})
    for parameter in model.parameters():  # timm's start is near zero: make every layer matter
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def small_vit(width: int = 16, depth: int = 2, heads: int = 2, **kwargs: object) -> nn.Module:
    """timm's own start, the same weights for the same shape; pictures of 32 pixels in patches of 8."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": width, "depth": depth, "num_heads": heads}  # fmt: skip
    torch.manual_seed(0)
    return timm.create_model(ARCH, **{"num_classes": 3, **shape, **kwargs}).eval()


@torch.no_grad()
def answers(model: nn.Module, sample: torch.Tensor, preprocess: Preprocess = OURS) -> torch.Tensor:
    """Logits ``(N, C)``."""
    return model.eval()(preprocess(sample))


def correlation(
    student: nn.Module,
    teacher: nn.Module,
    sample: torch.Tensor,
    of_teacher: Preprocess = THEIRS,
    of_student: Preprocess = OURS,
) -> float:
    """Of the two models' logits, each class's mean subtracted."""
    ours, theirs = answers(student, sample, of_student), answers(teacher, sample, of_teacher)
    ours, theirs = ours - ours.mean(0), theirs - theirs.mean(0)
    return float((ours * theirs).sum() / ours.norm() / theirs.norm())

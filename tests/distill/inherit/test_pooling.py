"""Teachers that pool by attention (SigLIP, Perception Encoder)."""

import pytest
import torch

from kd.distill.inherit import check_pair
from tests.distill.inherit._vits import OURS, THEIRS, correlation, eva, inherit

SIGLIP = "vit_base_patch16_siglip_224"
PERCEPTION = "vit_pe_core_tiny_patch16_384"


@pytest.mark.parametrize("arch", [SIGLIP, PERCEPTION])
def test_a_copy_becomes_its_teacher(arch: str, sample: torch.Tensor) -> None:
    teacher, student = eva(arch, 0), eva(arch, 1)
    inherit(student, teacher, sample, OURS, THEIRS)
    assert correlation(student, teacher, sample) > 0.98


@pytest.mark.parametrize("heads", [2, 4])
def test_a_smaller_pooling_with_heads_of_the_same_or_of_another_size(
    heads: int, sample: torch.Tensor
) -> None:
    teacher = eva(PERCEPTION, 0, attn_pool_num_heads=4)
    student = eva(PERCEPTION, 1, width=32, heads=2, attn_pool_num_heads=heads)
    inherit(student, teacher, sample[:96], OURS, THEIRS)
    assert correlation(student, teacher, sample[96:]) > 0.5


@pytest.mark.parametrize(
    "pooling",
    [
        {"global_pool": "avg", "class_token": False},
        {"global_pool": "avg", "class_token": False, "fc_norm": False},
    ],
)
def test_a_student_that_averages_its_tokens_learns_the_pooled_answer(
    pooling: dict, sample: torch.Tensor
) -> None:
    teacher = eva(SIGLIP, 0)
    student = eva(SIGLIP, 1, **pooling)
    inherit(student, teacher, sample[:96], OURS, THEIRS)
    assert correlation(student, teacher, sample[96:]) > 0.4


def test_a_model_without_a_classifier_keeps_its_pooling(sample: torch.Tensor) -> None:
    """Its features are what is pooled: a linear map of the student's gives the teacher's."""
    teacher, student = eva(SIGLIP, 0, num_classes=0), eva(SIGLIP, 1, num_classes=0)
    inherit(student, teacher, sample, OURS, THEIRS)
    with torch.no_grad():
        ours, theirs = student(OURS(sample)), teacher(THEIRS(sample))
    ours = torch.cat([ours, torch.ones(len(ours), 1)], 1)
    rest = ours @ torch.linalg.lstsq(ours, theirs).solution - theirs
    assert rest.var() < 0.02 * theirs.var()


def test_a_student_that_pools_otherwise_is_refused() -> None:
    plain = eva("vit_tiny_patch16_224", 0, mlp_ratio=4)
    with pytest.raises(ValueError, match="same pooling, got map and token"):
        check_pair(eva(SIGLIP, 0), plain)
    with pytest.raises(ValueError, match="no larger hidden units of the attention pooling"):
        check_pair(eva(PERCEPTION, 0, attn_pool_mlp_ratio=5), eva(PERCEPTION, 0))

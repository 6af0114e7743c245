"""Teachers that pool by attention (SigLIP, Perception Encoder)."""

import pytest
import torch

from kd.distill.inherit import check_pair
from tests.distill.inherit._vits import OURS, THEIRS, inherit, vit

SIGLIP = "vit_base_patch16_siglip_224"
PERCEPTION = "vit_pe_core_tiny_patch16_384"


def test_a_model_without_a_classifier_keeps_its_pooling(sample: torch.Tensor) -> None:
    """Its features are what is pooled: a linear map of the student's gives the teacher's."""
    teacher, student = vit(0, arch=SIGLIP, num_classes=0), vit(1, arch=SIGLIP, num_classes=0)
    inherit(student, teacher, sample)
    with torch.no_grad():
        ours, theirs = student(OURS(sample)), teacher(THEIRS(sample))
    ours = torch.cat([ours, torch.ones(len(ours), 1)], 1)
    rest = ours @ torch.linalg.lstsq(ours, theirs).solution - theirs
    assert rest.var() < 0.02 * theirs.var()


def test_a_student_that_pools_otherwise_is_refused() -> None:
    plain = vit(0, arch="vit_tiny_patch16_224", mlp_ratio=4)
    with pytest.raises(ValueError, match="same pooling, got map and token"):
        check_pair(vit(0, arch=SIGLIP), plain)
    with pytest.raises(ValueError, match="no larger hidden units of the attention pooling"):
        check_pair(vit(0, arch=PERCEPTION, attn_pool_mlp_ratio=5), vit(0, arch=PERCEPTION))

"""How near a start brings a student to its teacher's answers to unseen pictures, whatever kind of ViT they are."""

from typing import Any

import pytest
import torch

from tests._helpers import ARCH
from tests.distill.inherit._vits import answers, correlation, inherit, vit

DINOV3 = {"arch": "vit_small_patch16_dinov3"}
EVA02 = {"arch": "eva02_tiny_patch14_224"}
SIGLIP = {"arch": "vit_base_patch16_siglip_224"}
PERCEPTION = {"arch": "vit_pe_core_tiny_patch16_384"}
NARROW = {"width": 32, "heads": 2}
AVERAGED = {"global_pool": "avg", "class_token": False}
NEAR: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    ({}, NARROW, 0.5),
    ({}, {"depth": 2}, 0.5),
    ({}, {**NARROW, "depth": 1}, 0.5),
    ({"reg_tokens": 4}, {"reg_tokens": 0}, 0.5),
    ({"reg_tokens": 4, "no_embed_class": True}, {"reg_tokens": 1, "no_embed_class": False}, 0.5),
    ({**AVERAGED, "class_token": True}, AVERAGED, 0.5),
    # rotary positions; keys have no bias in most of these: the norm before them has a shift in its place
    (DINOV3, {}, 0.99),
    ({**DINOV3, "init_values": None}, {}, 0.99),
    ({**DINOV3, "qkv_bias": True}, {}, 0.99),
    ({**DINOV3, "qk_norm": True}, {}, 0.99),
    (DINOV3, {**NARROW, "depth": 2}, 0.5),
    (EVA02, {}, 0.99),
    ({**EVA02, "qkv_fused": False, "class_token": False}, {}, 0.99),
    ({**EVA02, "scale_attn_inner": True, "num_reg_tokens": 2}, {}, 0.99),
    (EVA02, {**NARROW, "depth": 2}, 0.5),
    ({"arch": "eva_giant_patch14_224"}, {"arch": ARCH, "global_pool": "avg", "mlp_ratio": 4}, 0.98),
    # answers that are pooled by attention
    (SIGLIP, {}, 0.98),
    (PERCEPTION, {}, 0.98),
    ({**PERCEPTION, "attn_pool_num_heads": 4}, {**NARROW, "attn_pool_num_heads": 2}, 0.5),
    ({**PERCEPTION, "attn_pool_num_heads": 4}, NARROW, 0.5),
    (SIGLIP, AVERAGED, 0.4),
    (SIGLIP, {**AVERAGED, "fc_norm": False}, 0.4),
]
"""The teacher, what the student has otherwise, and the least correlation."""


@pytest.mark.parametrize(("shape", "other", "least"), NEAR, ids=str)
def test_a_student_comes_near(
    shape: dict[str, Any], other: dict[str, Any], least: float, sample: torch.Tensor
) -> None:
    teacher, student = vit(0, **shape), vit(1, **{**shape, **other})
    unseen = sample[96:]
    before = correlation(student, teacher, unseen)
    inherit(student, teacher, sample[:96])
    assert correlation(student, teacher, unseen) > max(least, before + 0.3)


@pytest.mark.parametrize("shape", [{}, DINOV3], ids=str)
def test_another_grid_of_patches(shape: dict[str, Any], sample: torch.Tensor) -> None:
    teacher, student = vit(0, **shape), vit(1, patch_size=16, **shape)
    inherit(student, teacher, sample)
    assert torch.isfinite(answers(student, sample)).all()

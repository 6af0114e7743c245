"""Teachers with rotary positions: timm's ``Eva`` (EVA-02, DINOv3, Perception Encoder, RoPE-Mixed)."""

import pytest
import torch

from kd.distill.inherit import check_pair
from kd.distill.inherit.anatomy import kind_of_rotation, qkv_biases
from tests.distill.inherit._vits import OURS, THEIRS, answers, correlation, eva, inherit

DINOV3 = "vit_small_patch16_dinov3"
EVA02 = "eva02_tiny_patch14_224"
MIXED = "vit_small_patch16_rope_mixed_224"


@pytest.mark.parametrize(
    ("arch", "alone"),
    [
        (DINOV3, {}),
        (DINOV3, {"init_values": None}),
        (DINOV3, {"qkv_bias": True}),
        (DINOV3, {"qk_norm": True}),
        (EVA02, {}),
        (EVA02, {"qkv_fused": False, "class_token": False}),
        (EVA02, {"scale_attn_inner": True, "num_reg_tokens": 2}),
    ],
)
def test_a_copy_becomes_its_teacher(arch: str, alone: dict, sample: torch.Tensor) -> None:
    """Keys have no bias in most of these: the norm before them has a shift in its place."""
    teacher, student = eva(arch, 0, **alone), eva(arch, 1, **alone)
    inherit(student, teacher, sample, OURS, THEIRS)
    assert correlation(student, teacher, sample) > 0.99


@pytest.mark.parametrize("arch", [DINOV3, EVA02])
def test_a_quarter_of_the_size_comes_near(arch: str, sample: torch.Tensor) -> None:
    teacher, student = eva(arch, 0), eva(arch, 1, width=32, heads=2, depth=2)
    before = correlation(student, teacher, sample[96:])
    inherit(student, teacher, sample[:96], OURS, THEIRS)
    assert correlation(student, teacher, sample[96:]) > max(0.5, before + 0.3)


def test_a_key_without_a_bias_gets_its_constant_from_the_norm(sample: torch.Tensor) -> None:
    """The teacher's norm shifts its keys by a lot; beside rotary positions that changes the pattern."""
    teacher, student = eva(EVA02, 0), eva(EVA02, 1)
    assert qkv_biases(student.blocks[0].attn)[1] is None
    for block in teacher.blocks:
        block.norm1.bias.data += 2.0
    inherit(student, teacher, sample, OURS, THEIRS)
    assert correlation(student, teacher, sample) > 0.98


def test_what_rotates_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match="same head size beside rotary positions, got 8 and 16"):
        check_pair(eva(DINOV3, 0, heads=8), eva(DINOV3, 0))
    with pytest.raises(ValueError, match=r"same rotary positions, got RotaryEmbeddingCat\("):
        check_pair(eva(DINOV3, 0, rope_type="cat"), eva(DINOV3, 0))
    with pytest.raises(ValueError, match="the student has rotary positions that are learnt"):
        check_pair(eva(MIXED, 0), eva(MIXED, 0))
    grouped = eva(DINOV3, 0, attn_type="rope", num_kv_heads=2, qkv_fused=False)
    with pytest.raises(ValueError, match="the student has grouped-query attention"):
        check_pair(grouped, grouped)
    assert kind_of_rotation(eva("eva_giant_patch14_224", 0)) == "none"


def test_an_eva_without_rotations_teaches_a_plain_vit(sample: torch.Tensor) -> None:
    teacher = eva("eva_giant_patch14_224", 0)
    student = eva("vit_tiny_patch16_224", 1, global_pool="avg", mlp_ratio=4)
    inherit(student, teacher, sample, OURS, THEIRS)
    assert correlation(student, teacher, sample) > 0.98


def test_another_grid_of_patches(sample: torch.Tensor) -> None:
    teacher, student = eva(DINOV3, 0), eva(DINOV3, 1, patch_size=16)
    inherit(student, teacher, sample, OURS, THEIRS)
    assert torch.isfinite(answers(student, OURS, sample)).all()

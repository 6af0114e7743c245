"""Teachers with rotary positions: timm's ``Eva`` (EVA-02, DINOv3, Perception Encoder, RoPE-Mixed)."""

import pytest
import torch

from kd.distill.inherit import check_pair
from kd.distill.inherit.anatomy import kind_of_rotation, qkv_biases
from tests.distill.inherit._vits import correlation, inherit, vit

DINOV3 = "vit_small_patch16_dinov3"
EVA02 = "eva02_tiny_patch14_224"
MIXED = "vit_small_patch16_rope_mixed_224"


def test_a_key_without_a_bias_gets_its_constant_from_the_norm(sample: torch.Tensor) -> None:
    """The teacher's norm shifts its keys by a lot; beside rotary positions that changes the pattern."""
    teacher, student = vit(0, arch=EVA02), vit(1, arch=EVA02)
    assert qkv_biases(student.blocks[0].attn)[1] is None
    for block in teacher.blocks:
        block.norm1.bias.data += 2.0
    inherit(student, teacher, sample)
    assert correlation(student, teacher, sample) > 0.98


def test_what_rotates_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match="same head size beside rotary positions, got 8 and 16"):
        check_pair(vit(0, arch=DINOV3, heads=8), vit(0, arch=DINOV3))
    with pytest.raises(ValueError, match=r"same rotary positions, got RotaryEmbeddingCat\("):
        check_pair(vit(0, arch=DINOV3, rope_type="cat"), vit(0, arch=DINOV3))
    with pytest.raises(ValueError, match="the student has rotary positions that are learnt"):
        check_pair(vit(0, arch=MIXED), vit(0, arch=MIXED))
    grouped = vit(0, arch=DINOV3, attn_type="rope", num_kv_heads=2, qkv_fused=False)
    with pytest.raises(ValueError, match="the student has grouped-query attention"):
        check_pair(grouped, grouped)
    assert kind_of_rotation(vit(0, arch="eva_giant_patch14_224")) == "none"

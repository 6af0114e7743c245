"""Which pairs can inherit."""

from functools import partial

import pytest
import timm
import torch
from timm.layers import HybridEmbed, SwiGLUPacked
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

from kd.distill.inherit import check_pair
from kd.distill.inherit.pair import (
    centres,
    final_norm,
    inherits_head,
    kept_tokens,
    matching_patches,
    stream_norms,
)
from tests._helpers import ARCH
from tests.distill.inherit._vits import inherit, small_vit, vit


def test_the_block_that_can_not_be_inherited_is_named() -> None:
    """Of a model with blocks of two kinds."""
    student = small_vit()
    student.blocks[1] = ParallelScalingBlock(student.embed_dim, 2)
    with pytest.raises(ValueError, match="the student has blocks of the kind ParallelScalingBlock"):
        check_pair(student, small_vit())


def test_a_smaller_vit_of_the_same_kind_fits() -> None:
    check_pair(small_vit(16), small_vit(32, depth=4, heads=4))
    assert inherits_head(small_vit(16), small_vit(32))
    assert not inherits_head(small_vit(num_classes=5), small_vit())


def test_norms_of_the_stream() -> None:
    model = small_vit(depth=3)
    assert len(stream_norms(model)) == 7
    assert final_norm(model) is model.norm
    assert centres(nn.LayerNorm(4)) is True
    assert centres(nn.RMSNorm(4)) is False
    assert centres(nn.BatchNorm1d(4)) is None


def test_tokens_that_the_student_has_too() -> None:
    teacher, student = small_vit(reg_tokens=2), small_vit()
    assert kept_tokens(student, teacher, 19).tolist() == [0, *range(3, 19)]


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ({"heads": 2, "qk_norm": True, "mlp_ratio": 4}, "same qk_norm, got LayerNorm and none"),
        ({"width": 80, "heads": 5}, "no larger width than the teacher, got 80 and 64"),
        ({"depth": 4}, "no larger depth than the teacher, got 4 and 3"),
        ({"mlp_ratio": 5}, "no larger hidden units than the teacher, got 320 and 256"),
        ({"global_pool": "avg", "class_token": False}, "same pooling, got avg and token"),
        ({"reg_tokens": 2}, "no larger number of register tokens than the teacher, got 2 and 0"),
        ({"global_pool": "map", "class_token": False}, "same pooling, got map and token"),
        ({"final_norm": False}, "the student has no norm before its classifier, which"),
        (
            {"block_fn": ParallelScalingBlock},
            "the student has blocks of the kind ParallelScalingBlock",
        ),
        (
            {"embed_layer": partial(HybridEmbed, backbone=torch.nn.Conv2d(3, 8, 1))},
            r"of its own \(a hybrid\), which",
        ),
        ({"qk_norm": True}, "same qk_norm, got LayerNorm and none"),
        ({"mlp_layer": SwiGLUPacked}, "same kind of MLP, got GluMlp and Mlp"),
        ({"norm_layer": torch.nn.Identity}, "the student has norms of the kind Identity"),
        ({"pos_embed": "none"}, "the student must have position embeddings"),
    ],
)
def test_a_pair_that_does_not_fit(student: dict, message: str, sample: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        inherit(vit(1, **student), vit(0), sample)
    with pytest.raises(ValueError, match="must be of one family, got ResNet"):
        inherit(timm.create_model("resnet10t"), vit(0), sample)


@pytest.mark.parametrize(("side", "patch", "found"), [(112, 16, 14), (112, 14, None), (112, 32, None), (96, 16, 12),
                                                      (100, 16, None), (224, 16, None)])  # fmt: skip
def test_a_near_number_of_patches_alone_is_taken(side: int, patch: int, found: int | None) -> None:
    """Far smaller patches cost more than the settings promise; a side that is no multiple can't have as many."""
    teacher, student = (
        timm.create_model(
            ARCH, img_size=size, patch_size=pixels, embed_dim=32, depth=1, num_heads=2
        )
        for size, pixels in ((112, 14), (side, patch))
    )
    assert matching_patches(student, teacher) == found

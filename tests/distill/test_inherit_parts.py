"""The parts of a start from the teacher's layers, without data and without a run."""

import pytest
import timm
import torch
from torch import nn

from kd.distill.inherit import inherit_together, layers, measured, start
from kd.distill.inherit.heads import head_map
from kd.distill.inherit.layers import fit
from kd.distill.inherit.measured import MeasuredTeacher
from kd.distill.inherit.pair import (
    centres,
    check_copy,
    check_pair,
    copy_is_possible,
    final_norm,
    inherits_head,
    kept_tokens,
    stream_norms,
)
from kd.distill.inherit.stream import (
    chosen_blocks,
    embedded_as,
    moment_of,
    projection_of,
    read_by_classifier,
    seen_by_norms,
    teacher_streams,
)
from kd.errors import UserError
from kd.models import Preprocess
from kd.models.loading import freeze_backbone


def vit(width: int = 16, depth: int = 2, heads: int = 2, **kwargs: object) -> nn.Module:
    settings = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": width,
        "depth": depth,
        "num_heads": heads,
    } | kwargs
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", num_classes=settings.pop("num_classes", 3), **settings
    ).eval()


@pytest.mark.parametrize(("student", "teacher", "message"), [
    (vit(32), vit(16), "no larger width"), (vit(depth=3), vit(depth=2), "no larger depth"),
    (vit(class_token=False, global_pool="avg"), vit(), "pooling"), (vit(), vit(norm_layer=nn.BatchNorm1d), "norms"),
    (vit(), timm.create_model("resnet10t"), "plain timm VisionTransformer"),
    (vit(qk_norm=True), vit(), "qk_norm"), (vit(reg_tokens=2), vit(), "register tokens"),
])  # fmt: skip
def test_pairs_that_do_not_fit_say_what_differs(
    student: nn.Module, teacher: nn.Module, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_pair(student, teacher)


def test_a_smaller_vit_of_the_same_kind_fits() -> None:
    check_pair(vit(16), vit(32, depth=4, heads=4))
    assert inherits_head(vit(16), vit(32))
    assert not inherits_head(vit(num_classes=5), vit())


def test_norms_of_the_stream() -> None:
    model = vit(depth=3)
    assert len(stream_norms(model)) == 7
    assert final_norm(model) is model.norm
    assert centres(nn.LayerNorm(4)) is True
    assert centres(nn.RMSNorm(4)) is False
    assert centres(nn.BatchNorm1d(4)) is None


def test_blocks_are_spaced_evenly_and_end_with_the_last() -> None:
    assert chosen_blocks(vit(depth=2), vit(depth=6)) == [2, 5]
    assert chosen_blocks(vit(depth=3), vit(depth=3)) == [0, 1, 2]


def test_tokens_that_the_student_has_too() -> None:
    teacher, student = vit(reg_tokens=2), vit()
    assert kept_tokens(student, teacher, 19).tolist() == [0, *range(3, 19)]


def test_a_copy_is_recognised_and_must_answer_alike() -> None:
    assert copy_is_possible(vit(), vit())
    assert not copy_is_possible(vit(16), vit(32))
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    check_copy(logits, logits + 1.0)
    with pytest.raises(ValueError, match="can't be inherited"):
        check_copy(logits, logits.flip(0))


def test_the_stream_is_the_teachers_own() -> None:
    """What is fitted is what timm computes: the stream before the first block and after each."""
    teacher = vit(32, depth=2)
    pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        streams = teacher_streams(teacher, embedded_as(vit(16), teacher, pictures))
        _, maps = teacher.forward_intermediates(
            pictures, norm=False, output_fmt="NLC", return_prefix_tokens=True
        )
    for found, (patches, prefix) in zip(streams[1:], maps, strict=True):
        assert torch.allclose(
            found,
            seen_by_norms(torch.cat([prefix, patches], 1), teacher.blocks[0].norm1),
            atol=1e-5,
        )


def test_the_projection_is_orthonormal_and_leaves_the_mean_out() -> None:
    teacher, student = vit(32), vit(16)
    pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        projection = projection_of(
            moment_of(
                streams := teacher_streams(teacher, embedded_as(student, teacher, pictures)), 1
            ),
            streams[-1],
            student,
        )
    product = projection.double().T @ projection.double()
    values = torch.linalg.eigvalsh(product)
    assert projection.shape == (16, 32)
    assert torch.allclose(values[-15:], torch.ones(15, dtype=torch.float64), atol=1e-5), (
        "15 directions, unscaled"
    )
    assert projection.sum(0).abs().max() < 1e-5, "a LayerNorm takes the mean out"


@torch.no_grad()
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_what_the_classifier_reads_is_kept_before_all_else(pool: str) -> None:
    teacher, student = (
        vit(32, global_pool=pool, fc_norm=False),
        vit(16, global_pool=pool, fc_norm=False),
    )
    pictures = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    streams = teacher_streams(teacher, embedded_as(student, teacher, pictures))

    read = read_by_classifier(teacher, streams[-1], 7).float()
    kept, plain = (
        projection_of(moment_of(streams, 1), streams[-1], student, reader)
        for reader in (teacher, None)
    )
    assert (
        (read - kept.T @ kept @ read).abs().max()
        < 1e-2
        < (read - plain.T @ plain @ read).abs().max()
    )


def test_the_teacher_is_measured_once_for_each_patch_grid() -> None:
    teacher, pictures = vit(32), torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    measured = MeasuredTeacher(teacher, pictures, Preprocess(32, (0.5,) * 3, (0.5,) * 3))
    with torch.no_grad():
        measured.see_as(vit(16), (32, 32))
        last, block = measured.last, measured.block(1, vit(16))
        measured.see_as(vit(24), (32, 32))
        assert measured.last is last and measured.block(1, vit(24)) is block
        assert (
            measured.projection(vit(16))
            is measured.projection(vit(16, depth=1))
            is not measured.projection(vit(24))
        )
        measured.see_as(vit(16, patch_size=16), (32, 32))
    assert measured.last is not last and measured.last.shape[1] == 5


def test_heads_of_the_same_number_and_size_give_the_same_products() -> None:
    g = torch.Generator().manual_seed(0)
    qkv, out = torch.randn(2, 50, 24, generator=g), torch.randn(2, 50, 8, generator=g)
    write = torch.randn(6, 8, generator=g)
    found, _ = head_map(qkv, out, write, (2, 2), (4, 4))
    mapped = (qkv @ found.T).reshape(2, 50, 3, 2, 4)
    own = qkv.reshape(2, 50, 3, 2, 4)
    centred = own[:, :, 1] - own[:, :, 1].flatten(0, 1).mean(
        0
    )  # a softmax does not see a shift of all keys
    keys = mapped[:, :, 1] - mapped[:, :, 1].flatten(0, 1).mean(0)
    wanted = torch.einsum("nihd,njhd->nhij", own[:, :, 0], centred)
    assert torch.allclose(torch.einsum("nihd,njhd->nhij", mapped[:, :, 0], keys), wanted, atol=1e-3)


def test_freezing_leaves_a_gradient_to_the_classifier_alone() -> None:
    model = vit()
    assert freeze_backbone(model, "vit") == ("head",)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "head.weight",
        "head.bias",
    }
    with pytest.raises(UserError, match="nothing is left to train"):
        freeze_backbone(vit(num_classes=0), "vit")


@torch.no_grad()
def test_a_fit_in_parts_is_the_fit_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(40, 4, width, generator=generator) + torch.arange(40.0)[:, None, None]
        for width in (6, 3)
    )
    weight, shares = torch.randn(3, 6, generator=generator), torch.tensor([3.0, 1.0, 1.0, 1.0])
    whole, parts = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    fit(whole, [(x, y)], weight, shares)
    fit(parts, zip(x.split(16), y.split(16), strict=True), weight, shares)
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_large_sample_is_fitted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part decides which heads and units are kept; here it alone would do as well as the whole."""
    pictures = torch.randint(
        256, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    teacher, prepare, found = vit(32), Preprocess(32, (0.5,) * 3, (0.5,) * 3), []
    for size in (40, 16):
        for module in (layers, measured, start):
            monkeypatch.setattr(module, "GUIDE", size)
        inherit_together([(student := vit(16), prepare)], teacher, pictures, prepare)
        found.append(student(prepare(pictures)).flatten())
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.9

"""The teacher's residual stream, and how it maps onto the student's."""

import pytest
import torch

from kd.distill.inherit.stream import (
    chosen_blocks,
    embedded_as,
    moment_of,
    projection_of,
    read_by_classifier,
    seen_by_norms,
    teacher_streams,
)
from tests.distill.inherit._vits import small_vit as vit


def test_blocks_are_spaced_evenly_and_end_with_the_last() -> None:
    assert chosen_blocks(vit(depth=2), vit(depth=6)) == [2, 5]
    assert chosen_blocks(vit(depth=3), vit(depth=3)) == [0, 1, 2]


def test_the_stream_is_the_teachers_own() -> None:
    """What is fitted is what timm computes: the stream before the first block and after each."""
    teacher = vit(32, depth=2)
    pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        streams = teacher_streams(teacher, embedded_as(vit(16), teacher, pictures), None)
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
                streams := teacher_streams(teacher, embedded_as(student, teacher, pictures), None),
                1,
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
    streams = teacher_streams(teacher, embedded_as(student, teacher, pictures), None)

    read = read_by_classifier(teacher, streams[-1], 7).float()
    louder = streams[-1] * torch.arange(1, 65)[:, None, None]
    first, again = (read_by_classifier(teacher, each, 1) for each in (streams[-1], louder))
    torch.testing.assert_close(again @ again.T, first @ first.T, atol=1e-4, rtol=0)
    kept, plain = (
        projection_of(moment_of(streams, 1), streams[-1], student, reader)
        for reader in (teacher, None)
    )
    assert (
        (read - kept.T @ kept @ read).abs().max()
        < 1e-2
        < (read - plain.T @ plain @ read).abs().max()
    )

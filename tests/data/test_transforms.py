"""Damaged views of validation pictures."""

import pytest
import torch

from kd.data.transforms import CORRUPTIONS, STRENGTHS, Corrupted


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_damage_grows_with_its_strength(name: str) -> None:
    pictures = torch.randint(
        0, 256, (2, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    damaged = [next(iter(Corrupted([{"image": pictures}], name, s)))["image"] for s in STRENGTHS]  # type: ignore[list-item, typeddict-item]
    away = [(d.float() - pictures.float()).square().mean() for d in damaged]
    assert all(d.dtype == torch.uint8 and d.shape == pictures.shape for d in damaged)
    assert 0 < away[0] < away[1] < away[2]

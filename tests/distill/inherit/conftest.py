"""A sample for the tests of the inherited start."""

import pytest
import torch


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    return torch.randint(
        0, 256, (128, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )

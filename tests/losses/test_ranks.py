"""Batches of all processes together."""

import torch

from kd.losses.ranks import in_parallel, of_all_ranks, own_rows, without_gather


def test_one_process_compares_its_own_batch() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert not in_parallel()
    assert of_all_ranks(x)[0] is x
    assert own_rows(3) == slice(0, 3)
    with without_gather():
        assert not in_parallel()

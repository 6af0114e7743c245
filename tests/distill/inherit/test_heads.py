"""Attention heads of another size."""

import torch

from kd.distill.inherit.heads import Heads, map_heads


def test_heads_of_the_same_number_and_size_give_the_same_products() -> None:
    g = torch.Generator().manual_seed(0)
    qkv, out = torch.randn(2, 50, 24, generator=g), torch.randn(2, 50, 8, generator=g)
    write = torch.randn(6, 8, generator=g)
    found, _ = map_heads(qkv, out, write, Heads(2, 4), Heads(2, 4))
    mapped = (qkv @ found.T).reshape(2, 50, 3, 2, 4)
    own = qkv.reshape(2, 50, 3, 2, 4)
    centred = own[:, :, 1] - own[:, :, 1].flatten(0, 1).mean(
        0
    )  # a softmax does not see a shift of all keys
    keys = mapped[:, :, 1] - mapped[:, :, 1].flatten(0, 1).mean(0)
    wanted = torch.einsum("nihd,njhd->nhij", own[:, :, 0], centred)
    assert torch.allclose(torch.einsum("nihd,njhd->nhij", mapped[:, :, 0], keys), wanted, atol=1e-3)

"""The graph that is exported: the student with its preprocessing."""

import torch
from torch import nn

from kd.models import Preprocess
from kd.ship.export.prepared import Prepared


def test_the_graph_scales_and_normalises_as_training_does() -> None:
    preprocess = Preprocess(8, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    pictures = torch.randint(256, (2, 3, 16, 12), dtype=torch.uint8)
    given = pictures.permute(0, 2, 3, 1)
    found = Prepared(nn.Identity(), preprocess, (16, 12))(given)
    assert found.shape == (2, 3, 8, 8)
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    assert ((found - preprocess(pictures)) * std).abs().max() < 2 / 255, (
        "two roundings of a picture's value"
    )
    as_it_is = Prepared(
        nn.Identity(), Preprocess((16, 12), [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]), (16, 12)
    )
    torch.testing.assert_close(as_it_is(given), (pictures / 255 - mean) / std, rtol=1e-4, atol=1e-5)

"""Records of answers: rounding and its errors."""

import torch

from kd.teachers.answer_codec import HalfFeature, half, relative_error, worst_error


def test_half_precision_keeps_what_is_too_large_as_its_largest() -> None:
    assert half(torch.tensor([1e9, -1e9, 1.5])).tolist() == [65504, -65504, 1.5]
    codec, x = HalfFeature((3, 2)), torch.randn(4, 3, 2)
    records = codec.encode(x)
    assert (records.shape, records.dtype, codec.bytes) == ((4, 12), torch.uint8, 12)
    torch.testing.assert_close(codec.decode(records), x, rtol=2**-11, atol=1e-6)


def test_relative_error() -> None:
    assert relative_error(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])) == 1.0


def test_worst_error() -> None:
    assert (
        worst_error(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        == 1.0
    )

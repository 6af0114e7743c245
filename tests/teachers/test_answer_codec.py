"""Records of answers, and their rounding."""

import torch

from kd.teachers.answer_codec import Half, half


def test_half_precision_keeps_what_is_too_large_as_its_largest() -> None:
    assert half(torch.tensor([1e9, -1e9, 1.5])).tolist() == [65504, -65504, 1.5]
    codec, x = Half((3, 2)), torch.randn(4, 3, 2)
    records = codec.encode(x)
    assert (records.shape, records.dtype, codec.record_bytes) == ((4, 16), torch.uint8, 16)
    torch.testing.assert_close(codec.decode(records), x, rtol=2**-11, atol=1e-6)

"""Values as the annotation of what they are passed to wants them."""

from kd.run.build import made


def test_made() -> None:
    assert made(int | tuple[int, int], [24, 32], "data.img_size") == (24, 32)
    assert made(float | None, 1, "data.source.cache_gb") == 1.0

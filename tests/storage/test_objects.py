"""Names of files in an object store."""

from kd.storage.objects import is_url, size_in


def test_is_url() -> None:
    assert is_url("s3://bucket/food")
    assert not is_url("/data/food")


def test_size_in() -> None:
    assert size_in("1024-0123456789abcdef") == 1024

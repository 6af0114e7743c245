"""Helpers that are pure functions, one call each."""

from kd.storage.elsewhere import plain_name, yaml_of
from kd.storage.objects import is_url, size_in
from kd.storage.run_urls import on_disk


def test_yaml_of() -> None:
    assert yaml_of("{a: [1, x]}") == {"a": [1, "x"]}


def test_plain_name() -> None:
    assert plain_name("003", "latest") == "003"


def test_is_url() -> None:
    assert is_url("s3://bucket/food")
    assert not is_url("/data/food")


def test_size_in() -> None:
    assert size_in("1024-0123456789abcdef") == 1024


def test_on_disk() -> None:
    assert on_disk("runs/food").as_posix() == "runs/food"

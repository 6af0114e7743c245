"""Helpers that are pure functions, one call each."""

from pathlib import Path

import pytest

from kd.storage.elsewhere import mapping_of, plain_name, yaml_of
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


@pytest.mark.parametrize("text", [None, "", "[1]", '"a"', "{", "\xff"])
def test_mapping_of(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    assert mapping_of(file) == {}
    file.write_text('{"a": 1}')
    assert mapping_of(file) == {"a": 1}

"""What all sources share."""

from pathlib import Path

import pytest
from PIL import Image

from kd.data.sources.base import cache_bytes_of, fingerprint, identity, split_facts
from kd.data.sources.files import FileSplit


def picture(path: Path, size: tuple[int, int] = (8, 6), color: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def test_the_identity_of_a_split_follows_labels_and_content_not_the_folder(tmp_path: Path) -> None:
    here = FileSplit([picture(tmp_path / "a" / "x.png")], [0])
    there = FileSplit([picture(tmp_path / "b" / "x.png")], [0])
    assert identity(here) == identity(there)
    assert fingerprint(here) != fingerprint(there)
    assert identity(FileSplit(here.paths, [1])) != identity(here)
    assert split_facts(FileSplit(here.paths, [1])).content == split_facts(here).content, (
        "whatever the labels"
    )


@pytest.mark.parametrize("given", [0, -1])
def test_a_bound_of_the_local_cache_is_positive(given: float) -> None:
    assert cache_bytes_of(None) is None
    assert cache_bytes_of(0.5) == 500_000_000
    with pytest.raises(ValueError, match="cache_gb must be > 0"):
        cache_bytes_of(given)

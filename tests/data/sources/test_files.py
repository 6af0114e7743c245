"""Splits of files."""

from pathlib import Path

from kd.data.sources.base import Subset
from kd.data.sources.files import FileSplit
from tests._helpers import draw_picture


def test_a_split_of_files_knows_sizes_stamps_and_a_subset_keeps_them(tmp_path: Path) -> None:
    paths = [draw_picture(tmp_path / f"{i}.png", (8 + i, 8)) for i in range(3)]
    split = FileSplit(paths, [0, 1, 0])
    some = Subset(split, [2, 0])
    assert some.targets == [0, 0]
    assert some.name(0) == str(paths[2])
    assert some.read(0) == paths[2].read_bytes()
    assert split.stamp(0).startswith(f"{paths[0].stat().st_size}\0")
    assert FileSplit(["none"], [0]).stamp(0) == ""
    assert some.stamp(0) == split.stamp(2) != split.stamp(0)

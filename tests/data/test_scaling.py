"""What a run holds of its pictures, and how often it asks for their files, as counts."""

import pickle
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kd.data import scan
from kd.data.sources import FileSplit, Joined, Subset, arrays
from kd.data.sources.arrays import Column, Names
from kd.data.sources.base import split_facts
from kd.data.sources.places import stamp_of_file

COUNT = 5000


def split_of(count: int = COUNT) -> FileSplit:
    names = (f"/data/train/n{i % 50:08d}/n{i % 50:08d}_{i}.JPEG" for i in range(count))
    return FileSplit(names, np.arange(count) % 50)


def test_a_picture_takes_few_bytes_which_processes_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path))
    monkeypatch.setattr(arrays, "SHARED", 1000)
    split, other = split_of(), split_of()
    names = [split.name(i) for i in range(COUNT)]
    parts = (split.paths.names, split.paths.ends, split.paths.folder_of, split.targets.values)  # type: ignore[attr-defined]
    assert sum(part.nbytes for part in parts) < 40 * COUNT
    split.share()
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "lists").iterdir()}
    other.share()
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "lists").iterdir()} == files
    assert isinstance(other.paths.names, np.memmap)
    assert (
        [other.name(i) for i in range(COUNT)]
        == names
        == list(pickle.loads(pickle.dumps(split)).paths)
    )
    assert other.targets == split_of().targets


def test_arrays_read_as_lists_do(tmp_path: Path) -> None:
    paths = ["a.jpg", "b/c.jpg", "s3://x/y/z.png", "/caf\udce9/\ud800.jpg", "b/d.jpg"]
    assert Names(paths) == paths
    assert (Names(paths)[-1], len(Names([]))) == ("b/d.jpg", 0)
    numbers = Column(np.array([[1.5, np.nan], [2.0, 3.0]]))
    assert numbers[1] == [2.0, 3.0]
    split = FileSplit(paths, [0, 1, 2, 3, 4])
    assert type(split.targets[2]) is int
    with pytest.raises(IndexError):
        split.targets[5]
    joined = Joined(Subset(split, [4, 2]), FileSplit(["u.jpg"], [-1]))
    assert (joined.targets == [4, 2, -1], [joined.name(i) for i in range(3)]) == (
        True,
        ["b/d.jpg", paths[2], "u.jpg"],
    )
    assert Joined(FileSplit(["a"], [[1]]), FileSplit(["b"], [-1])).targets == [[1], -1]


def test_one_process_of_a_machine_asks_for_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path))
    monkeypatch.setattr(scan, "FACTS_SHARED", 10)
    asked: Counter[str] = Counter()

    def count(file: str) -> str:
        asked[file] += 1
        return stamp_of_file(file)

    monkeypatch.setattr("kd.data.sources.files.stamp_of_file", count)
    begun = time.time()
    first = scan.facts_of_machine(split_of(50), begun)
    assert scan.facts_of_machine(split_of(50), begun) == first  # another process
    assert (len(asked), {*asked.values()}) == (50, {1})
    assert scan.facts_of_machine(split_of(50), time.time()) == first == split_facts(split_of(50))
    assert {*asked.values()} == {3}, "a later run asks anew"


def test_pictures_wait_for_their_check_in_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path))
    monkeypatch.setattr(scan, "WINDOW", 7)
    found = scan.scan(split_of(50), "train", "headers")
    assert [*found.damaged] == list(range(50))
    assert found.digests == []

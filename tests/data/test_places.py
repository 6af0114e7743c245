"""Names of places and lists: folders, URLs, patterns of shards."""

from pathlib import Path

from kd.data.sources.places import folder_here, joined, list_at, pictures_below
from kd.data.sources.webdataset import braces
from tests._helpers import refuses


def test_a_path_below_another_one_in_its_shortest_form() -> None:
    assert joined("/data/food", "../train", "a.jpg") == str(Path("/data/food/../train/a.jpg"))
    assert joined("/lists", "s3://food/a.jpg") == "s3://food/a.jpg"
    assert folder_here("/data/", "data.source.root") == "/data"


def test_lists_and_pictures_of_a_disk(tmp_path: Path) -> None:
    for name in ("b.JPG", "a/c.png", "notes.txt", ".hidden.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found, others = pictures_below(str(tmp_path))
    assert sorted(Path(file).name for file in found) == ["b.JPG", "c.png"]
    assert others == {".txt": 1}
    assert list_at(str(tmp_path / "notes.txt"), "data.source.train") == b"x"
    with refuses(r"data.source.train: /.*/none.csv not found"):
        list_at(str(tmp_path / "none.csv"), "data.source.train")


def test_a_list_that_is_not_read_is_refused_by_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    with file.open("wb") as sparse:
        sparse.truncate(2**30 + 1)
    with refuses(r"^data.source.train: /.*/train.csv can't be read: has"):
        list_at(str(file), "data.source.train")


def test_a_pattern_of_too_many_shards_is_refused() -> None:
    with refuses("data.source.train: .* at most 1,000,000 shards"):
        braces("{0..999}{0..999}{0..999}", "data.source.train")

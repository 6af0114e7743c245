"""Tables of paths and labels."""

from pathlib import Path

import pytest

from kd.data.sources.labels import in_order
from kd.data.sources.manifest import Manifest, words_that_read
from tests._helpers import draw_picture, refuses


def test_a_manifest_orders_its_classes_by_value_and_names_an_unknown_label(tmp_path: Path) -> None:
    draw_picture(tmp_path / "1.png")
    (tmp_path / "train.csv").write_text("path,label\n1.png,10\n2.png,9\n")
    (tmp_path / "val.csv").write_text("path,label\n1.png,8\n")
    source = Manifest(str(tmp_path / "train.csv"), str(tmp_path / "val.csv"))
    assert source.load("train").targets == [1, 0]
    assert source.classes == in_order(["9", "10"]) == ["9", "10"]
    with refuses(r"data.source.val: 1 label not in the training pictures: '8'"):
        source.load("val")
    with pytest.raises(ValueError, match="delimiter must be one character"):
        Manifest("a.csv", delimiter="ab")


def test_rows_of_a_picture_are_joined_where_one_has_a_part_of_the_labels(tmp_path: Path) -> None:
    """The picture stayed twice, once without a label that it has."""
    (tmp_path / "train.csv").write_text("path,label\n1.png,a;b\n1.png,a\n2.png,b\n")
    split = Manifest(str(tmp_path / "train.csv"), multi_label=True).load("train")
    assert split.targets == [[0, 1], [1]]
    assert split.paths == [str(tmp_path / name) for name in ("1.png", "2.png")]


def test_a_table_beside_pictures_names_their_folder_and_the_columns(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    pictures = tmp_path / "images"
    draw_picture(pictures / "a1.png")
    folders = [str(tmp_path), str(pictures)]
    start = f"data.source={table} data.source.image_dir={pictures}"
    id_ends, ends = "data.source.path_column=id data.source", "data.source.ending=.png"
    found = {
        "id,breed\na1,pug\n": f"{start} {id_ends}.label_column=breed {ends}",
        "path,label\na1.png,pug\n": start,
        "breed,image,year\npug,a1,2020\n": f"{start} data.source.path_column=image data.source.label_column=NAME {ends}",
        "path,label\nb1.png,pug\n": f"data.source={table} data.source.image_dir=FOLDER",
        "": f"data.source={table} data.source.image_dir=FOLDER",
    }
    for text, words in found.items():
        table.write_text(text)
        assert words_that_read(str(table), folders) == words


def test_several_labels_of_which_no_cell_has_two_are_doubted(tmp_path: Path) -> None:
    for name in "ab":
        draw_picture(tmp_path / f"{name}.png")
    for cells, doubted in (("red|round", True), ("red;round", False)):
        (tmp_path / "train.csv").write_text(f"path,label\na.png,{cells}\nb.png,red\n")
        source = Manifest(str(tmp_path / "train.csv"), multi_label=True)
        source.load("train")
        assert any("no picture has two labels" in note for note in source.notes) is doubted

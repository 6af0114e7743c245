"""A table beside a folder of pictures, as competitions have it."""

from pathlib import Path

import pytest

from kd.data.sources import Manifest
from kd.data.splits import Splits
from kd.errors import UserError
from kd.settings import DataSettings
from tests._helpers import draw_folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """``train.csv`` with the columns ``id`` and ``kind``, and pictures in ``images/train/<class>/``."""
    draw_folder(tmp_path / "images", train=2, val=1)
    files = sorted((tmp_path / "images" / "train").rglob("*.*"))
    rows = [f"{file.relative_to(tmp_path / 'images')},{file.parent.name}" for file in files]
    (tmp_path / "train.csv").write_text("\n".join(["id,kind", *rows]))
    return tmp_path / "train.csv"


def test_a_table_beside_a_folder_of_pictures(table: Path) -> None:
    columns = {"path_column": "id", "label_column": "kind"}
    source = Manifest(str(table), image_dir=str(table.parent / "images"), **columns)  # type: ignore[arg-type]
    split = source.load("train")
    assert len(split.targets) == len(table.read_text().splitlines()) - 1
    assert Path(split.paths[0]).is_file()


def test_paths_that_start_elsewhere_are_no_damaged_pictures(table: Path) -> None:
    source = Manifest(str(table), path_column="id", label_column="kind")
    count = len(table.read_text().splitlines()) - 1
    with pytest.raises(UserError) as raised:
        Splits(source, DataSettings()).split("train")
    message = str(raised.value)
    assert f"none of the {count} files exists: paths start at {table.parent}/train " in message
    assert "data.source.image_dir=FOLDER" in message


def test_ids_without_an_ending(table: Path) -> None:
    text = table.read_text()
    for ending in (".png", ".jpg"):
        text = text.replace(f"{ending},", ",")
    table.write_text(text)
    source = Manifest(
        str(table), image_dir=str(table.parent / "images"), path_column="id", label_column="kind"
    )
    with pytest.raises(UserError, match="there is .*: the list's paths need their endings"):
        Splits(source, DataSettings()).split("train")

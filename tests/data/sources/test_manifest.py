"""Tables of paths and labels."""

from pathlib import Path

import pytest
from PIL import Image

from kd.data.sources.labels import in_order
from kd.data.sources.manifest import Manifest
from kd.errors import UserError


def picture(path: Path, size: tuple[int, int] = (8, 6), color: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def test_a_manifest_orders_its_classes_by_value_and_names_an_unknown_label(tmp_path: Path) -> None:
    picture(tmp_path / "1.png")
    (tmp_path / "train.csv").write_text("path,label\n1.png,10\n2.png,9\n")
    (tmp_path / "val.csv").write_text("path,label\n1.png,8\n")
    source = Manifest(str(tmp_path / "train.csv"), str(tmp_path / "val.csv"))
    assert source.load("train").targets == [1, 0]
    assert source.classes == in_order(["9", "10"]) == ["9", "10"]
    with pytest.raises(
        UserError, match=r"data.source.val: 1 label not in the training pictures: '8'"
    ):
        source.load("val")
    with pytest.raises(ValueError, match="delimiter must be one character"):
        Manifest("a.csv", delimiter="ab")

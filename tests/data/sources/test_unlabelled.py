"""Folders of pictures without labels."""

from pathlib import Path

import pytest
from PIL import Image

from kd.data.sources.unlabelled import Pictures


@pytest.mark.parametrize("folder", ["test", "Testing", "val"])
def test_test_pictures_below_a_folder_to_train_on_are_left_out(tmp_path: Path, folder: str) -> None:
    for name in ("train", folder):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 6)).save(tmp_path / name / "1.png")
    source = Pictures(str(tmp_path))
    assert source.load("train").paths == [str(tmp_path / "train" / "1.png")]
    (note,) = source.notes
    assert note.startswith("data.source.root: 1 of 2 pictures are left out")
    assert f"({folder})" in note
    both = Pictures(str(tmp_path / "train"), val=str(tmp_path))
    both.load("train")
    assert both.load("val").paths == [str(tmp_path / folder / "1.png")]

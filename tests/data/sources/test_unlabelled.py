"""Folders of pictures without labels."""

from pathlib import Path

import pytest
from PIL import Image

from kd.data.sources.unlabelled import Pictures


@pytest.mark.parametrize("folder", ["test", "Testing", "val"])
def test_training_pictures_below_a_folder_to_validate_with_are_left_out(
    tmp_path: Path, folder: str
) -> None:
    for name in ("train", folder):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 6)).save(tmp_path / name / "1.png")
    both = Pictures(str(tmp_path / "train"), val=str(tmp_path))
    both.load("train")
    assert both.load("val").paths == [str(tmp_path / folder / "1.png")]

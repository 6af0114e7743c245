"""Folders of pictures without labels."""

from pathlib import Path

import pytest
from PIL import Image

from kd.data.sources.unlabelled import Pictures


@pytest.mark.parametrize("folder", ["test", "Testing", "val"])
def test_test_pictures_below_a_folder_to_train_on_are_doubted(tmp_path: Path, folder: str) -> None:
    for name in ("train", folder):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 6)).save(tmp_path / name / "1.png")
    source = Pictures(str(tmp_path))
    assert len(source.load("train").targets) == 2
    (note,) = source.notes
    assert note.startswith(f"warning: all pictures below {tmp_path} are trained on")
    assert folder in note
    training_alone = Pictures(str(tmp_path / "train"), val=str(tmp_path))
    training_alone.load("train")
    training_alone.load("val")
    assert training_alone.notes == []

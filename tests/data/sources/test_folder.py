"""A folder for each class."""

from pathlib import Path

import pytest
from PIL import Image

from kd.data.sources.folder import ImageFolder, class_folders, labelled_folder
from kd.errors import UserError


def picture(path: Path, size: tuple[int, int] = (8, 6), color: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def test_class_folders_are_sorted_and_hidden_ones_left_out(tmp_path: Path) -> None:
    for name in ("b", "a", ".cache"):
        picture(tmp_path / name / "1.png")
    assert class_folders(str(tmp_path), "data.source.root") == ["a", "b"]
    split = labelled_folder(str(tmp_path), ["a", "b"], "data.source.root")
    assert split.targets == [0, 1]
    with pytest.raises(
        UserError, match="data.source.root: 1 label not in the training pictures: 'b'"
    ):
        labelled_folder(str(tmp_path), ["a"], "data.source.root")
    with pytest.raises(UserError, match="data.source.root: there is no folder"):
        class_folders(str(tmp_path / "none"), "data.source.root")


@pytest.mark.parametrize("folder", ["val", "valid", "validation", "test"])
def test_validation_folders_by_their_usual_names(tmp_path: Path, folder: str) -> None:
    picture(tmp_path / "train" / "a" / "1.png")
    picture(tmp_path / folder / "a" / "2.png")
    source = ImageFolder(str(tmp_path))
    assert source.has("val")
    assert len(source.load("val").targets) == 1


def test_a_flat_folder_is_the_training_split(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / name / "1.png")
    source = ImageFolder(str(tmp_path))
    assert not source.has("val")
    assert source.load("train").targets == [0, 1]

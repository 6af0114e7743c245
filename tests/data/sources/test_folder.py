"""A folder for each class."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kd.data.sources.folder import ImageFolder, class_folders, labelled_folder
from kd.data.sources.manifest import Manifest
from kd.data.sources.segmentation import SegmentationFolder
from kd.data.splits import load_probe
from kd.errors import UserError
from kd.settings import Probe
from tests._helpers import draw_picture, refuses


def test_class_folders_are_sorted_and_hidden_ones_left_out(tmp_path: Path) -> None:
    for name in ("b", "a", ".cache"):
        draw_picture(tmp_path / name / "1.png")
    assert class_folders(str(tmp_path), "data.source.root") == ["a", "b"]
    split = labelled_folder(str(tmp_path), ["Z", "a", "b"], "data.source.root")
    assert split.targets == [1, 2], "a split may lack a class"
    with refuses("data.source.root: 1 label not in the training pictures: 'b'"):
        labelled_folder(str(tmp_path), ["a"], "data.source.root")
    with refuses("data.source.root: folder .* not found"):
        class_folders(str(tmp_path / "none"), "data.source.root")


def test_pictures_without_class_folders_are_named(tmp_path: Path) -> None:
    draw_picture(tmp_path / "1.png")
    with refuses(r"no class folders in .*foundation_vit takes pictures"):
        ImageFolder(str(tmp_path)).load("train")
    (tmp_path / "a").mkdir()
    with refuses("data.source.root: no pictures below"):
        ImageFolder(str(tmp_path)).load("train")


@pytest.mark.parametrize(
    "names",
    [
        ("entrenamiento", "prueba"),
        ("训练集", "测试集"),
        ("fold0", "fold1", "fold2"),
        ("part1", "part2"),
    ],
    ids="/".join,
)
def test_splits_whose_names_are_unknown_are_not_taken_for_classes(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Folders that hold the same folders: refused with the keys that say what they are, which then count."""
    for name in names:
        for label in ("cat", "dog"):
            draw_picture(tmp_path / name / label / "1.png")
    with refuses(
        r"may be splits or classes; data.source.train=NAME data.source.val=NAME name splits"
    ):
        ImageFolder(str(tmp_path)).load("train")
    named = ImageFolder(str(tmp_path), train=names[0], val=names[1])
    assert (named.load("train").targets, named.classes) == ([0, 1], ["cat", "dog"])
    assert named.load("val").targets == [0, 1]
    as_classes = ImageFolder(str(tmp_path), train=".")
    as_classes.load("train")
    assert as_classes.classes == sorted(names)


def test_classes_with_folders_below_them_stay_classes(tmp_path: Path) -> None:
    """One folder of the same name in each, or other folders in each."""
    for place in ("cat/images", "dog/images", "owl/2023", "owl/2024"):
        draw_picture(tmp_path / place / "1.png")
    source = ImageFolder(str(tmp_path))
    source.load("train")
    assert source.classes == ["cat", "dog", "owl"]


@pytest.mark.parametrize(("make", "remedy"), [
    (lambda root: ImageFolder(root), "data.source.val=NAME says which"),
    (lambda root: load_probe(Probe(root=root)), "rename or move all but one"),
    (lambda root: SegmentationFolder(root, ["a", "b"], images=".", masks="."), "rename or move all but one"),
])  # fmt: skip
def test_two_folders_of_one_split_name_a_remedy_that_there_is(
    make: Callable[[str], Any], remedy: str, tmp_path: Path
) -> None:
    for split in ("train", "Valid", "val_set"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / split / name / "1.png")
    with refuses(rf"could be val: Valid, val_set; {remedy}"):
        make(str(tmp_path)).has("val")


@pytest.mark.parametrize("lone", ["train", "test"])
def test_a_split_among_classes_is_doubted_and_the_key_decides(lone: str, tmp_path: Path) -> None:
    """``train`` may be a class of vehicles; beside another split it is none."""
    for name in ("bus", lone):
        draw_picture(tmp_path / name / "1.png")
    with refuses(f"{lone}, bus in .* may be splits or classes; .*train=. cl"):
        ImageFolder(str(tmp_path)).load("train")
    source = ImageFolder(str(tmp_path), train=".")
    assert len(source.load("train").targets) == 2
    assert source.classes == sorted(["bus", lone])


def test_a_folder_with_a_table_names_it_with_its_keys(tmp_path: Path) -> None:
    """As Kaggle's archives unpack."""
    draw_picture(tmp_path / "train_images" / "1.png")
    (tmp_path / "train.csv").write_text("id,breed\n1,a\n")
    with refuses(rf"data.source={tmp_path}/train.csv data.source.image_dir="):
        ImageFolder(str(tmp_path)).load("train")


def test_a_table_beside_one_folder_of_pictures_names_its_words(tmp_path: Path) -> None:
    """``images/`` is no class: the words of the message read the table."""
    for name in ("1", "2"):
        draw_picture(tmp_path / "images" / f"{name}.png")
    (tmp_path / "labels.csv").write_text("file,breed\n1.png,a\n2.png,b\n")
    words = (
        f"one class folder ('images') in {tmp_path}, but tables in {tmp_path}: data.source={tmp_path}/labels.csv "
        f"data.source.image_dir={tmp_path}/images data.source.path_column=file data.source.label_column=breed reads"
    )
    with pytest.raises(UserError) as raised:
        ImageFolder(str(tmp_path)).load("train")
    assert words in str(raised.value)
    read = Manifest(
        f"{tmp_path}/labels.csv",
        image_dir=f"{tmp_path}/images",
        path_column="file",
        label_column="breed",
    )
    assert read.load("train").targets == [0, 1]


def test_validation_pictures_alone_name_the_key(tmp_path: Path) -> None:
    draw_picture(tmp_path / "val" / "a" / "1.png")
    with refuses(r"has val; data.source.train=NAME names another"):
        ImageFolder(str(tmp_path)).load("train")
    assert len(ImageFolder(str(tmp_path), train="val").load("train").targets) == 1


def test_an_archive_that_holds_a_folder_twice_and_flat_test_pictures(tmp_path: Path) -> None:
    draw_picture(tmp_path / "seg_train" / "seg_train" / "a" / "1.png")
    draw_picture(tmp_path / "seg_test" / "1.png")
    source = ImageFolder(str(tmp_path))
    assert len(source.load("train").targets) == 1
    assert not source.has("val")
    assert source.notes == ["folders beside the splits are not read: seg_test"]

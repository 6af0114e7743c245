"""Pictures with boxes, in the layouts of Pascal VOC and of YOLO."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from kd.data.box_layouts import has_boxes
from kd.data.boxes import boxes_below
from kd.errors import UserError

Boxes = Sequence[tuple[str, float, float, float, float]]
"""Name of the class, left, top, right and bottom in pixels."""


def draw(file: Path, width: int = 40, height: int = 20) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (255, 0, 0)).save(file)


def voc(root: Path, pictures: dict[str, Boxes], lists: dict[str, str]) -> Path:
    """A folder of VOC's: the boxes of each picture, and the names in each list."""
    for name, boxes in pictures.items():
        draw(root / "JPEGImages" / f"{name}.png")
        things = ""
        for kind, left, top, right, bottom in boxes:
            sides = (
                f"<xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
            )
            things += f"<object><name>{kind}</name><bndbox>{sides}</bndbox></object>"
        file = root / "Annotations" / f"{name}.xml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"<annotation>{things}</annotation>")
    for split, names in lists.items():
        file = root / "ImageSets" / "Main" / f"{split}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{name}\n" for name in names.split()))
    return root


def yolo(root: Path, names: str, splits: dict[str, dict[str, str]]) -> Path:
    """A folder of YOLO's: the text of each picture's labels."""
    for split, pictures in splits.items():
        for name, text in pictures.items():
            draw(root / "images" / split / f"{name}.jpg")
            file = root / "labels" / split / f"{name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    (root / "data.yaml").write_text(names)
    return root


CELL = ("cell", 4, 2, 24, 12)


def test_voc_is_read_as_it_is_written(tmp_path: Path) -> None:
    """In a subfolder, too; empty boxes are left out, and the test split judges what trainval has trained."""
    plate = ("plate", 0, 0, 8, 8)
    boxes = {"a": [CELL, plate], "b": [("cell", 5, 5, 5, 9)], "c": [plate]}
    voc(tmp_path / "inner", boxes, {"trainval": "a b", "train": "a", "test": "c"})
    assert has_boxes(tmp_path)
    folder = boxes_below(tmp_path, "pays")
    assert folder.kinds == ["cell", "plate"]
    assert [len(folder.train), len(folder.judged)] == [2, 1]
    picture, target = folder.train[0]
    assert picture.shape == (3, 20, 40)
    assert picture.max() == 1
    assert target["boxes"].tolist() == [[4, 2, 24, 12], [0, 0, 8, 8]]
    assert target["labels"].tolist() == [1, 2]
    assert folder.train[1][1]["boxes"].shape == (0, 4)
    assert folder.judged[0][1]["labels"].tolist() == [2]


def test_voc_without_a_test_split_is_judged_by_val(tmp_path: Path) -> None:
    voc(tmp_path, {"a": [CELL], "b": [CELL], "c": [CELL]}, {"train": "a", "val": "b c"})
    folder = boxes_below(tmp_path, "pays")
    assert [len(folder.train), len(folder.judged)] == [1, 2]


@pytest.mark.parametrize("names", ["names: [hole, crack]", "names: {0: hole, 1: crack}"])
def test_yolo_is_shares_of_the_picture(tmp_path: Path, names: str) -> None:
    """Middle and size; cut off at the edges; a picture without a file of labels has no boxes."""
    labels = "1 0.5 0.5 0.25 0.5\n0 0.05 0.5 0.3 0.2\n\n"
    yolo(tmp_path, names, {"train": {"a": labels, "b": ""}, "val": {"c": "0 0.5 0.5 1 1"}})
    (tmp_path / "labels/train/b.txt").unlink()
    assert has_boxes(tmp_path)
    folder = boxes_below(tmp_path, "pays")
    assert folder.kinds == ["hole", "crack"]
    target = folder.train[0][1]
    assert torch.allclose(target["boxes"], torch.tensor([[15.0, 5, 25, 15], [0, 8, 8, 12]]))
    assert target["labels"].tolist() == [2, 1]
    assert folder.train[1][1]["boxes"].shape == (0, 4)
    assert folder.judged[0][1]["boxes"].tolist() == [[0, 0, 40, 20]]


BOMB = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>'


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("Annotations/a.xml", BOMB, "Annotations/a.xml: boxes can't be read: it declares entities"),
        ("Annotations/a.xml", "<annotation", "Annotations/a.xml: boxes can't be read"),
        ("Annotations/a.xml", "<a><object><name>x</name></object></a>", "boxes can't be read"),
        ("Annotations/a.xml", "<annotation/>", "has no pictures with boxes"),
        ("ImageSets/Main/val.txt", "gone", "picture "),
        ("ImageSets/Main/val.txt", None, "val.txt can't be read"),
    ],
)
def test_damaged_voc_is_one_line(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    voc(tmp_path, {"a": [CELL], "b": [CELL]}, {"train": "a", "val": "b"})
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError) as caught:
        boxes_below(tmp_path, "pays")
    assert str(caught.value).startswith("pays: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        ("names: [hole]", "1 0.5 0.5 0.2 0.2", "must have lines of class, x, y, width and height"),
        ("names: [hole]", "-1 0.5 0.5 0.2 0.2", "must have lines of class"),
        ("names: [hole]", "0 0.5 0.5 0.2", "must have lines of class"),
        ("names: [hole]", "0 a b c d", "must have lines of class"),
        ("names: 3", "0 0.5 0.5 0.2 0.2", "data.yaml: needs 'names'"),
        ("nc: 3", "0 0.5 0.5 0.2 0.2", "data.yaml: needs 'names'"),
        ("names: [", "0 0.5 0.5 0.2 0.2", "data.yaml: can't be read: "),
        ("names: [hole]", "", "has no pictures with boxes"),
    ],
)
def test_damaged_yolo_is_one_line(tmp_path: Path, names: str, labels: str, message: str) -> None:
    yolo(tmp_path, names, {"train": {"a": labels}, "val": {"b": labels}})
    with pytest.raises(UserError) as caught:
        boxes_below(tmp_path, "pays")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_classes_has_no_boxes(pictures: Path) -> None:
    assert not has_boxes(pictures)
    with pytest.raises(UserError, match="has no boxes: neither Annotations/"):
        boxes_below(pictures, "pays")

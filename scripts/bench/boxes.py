"""Pictures with boxes around things, in the layouts of Pascal VOC and of YOLO, for ``detector.py``.

VOC: ``JPEGImages/*.jpg``, ``Annotations/*.xml`` and ``ImageSets/Main/{train,val,trainval,test}.txt``, in the folder or in
a subfolder. YOLO: ``images/{train,val}/*.jpg`` and ``labels/{train,val}/*.txt``, with ``data.yaml``. Pictures may have any
ending of :data:`IMAGE_SUFFIXES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import Tensor
from torch.utils.data import Dataset

from kd.data.pictures import decode
from kd.data.sources.places import IMAGE_SUFFIXES
from kd.errors import UserError, first_line
from kd.storage.elsewhere import bytes_of, text_of, yaml_of

LARGEST_PICTURE = 2**28
"""Bytes of a picture's file; a larger one is not read."""
SIDES = ("xmin", "ymin", "xmax", "ymax")
"""Elements of VOC's ``bndbox``, in the order of :attr:`Box.sides`."""

Sample = tuple[Tensor, dict[str, Tensor]]
"""A picture ``(3, H, W)`` in 0..1, with ``boxes`` ``(N, 4)`` in pixels (left, top, right, bottom) and ``labels`` ``(N,)``
from 1, as torchvision's detectors take them.
"""


@dataclass(frozen=True)
class Box:
    """A box around a thing."""

    kind: str
    """Name of its class."""
    sides: tuple[float, float, float, float]
    """Left, top, right, bottom."""
    relative: bool = False
    """The sides are shares of the picture's width and height; else pixels."""

    def in_pixels(self, height: int, width: int) -> list[float]:
        """[left, top, right, bottom] in pixels of a picture of ``height`` x ``width`` pixels, cut off at its edges.

        A box beside the picture has a right edge that is not right of its left one, or likewise top and bottom.
        """
        left, top, right, bottom = self.sides
        if self.relative:
            left *= width
            right *= width
            top *= height
            bottom *= height
        left = max(left, 0)
        top = max(top, 0)
        right = min(right, width)
        bottom = min(bottom, height)
        return [left, top, right, bottom]


class BoxPictures(Dataset):
    """A split of pictures with boxes.

    Args:
        files: of the pictures.
        boxes: of each picture.
        kinds: names of the classes; their labels begin at 1.
    """

    def __init__(
        self, files: Sequence[Path], boxes: Sequence[list[Box]], kinds: Sequence[str]
    ) -> None:
        """Stores the arguments, which are the class's."""
        self.files = list(files)
        self.boxes = list(boxes)
        self.kinds = list(kinds)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Sample:
        """Picture ``number`` with its boxes; boxes without an area are left out, so there may be none (``(0, 4)``).

        Raises:
            RuntimeError: the picture can't be decoded.
            OSError: its file can't be read, or has more than :data:`LARGEST_PICTURE` bytes.
        """
        pixels_3HW = decode(bytes_of(self.files[number], LARGEST_PICTURE))
        _, height, width = pixels_3HW.shape
        boxes = []
        labels = []
        for box in self.boxes[number]:
            left, top, right, bottom = box.in_pixels(height, width)
            if right > left and bottom > top:  # some sets have empty boxes
                boxes.append([left, top, right, bottom])
                labels.append(1 + self.kinds.index(box.kind))
        target = {
            "boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
        }
        return pixels_3HW / 255, target


@dataclass(frozen=True)
class BoxFolder:
    """A folder of pictures with boxes."""

    kinds: list[str]
    """Names of the classes, sorted; of YOLO in its order."""
    train: BoxPictures
    """What a detector learns from: ``train``; of VOC ``trainval`` where that list and ``test`` are there."""
    judged: BoxPictures
    """What it is judged by: ``test`` of VOC where it is there, else ``val``."""


def boxes_below(folder: Path, key: str) -> BoxFolder:
    """The pictures and boxes of a folder.

    Args:
        folder: in one of the layouts.
        key: the setting that names it, for messages.

    Raises:
        UserError: none of them, no pictures, or annotations that can't be read.
    """
    voc = voc_root(folder)
    if voc is not None:
        return _voc(voc, key)
    if (folder / "images").is_dir() and (folder / "labels").is_dir():
        return _yolo(folder, key)
    raise UserError(
        f"{key}: {folder} has no boxes: neither Annotations/ and ImageSets/ (VOC) nor labels/ and images/ (YOLO)"
    )


def voc_root(folder: Path) -> Path | None:
    """The folder with Pascal VOC's ``Annotations`` and ``ImageSets``: ``folder`` itself, else the first of its subfolders
    by name that has both; None without one.
    """
    for place in (folder, *sorted(folder.glob("*/"))):
        if (place / "Annotations").is_dir() and (place / "ImageSets").is_dir():
            return place
    return None


# -- Pascal VOC ------------------------------------------------------------------------------------------------------
def _voc(root: Path, key: str) -> BoxFolder:
    """The two splits that ``ImageSets/Main`` lists, by the first word of each line; the classes are those of any box.

    They are ``train`` and ``val``; with a list ``test`` they are ``trainval``, or ``train`` where that is missing, and
    ``test``. A UserError names ``key`` and what is missing.
    """
    lists = root / "ImageSets" / "Main"
    names = ("train", "val")
    if (lists / "test.txt").is_file():
        names = ("trainval" if (lists / "trainval.txt").is_file() else "train", "test")
    splits = []
    for name in names:
        words = _text(lists / f"{name}.txt", key).splitlines()
        stems = [word.split()[0] for word in words if word.split()]
        files = [_picture(root / "JPEGImages", stem, key) for stem in stems]
        boxes = [_voc_boxes(root / "Annotations" / f"{stem}.xml", key) for stem in stems]
        splits.append((files, boxes))
    kinds = sorted({box.kind for _, boxes in splits for of_one in boxes for box in of_one})
    return _folder(splits, kinds, root, key)


def _voc_boxes(file: Path, key: str) -> list[Box]:
    """The boxes of one picture's XML, in pixels as they are written there; a UserError names the file and ``key``."""
    text = _text(file, key)
    try:
        if "<!ENTITY" in text:  # an entity may unfold to more than memory holds
            raise ValueError("it declares entities")
        boxes = []
        for thing in ElementTree.fromstring(text).iter("object"):
            left, top, right, bottom = (
                float(thing.findtext(f"bndbox/{side}", "")) for side in SIDES
            )
            boxes.append(Box(thing.findtext("name", ""), (left, top, right, bottom)))
        return boxes
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{key}: {file}: boxes can't be read: {error}") from error


# -- YOLO ------------------------------------------------------------------------------------------------------------
def _yolo(root: Path, key: str) -> BoxFolder:
    """The splits ``train`` and ``val``: the pictures in ``images``, each with the boxes of its file in ``labels``."""
    kinds = _yolo_kinds(root, key)
    splits = []
    for name in ("train", "val"):
        folder = root / "images" / name
        files = sorted(file for file in folder.glob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        boxes = [
            _yolo_boxes(root / "labels" / name / f"{file.stem}.txt", kinds, key) for file in files
        ]
        splits.append((files, boxes))
    return _folder(splits, kinds, root, key)


def _yolo_kinds(root: Path, key: str) -> list[str]:
    """Names of the classes by number, from ``names`` in ``data.yaml``: a list, or a mapping of the numbers from 0.

    Raises:
        UserError: the file can't be read, or has no such names.
    """
    file = root / "data.yaml"
    text = _text(file, key)
    try:
        content = yaml_of(text)
    except ValueError as error:
        raise UserError(f"{key}: {file}: can't be read: {first_line(error)}") from error
    try:
        names = content["names"]
        if isinstance(names, dict):
            names = [names[number] for number in range(len(names))]
        return [str(name) for name in names]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{key}: {file}: needs 'names', the names of the classes") from error


def _yolo_boxes(file: Path, kinds: Sequence[str], key: str) -> list[Box]:
    """The boxes of one picture, as shares of its sides; a picture without a file has none.

    A line is ``CLASS X Y WIDTH HEIGHT``: the class's number from 0, the box's middle and its size as shares (0..1) of the
    picture's width and height.

    Args:
        file: in ``labels``.
        kinds: names of the classes by number.
        key: the setting that names the folder, for messages.

    Raises:
        UserError: another kind of line, or a class without a name.
    """
    if not file.is_file():
        return []
    boxes = []
    for line in _text(file, key).splitlines():
        words = line.split()
        if not words:
            continue
        try:
            number = int(words[0])
            if number < 0:
                raise ValueError("a class's number is not negative")
            kind = kinds[number]
            x, y, width, height = (float(word) for word in words[1:])
        except (ValueError, IndexError) as error:
            raise UserError(
                f"{key}: {file}: must have lines of class, x, y, width and height, got '{line[:60]}'"
            ) from error
        sides = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        boxes.append(Box(kind, sides, relative=True))
    return boxes


# -- both ------------------------------------------------------------------------------------------------------------
def _folder(
    splits: Sequence[tuple[list[Path], list[list[Box]]]], kinds: list[str], root: Path, key: str
) -> BoxFolder:
    """The folder's content; a split without a single box is refused.

    Args:
        splits: files and boxes of the pictures to train with, then of those to judge by.
        kinds: names of the classes.
        root: the folder, for messages.
        key: the setting that names it, likewise.
    """
    parts = []
    for files, boxes in splits:
        if not any(boxes):
            raise UserError(f"{key}: {root} has no pictures with boxes to train with and to judge")
        parts.append(BoxPictures(files, boxes, kinds))
    train, judged = parts
    return BoxFolder(kinds, train, judged)


def _picture(folder: Path, stem: str, key: str) -> Path:
    """The picture's file: ``stem`` with the first ending that exists; a UserError begins with ``key`` where none does."""
    for suffix in sorted(IMAGE_SUFFIXES):
        file = folder / f"{stem}{suffix}"
        if file.is_file():
            return file
    raise UserError(f"{key}: picture {folder / stem} not found")


def _text(file: Path, key: str) -> str:
    """What a file of text holds; a UserError names ``key`` and the file that can't be read."""
    try:
        return text_of(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {file} can't be read: {error}") from error

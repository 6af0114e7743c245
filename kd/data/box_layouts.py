"""Whether a folder has pictures with boxes, in a layout that :mod:`kd.data.boxes` reads. Torch is not imported."""

from pathlib import Path


def has_boxes(folder: Path) -> bool:
    """Whether a folder has one of the layouts, by the names of its folders; no file is opened."""
    return voc_root(folder) is not None or is_yolo(folder)


def voc_root(folder: Path) -> Path | None:
    """The folder with Pascal VOC's ``Annotations`` and ``ImageSets``: ``folder`` itself, else the first of its subfolders
    by name that has both; None without one.
    """
    for place in (folder, *sorted(folder.glob("*/"))):
        if (place / "Annotations").is_dir() and (place / "ImageSets").is_dir():
            return place
    return None


def is_yolo(folder: Path) -> bool:
    """Whether a folder has YOLO's folders ``images`` and ``labels``."""
    return (folder / "images").is_dir() and (folder / "labels").is_dir()

"""Whether a folder has pictures with boxes, in a layout that :mod:`kd.data.boxes` reads. Torch is not imported."""

from pathlib import Path


def has_boxes(folder: Path) -> bool:
    """Whether a folder has one of the layouts; nothing is read."""
    return voc_root(folder) is not None or is_yolo(folder)


def voc_root(folder: Path) -> Path | None:
    """The folder with ``Annotations``, Pascal VOC's: itself, or a subfolder; None without one."""
    for place in (folder, *sorted(folder.glob("*/"))):
        if (place / "Annotations").is_dir() and (place / "ImageSets").is_dir():
            return place
    return None


def is_yolo(folder: Path) -> bool:
    """Whether a folder has YOLO's folders ``images`` and ``labels``."""
    return (folder / "images").is_dir() and (folder / "labels").is_dir()

"""Where pictures and labels come from. Every source gives encoded bytes; :mod:`kd.data.pictures` decodes them.

A source of one's own is a subclass of :class:`Source`, named by its class path.
"""

from importlib import import_module

from kd.data.sources.base import (
    Joined,
    Source,
    Split,
    Subset,
    fingerprint,
    identity,
    labelled,
    named,
)
from kd.data.sources.files import FileSplit, printable, said
from kd.data.sources.folder import ImageFolder, classes_below
from kd.data.sources.food101 import Food101
from kd.data.sources.foodtag import FoodTagCalories, FoodTagMini
from kd.data.sources.hugging_face import HuggingFace
from kd.data.sources.manifest import Manifest, pictures_in_list
from kd.data.sources.places import IMAGE_SUFFIXES, pictures_below
from kd.data.sources.segmentation import MaskSplit, SegmentationFolder
from kd.data.sources.shards import Shards
from kd.data.sources.unlabelled import Pictures
from kd.data.sources.webdataset import WebDataset
from kd.machine import cache_dir

__all__ = [
    "IMAGE_SUFFIXES", "FileSplit", "Food101", "FoodTagCalories", "FoodTagMini", "HuggingFace", "ImageFolder", "Joined",
    "Manifest", "MaskSplit", "Pictures", "SegmentationFolder", "Shards", "Source", "Split", "Subset", "WebDataset",
    "cache_dir", "class_at", "classes_below", "fingerprint", "identity", "labelled", "named",
    "pictures_below", "pictures_in_list", "printable", "said",
]  # fmt: skip


def class_at(path: object) -> type[Source] | None:
    """The class of one of kd's sources by its class path; None for any other."""
    package, _, name = str(path).rpartition(".")
    if package != __name__ and not package.startswith(f"{__name__}."):
        return None
    kind: type[Source] = getattr(import_module(package), name)
    return kind

"""Pictures without labels, alone or beside labelled ones."""

from kd.data import foodtag
from kd.data.sources.base import Source, bytes_of
from kd.data.sources.files import UNLABELLED, FileSplit, said
from kd.data.sources.places import IMAGE_SUFFIXES, Place, expanded, joined, pictures_below, place_of
from kd.data.sources.split_names import split_of
from kd.errors import UserError
from kd.machine import cache_dir
from kd.storage.objects import is_url

DRAWN = (5, 2)  # Pictures of each kind of food that are drawn to train on and to validate with


class Pictures(Source):
    """A folder of pictures without labels, at any depth.

    Args:
        root: the folder, or its URL (extra ``stream``); null: drawn pictures of food (:mod:`kd.data.foodtag`), to
            try things with.
        val: a folder of other pictures to validate with; without one a part of ``root`` is held out
            (``data.val_fraction``).
        cache_gb: as of :class:`~kd.data.sources.ImageFolder`.
    """

    def __init__(
        self, root: str | None, val: str | None = None, cache_gb: float | None = None
    ) -> None:
        self.folders = {
            "train": expanded(root) if root else root,
            "val": expanded(val) if val else val,
        }
        self.cache_bytes = bytes_of(cache_gb)
        self.classes = []

    def load(self, split: str) -> FileSplit:
        """All pictures below the split's folder, without labels; without a folder the embedded set is drawn.

        Raises:
            UserError: no folder was given for the split, or no pictures are in it.
        """
        if self.folders["train"] is None:
            self.folders["train"] = str(foodtag.build(cache_dir(), *DRAWN) / "train")
        folder = self.folders.get(split)
        if folder is None:
            raise UserError(
                f"data.source: a folder of pictures has the splits train and val, got '{split}'"
            )
        pictures = unlabelled_folder(
            folder, f"data.source.{'root' if split == 'train' else 'val'}", self.cache_bytes
        )
        if split == "train":
            self.note(*splits_within(folder, pictures.place))
        return pictures

    def has(self, split: str) -> bool:
        """Whether a folder was given for the split."""
        return self.folders.get(split) is not None

    def describe(self) -> str:
        """What is read, in a line."""
        return f"pictures without labels below {self.folders['train'] or 'a folder to be drawn'}"


def unlabelled_folder(
    root: str, key: str = "data.unlabeled", cache_bytes: int | None = None
) -> FileSplit:
    """All pictures below ``root``, a folder or URL, sorted by path; their target is -1. Errors name ``key``.

    Raises:
        UserError: no such folder, or no pictures in it; ``key`` is named.
    """
    root = expanded(root)
    place = place_of(root, key, cache_bytes)
    folder = root.rstrip("/") if is_url(root) else root
    if not place.is_folder(folder):
        raise UserError(f"{key}: there is no folder {root}")
    paths, others = pictures_below(folder, place)
    if not paths:
        raise UserError(
            f"{key}: no pictures below {root} ({', '.join(IMAGE_SUFFIXES)}){said(others)}"
        )
    return FileSplit(paths, [UNLABELLED] * len(paths), others, place)


def splits_within(root: str, place: Place) -> list[str]:
    """A warning where a folder of unlabelled pictures has a validation or test split below it: training sees it too."""
    folder = joined(root)
    names = sorted(name for name in place.folders(folder) if split_of(name))
    if {split_of(name) for name in names} & {"val", "test"}:
        return [
            f"warning: all pictures below {root} are trained on, also those of its folders "
            f"{', '.join(names)}; to keep test pictures out, give the folder of training pictures"
        ]
    return []

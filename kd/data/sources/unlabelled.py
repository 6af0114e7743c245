"""Pictures without labels, alone or beside labelled ones."""

from collections import Counter
from functools import lru_cache, partial
from pathlib import Path

from kd.data.sources.base import Source
from kd.data.sources.files import UNLABELLED, FileSplit, said
from kd.data.sources.folder import Note
from kd.data.sources.places import IMAGE_SUFFIXES, expanded, folder_here, pictures_below
from kd.data.sources.split_names import split_of
from kd.errors import UserError


class Pictures(Source):
    """A folder of pictures without labels, at any depth.

    Args:
        root: the folder, or its URL (extra ``stream``).
        val: a folder of other pictures to validate with; without one a part of ``root`` is held out
            (``data.val_fraction``).
    """

    listed_early = True
    takes_folder = True

    def __init__(self, root: str, val: str | None = None) -> None:
        """Stores the folders; the arguments are the class's."""
        self.folders = {
            "train": expanded(root),
            "val": expanded(val) if val else val,
        }
        self.classes = []

    def load(self, split: str) -> FileSplit:
        """The pictures of :func:`unlabelled_folder`; ``classes`` stay empty.

        Raises:
            UserError: no folder was given for the split, or no pictures are in it.
        """
        folder = self.folders.get(split)
        if folder is None:
            raise UserError(
                f"split: a folder of pictures has the splits train and val, got '{split}'"
            )
        key = f"data.source.{'root' if split == 'train' else 'val'}"
        return unlabelled_folder(folder, self.note, key, split)

    def has(self, split: str) -> bool:
        """Whether a folder was given for the split."""
        return self.folders.get(split) is not None

    def describe(self) -> str:
        """What is read, in a line."""
        return f"pictures without labels below {self.folders['train']}"


def unlabelled_folder(
    root: str,
    note: Note,
    key: str = "data.unlabeled",
    split: str = "train",
) -> FileSplit:
    """The pictures below a folder or URL, at any depth, sorted by path; their target is -1.

    Pictures below a folder that names another split (:func:`kd.data.sources.split_names.split_of`) are left out, as a
    labelled source does not read them either.

    Args:
        root: the folder or URL; what its own name says does not count.
        note: takes a line about the pictures that are left out.
        key: the setting that names ``root``, for messages.
        split: ``train`` leaves out folders of validation and test pictures, ``val`` those of training pictures.

    Raises:
        UserError: no such folder, or no pictures of the split in it.
    """
    folder = folder_here(expanded(root), key)
    if not Path(folder).is_dir():
        raise UserError(f"{key}: folder {root} not found")
    paths, others = pictures_below(folder)
    if not paths:
        raise UserError(
            f"{key}: no pictures below {root} ({', '.join(IMAGE_SUFFIXES)}){said(others)}"
        )
    counts: Counter[str] = Counter()  # pictures left out, by the folder that names another split
    folder_of_other = lru_cache(None)(partial(_folder_of_other_split, split=split))
    kept_paths = []
    for path in paths:
        other = folder_of_other(path[len(folder) :].rpartition("/")[0])
        if other:
            counts[other] += 1
        else:
            kept_paths.append(path)
    others_named = "validation or test pictures" if split == "train" else "training pictures"
    folders = ", ".join(sorted(counts)[:5]) + (" ..." if len(counts) > 5 else "")
    if not kept_paths:
        raise UserError(
            f"{key}: all {len(paths)} pictures below {root} are in folders of {others_named} ({folders}); to use them, "
            "give such a folder itself"
        )
    if counts:
        note(
            f"{key}: {counts.total()} of {len(paths)} pictures are left out: their folders below {root} name "
            f"{others_named} ({folders})"
        )
    return FileSplit(kept_paths, [UNLABELLED] * len(kept_paths), others)


def _folder_of_other_split(path: str, split: str) -> str:
    """The first part of a folder's relative path that names another split, as a path; empty without one.

    >>> _folder_of_other_split("/food/val_set/a", "train"), _folder_of_other_split("/train", "train")
    ('food/val_set', '')
    >>> _folder_of_other_split("/test", "val")  # a test split validates where there is no other
    ''
    """
    other_splits = ("val", "test") if split == "train" else ("train",)
    folders = path.strip("/").split("/")
    for i, name in enumerate(folders):
        if split_of(name) in other_splits:
            return "/".join(folders[: i + 1])
    return ""

"""The source ``ImageFolder``: a folder with one subfolder a class."""

from collections import Counter
from collections.abc import Sequence

from kd.data.sources.base import Source, bytes_of
from kd.data.sources.files import FileSplit, PathLike, printable, said
from kd.data.sources.places import DISK, IMAGE_SUFFIXES, Place, joined, pictures_below
from kd.errors import UserError
from kd.storage.objects import is_url

VALIDATION = ("val", "valid", "validation", "test")  # What validation pictures go by elsewhere: the first that is there


class ImageFolder(Source):
    """A folder with one subfolder a class: ``root/train/<class>/*.jpg`` and ``root/val/<class>/*.jpg``.

    Class ids come from ``train`` (sorted by name); ``val`` may hold fewer classes, but none that ``train`` lacks.
    Without split folders, ``root/<class>/*.jpg`` is the training split, and a part of it is held out
    (``data.val_fraction``).

    Args:
        root: the folder, or its URL (``s3://bucket/food``; extra ``stream``).
        train: name of the training split's folder below ``root``.
        val: name of the validation split's; default: the first of ``val``, ``valid``, ``validation`` and ``test`` that
            is there.
        cache_gb: of pictures by URL at most so much is kept on the local disk, of all processes together; what was used
            longest ago goes. Default: all that were read.
    """

    def __init__(self, root: str, train: str = "train", val: str | None = None, cache_gb: float | None = None) -> None:
        self.root = root
        self.folders = {"train": train, "val": val}
        self.cache_bytes = bytes_of(cache_gb)

    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`. Any other split's name is taken as a folder below ``root``."""
        self.classes = class_folders(self._folder("train"), self.key, self.place)
        return labelled_folder(self._folder(split), self.classes, self.key, self.place)

    def _named(self, split: str) -> str:
        """The split's folder below ``root``; ``.`` where that has the class folders itself."""
        named = self.folders.get(split, split)
        root = joined(self.root)
        there = self.place.folders(root) if self.place.is_folder(root) else []
        if named is None:
            return next((name for name in VALIDATION if name in there), "val")
        flat = any(not name.startswith(".") for name in there) and not {"train", *VALIDATION} & {*there}
        return "." if named == split == "train" and flat else named

    def _folder(self, split: str) -> str:
        named = self._named(split)
        folder = joined(self.root, named)
        if (is_url(self.root) or is_url(named)) and not f"{folder}/".startswith(f"{joined(self.root)}/"):
            raise UserError(f"data.source.{split}: must be a folder below {self.root}, got {named}")  # alone listed
        return folder

    def has(self, split: str) -> bool:
        """Whether the split's folder exists; one that was named in the settings always counts as there."""
        named = self._named(split)
        return named != split or self.place.is_folder(joined(self.root, named))  # a name that was given must be there

    def describe(self) -> str:
        """The folder, and the validation folder where it is not ``val``."""
        named = self._named("val")
        return f"ImageFolder {self.root}" + ("" if named == "val" else f", validated with {named}")


def class_folders(path: str, key: str, place: Place = DISK) -> list[str]:
    """The sorted names of the folders in ``path``; ``key`` is named in errors."""
    if not place.is_folder(path):
        raise UserError(f"{key}: there is no folder {path}")
    names = sorted(name for name in place.folders(path) if not name.startswith("."))
    if not names:
        raise UserError(f"{key}: no class folders in {path} (expected <class>/*.jpg)")
    for name in names:
        if printable(name) != name:
            raise UserError(f"{key}: the name of the class folder {path}/{printable(name)} is not UTF-8; rename it")
    return names


def labelled_folder(path: str, classes: Sequence[str], key: str, place: Place = DISK) -> FileSplit:
    """The pictures below ``path/<class>``, at any depth, with ids from ``classes``, of which ``path`` may lack some."""
    ids = {name: i for i, name in enumerate(classes)}
    paths: list[PathLike] = []
    targets: list[int] = []
    left_out: Counter[str] = Counter()
    for name in class_folders(path, key, place):
        if name not in ids:
            raise UserError(f"{key}: {joined(path, name)} is not one of the {len(ids)} known classes")
        found, others = pictures_below(joined(path, name), place)
        paths += found
        targets += [ids[name]] * len(found)
        left_out.update(others)
    if not paths:
        raise UserError(f"{key}: no pictures below {path} ({', '.join(IMAGE_SUFFIXES)}){said(left_out)}")
    return FileSplit(paths, targets, dict(left_out), place)

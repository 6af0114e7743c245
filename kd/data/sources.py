"""Where pictures and labels come from. Every source gives encoded bytes; :mod:`kd.data.pictures` decodes them."""

import csv
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from kd.data import foodtag_mini
from kd.data.pictures import open_regular
from kd.errors import UserError, first_line

PathLike: TypeAlias = str | os.PathLike[str]
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


def cache_dir() -> Path:
    """Where data and teachers made by kd are kept: ``KD_CACHE``, else the user's cache folder."""
    if "KD_CACHE" in os.environ:
        return Path(os.environ["KD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kd"


class Split(Protocol):
    """One split of a source: targets, and a picture's bytes and name by its number."""

    @property
    def targets(self) -> Sequence[Any]:
        """Class ids, or lists of them."""

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``."""

    def name(self, i: int) -> str:
        """Its path, or another name that a person can find it by."""

    def target(self, i: int) -> Any:
        """A class id, a list of ids (several labels), or a mask (uint8, ``(1, H, W)``)."""

    def stamp(self, i: int) -> str:
        """What differs once the picture's content does (size and time of change), or nothing where it can't change."""

    def changed(self) -> float:
        """When any picture was changed last, in seconds since 1970; infinite where that is not known."""


class FileSplit:
    """A split of picture files.

    Args:
        paths: of the pictures.
        targets: one each.
        left_out: how many files beside them are no pictures that can be read, by the ending of their names.
    """

    def __init__(
        self, paths: Sequence[PathLike], targets: Sequence[Any], left_out: dict[str, int] | None = None
    ) -> None:
        self.paths = [str(p) for p in paths]  # strings: thousands of Path objects make workers slow to start
        self.targets = list(targets)
        self.left_out = left_out or {}

    def read(self, i: int) -> bytes:
        """The file's content."""
        with open_regular(self.paths[i]) as file:
            return file.read()

    def files(self, i: int) -> list[str]:
        """All files that the sample ``i`` is read from."""
        return [self.paths[i]]

    def stamp(self, i: int) -> str:
        """Size and time of change of each of its files."""
        return "".join(f"{stat.st_size}\0{stat.st_mtime_ns}\0" for stat in self._stats(i))

    def changed(self) -> float:
        """The newest file's time of change."""
        return max((stat.st_mtime for i in range(len(self.paths)) for stat in self._stats(i)), default=0.0)

    def _stats(self, i: int) -> list[os.stat_result]:
        found = []
        for file in self.files(i):
            with suppress(OSError, ValueError):  # a missing file is named by the check that decodes it
                found.append(Path(file).stat())
        return found

    def name(self, i: int) -> str:
        """The file's path."""
        return self.paths[i]

    def target(self, i: int) -> Any:
        """Its target."""
        return self.targets[i]


class Source:
    """Base of all sources. Subclasses fill ``classes`` and the two splits in :meth:`load`.

    Arguments of two sources share a name only where they mean the same: replacing a recipe's source on the command line
    carries over the ones that both have.

    Attributes:
        classes: names by class id.
        masks: targets are masks.
        multi_label: targets are lists of class ids.
        ignore_index: the value of a mask's pixels that take no part.
    """

    classes: list[str]
    masks = False
    multi_label = False
    ignore_index: int | None = None

    def load(self, split: str) -> Split:
        """The split ``"train"`` or ``"val"``; sets ``classes`` too. Downloads or draws what is missing.

        Raises:
            UserError: the data is missing or unusable; the message names ``data.source`` and the file or folder.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """One line for the person who reads the run."""
        return type(self).__name__


class ImageFolder(Source):
    """A folder with one subfolder a class: ``root/train/<class>/*.jpg`` and ``root/val/<class>/*.jpg``.

    Class ids come from ``train`` (sorted by name); ``val`` may hold fewer classes, but none that ``train`` lacks.

    Args:
        root: the folder.
        train: name of the training split's folder below ``root``.
        val: name of the validation split's.
    """

    def __init__(self, root: str, train: str = "train", val: str = "val") -> None:
        self.root = root
        self.folders = {"train": train, "val": val}

    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`. Any other split's name is taken as a folder below ``root``."""
        self.classes = class_folders(Path(self.root, self.folders["train"]), "data.source.root")
        return labelled_folder(Path(self.root, self.folders.get(split, split)), self.classes, "data.source.root")

    def describe(self) -> str:
        """One line."""
        return f"ImageFolder {self.root}"


def class_folders(path: Path, key: str) -> list[str]:
    """The sorted names of the folders in ``path``; ``key`` is named in errors."""
    if not path.is_dir():
        raise UserError(f"{key}: there is no folder {path}")
    names = sorted(e.name for e in os.scandir(path) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise UserError(f"{key}: no class folders in {path} (expected <class>/*.jpg)")
    for name in names:
        if printable(name) != name:
            raise UserError(f"{key}: the name of the class folder {path}/{printable(name)} is not UTF-8; rename it")
    return names


def printable(name: str) -> str:
    """A file's name as any terminal and JSON file takes it: bytes that are not UTF-8 are written as escapes.

    >>> printable("caf\\udce9.jpg") == "caf" + chr(92) + "udce9.jpg"
    True
    """
    return name.encode("utf-8", "backslashreplace").decode()


def pictures_below(root: str) -> tuple[list[str], dict[str, int]]:
    """All pictures below a folder at any depth, sorted by path, and what else is there.

    Args:
        root: the folder.

    Returns:
        Paths of the files with one of :data:`IMAGE_SUFFIXES`, and how many others there are by the ending of their
        names. Hidden files and folders are passed over.
    """
    found: list[str] = []
    others: Counter[str] = Counter()
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            if name.lower().endswith(IMAGE_SUFFIXES):
                found.append(f"{folder}{os.sep}{name}")
            else:
                others[os.path.splitext(name)[1].lower() or "no ending"] += 1  # noqa: PTH122 - a Path each is slow
    return sorted(found), dict(others)


def labelled_folder(path: Path, classes: Sequence[str], key: str) -> FileSplit:
    """The pictures below ``path/<class>``, at any depth, with ids from ``classes``, of which ``path`` may lack some.

    Raises:
        UserError: no pictures, or a folder that is none of the classes.
    """
    ids = {name: i for i, name in enumerate(classes)}
    paths: list[PathLike] = []
    targets: list[int] = []
    left_out: Counter[str] = Counter()
    for name in class_folders(path, key):
        if name not in ids:
            raise UserError(f"{key}: {path / name} is none of the {len(ids)} known classes")
        found, others = pictures_below(str(path / name))
        paths += found
        targets += [ids[name]] * len(found)
        left_out.update(others)
    if not paths:
        raise UserError(f"{key}: no pictures below {path} ({', '.join(IMAGE_SUFFIXES)}){said(left_out)}")
    return FileSplit(paths, targets, dict(left_out))


def said(left_out: dict[str, int]) -> str:
    """Files that were passed over, for the end of a message.

    >>> said({".heic": 20, ".txt": 1})
    '; left out: 20 of .heic, 1 of .txt'
    """
    most = sorted(left_out.items(), key=lambda item: -item[1])[:5]
    return f"; left out: {', '.join(f'{count} of {ending}' for ending, count in most)}" if most else ""


class FoodTagMini(ImageFolder):
    """The embedded food set: drawn on first use into the user's cache folder, see :mod:`kd.data.foodtag_mini`.

    Args:
        train_per_class: training pictures a class.
        val_per_class: validation pictures a class.
    """

    def __init__(self, train_per_class: int = 300, val_per_class: int = 60) -> None:
        for name, value in (("train_per_class", train_per_class), ("val_per_class", val_per_class)):
            if value < 1:
                raise ValueError(f"{name} must be > 0, got {value}")
        super().__init__(root="")
        self.train_per_class, self.val_per_class = train_per_class, val_per_class

    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`."""
        if not self.root:
            self.root = str(foodtag_mini.build(cache_dir(), self.train_per_class, self.val_per_class))
        return super().load(split)

    def describe(self) -> str:
        """One line, with the way to real data."""
        return (
            f"FoodTag-mini, drawn food pictures in {self.root} (your own: data.source=ImageFolder data.source.root=DIR)"
        )


class Food101(Source):
    """torchvision's Food101: 101,000 photographs of 101 dishes; its test split is our ``val``.

    Args:
        data_dir: folder to keep it in (torchvision makes ``food-101`` below it); default: the user's cache folder.
        download: download it (5 GB) where it is missing.
    """

    def __init__(self, data_dir: str | None = None, download: bool = True) -> None:
        self.data_dir, self.download = data_dir, download

    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`."""
        from filelock import FileLock
        from torchvision import datasets

        root = Path(self.data_dir) if self.data_dir else cache_dir()
        if self.download:
            root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / "food-101.lock") if self.download else nullcontext()  # several processes start at once
        try:
            with lock:
                data = datasets.Food101(str(root), split={"val": "test"}.get(split, split), download=self.download)
        except (RuntimeError, OSError, ValueError) as error:
            raise UserError(f"data.source: Food101 in {root}: {first_line(error)}") from error
        self.classes = list(data.classes)
        return FileSplit(data._image_files, data._labels)

    def describe(self) -> str:
        """One line."""
        return f"Food101 in {self.data_dir or cache_dir()}"


class Manifest(Source):
    """Lists of (path, label): CSV with a header ``path,label``, or JSON lines ``{"path": ..., "label": ...}``.

    Labels are class names; ids are their sorted order in the training list, by value where all are whole numbers.
    Relative paths start at ``image_dir``.

    Args:
        train: the training list (``.csv``, ``.jsonl``).
        val: the validation list.
        image_dir: folder that relative paths start at; default: the list's own folder.
        multi_label: a picture has any number of labels, separated by ``;`` (or a JSON list).
    """

    def __init__(self, train: str, val: str, image_dir: str | None = None, multi_label: bool = False) -> None:
        self.lists = {"train": train, "val": val}
        self.image_dir, self.multi_label = image_dir, multi_label

    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`."""
        train = self._rows("train")
        self.classes = in_order({label for _, labels in train for label in labels})
        ids = {label: i for i, label in enumerate(self.classes)}
        rows = train if split == "train" else self._rows(split)
        unknown = next(((path, label) for path, labels in rows for label in labels if label not in ids), None)
        if unknown:
            raise UserError(
                f"data.source.{split}: label '{unknown[1]}' of {unknown[0]} is not in {self.lists['train']}"
            )
        targets = [[ids[label] for label in labels] for _, labels in rows]
        return FileSplit([path for path, _ in rows], targets if self.multi_label else [t[0] for t in targets])

    def _labels(self, given: Any) -> list[str]:
        if not self.multi_label:
            return [] if given is None or not str(given).strip() else [str(given)]
        parts = given if isinstance(given, list) else str(given or "").split(";")
        return [str(part).strip() for part in parts if str(part).strip()]

    def _rows(self, split: str) -> list[tuple[str, list[str]]]:
        key = f"data.source.{split}"
        if split not in self.lists:
            raise UserError(f"data.source: a manifest has the splits train and val, not '{split}'")
        file = Path(self.lists[split])
        if not file.is_file():
            raise UserError(f"{key}: there is no {file}")
        root = Path(self.image_dir) if self.image_dir else file.parent
        try:
            with file.open(newline="", encoding="utf-8") as lines:
                if file.suffix == ".csv":
                    records: list[dict[str, Any]] = list(csv.DictReader(lines))
                else:
                    records = [json.loads(line) for line in lines if line.strip()]
            rows = [(str(root / r["path"]), self._labels(r["label"])) for r in records]
            bare = next((path for path, labels in rows if not labels and not self.multi_label), None)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{key}: {file} needs the columns path and label ({type(error).__name__}: {error})"
            ) from error
        if not rows:
            raise UserError(f"{key}: {file} lists no pictures")
        if bare:
            raise UserError(f"{key}: {file}: {printable(bare)} has no label")
        return rows

    def describe(self) -> str:
        """One line."""
        return f"Manifest {self.lists['train']}, {self.lists['val']}"


def in_order(labels: Iterable[str]) -> list[str]:
    """Labels sorted by name; by value where all are whole numbers, as the column of class ids that they then are.

    >>> in_order(["10", "9"]), in_order(["10", "9", "b"])
    (['9', '10'], ['10', '9', 'b'])
    """
    names = sorted(labels)
    return sorted(names, key=int) if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names) else names


class HuggingFace(Source):
    """A Hugging Face data set with a picture and a label column (extra ``hf``).

    Args:
        path: as in ``datasets.load_dataset``: a name on the hub, or a local folder.
        train: its training split.
        val: its validation split.
        image_column: column of pictures.
        label_column: column of class ids (a ``ClassLabel``, or integers).
    """

    def __init__(
        self,
        path: str,
        train: str = "train",
        val: str = "validation",
        image_column: str = "image",
        label_column: str = "label",
    ) -> None:
        self.path, self.splits = path, {"train": train, "val": val}
        self.columns = image_column, label_column

    def load(self, split: str) -> Split:
        """See :meth:`Source.load`."""
        try:
            import datasets
        except ImportError as error:
            raise UserError("data.source: HuggingFace needs the extra hf: pip install 'kd-train[hf]'") from error
        image, label = self.columns
        try:
            data = datasets.load_dataset(self.path, split=self.splits.get(split, split))
            data = data.cast_column(image, datasets.Image(decode=False))
            kind = data.features[label]
            targets = [int(t) for t in data[label]]
        except Exception as error:  # the hub, the file system and the format readers raise many kinds
            raise UserError(f"data.source: {self.path} ({split}): {first_line(error)}") from error
        self.classes = list(getattr(kind, "names", None) or [str(i) for i in range(max(targets) + 1)])
        return _HuggingFaceSplit(data, image, targets, self.path)

    def describe(self) -> str:
        """One line."""
        return f"HuggingFace {self.path}"


class _HuggingFaceSplit:
    def __init__(self, data: Any, column: str, targets: list[int], path: str) -> None:
        self.data, self.column, self.targets, self.path = data, column, targets, path

    def read(self, i: int) -> bytes:
        picture = self.data[i][self.column]
        if picture["bytes"] is not None:
            return picture["bytes"]
        with open_regular(picture["path"]) as file:
            return file.read()

    def stamp(self, i: int) -> str:
        return str(self.data._fingerprint)  # datasets hashes the files that it has built the set from

    def changed(self) -> float:
        return max((Path(file["filename"]).stat().st_mtime for file in self.data.cache_files), default=inf)

    def name(self, i: int) -> str:
        return f"{self.path}[{i}]"

    def target(self, i: int) -> int:
        return self.targets[i]


class Subset:
    """Some pictures of a split, under new numbers."""

    def __init__(self, split: Split, keep: Sequence[int]) -> None:
        self.split, self.keep = split, list(keep)
        self.targets = [split.targets[i] for i in self.keep]

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``."""
        return self.split.read(self.keep[i])

    def name(self, i: int) -> str:
        """Its name in the whole split."""
        return self.split.name(self.keep[i])

    def target(self, i: int) -> Any:
        """Its target."""
        return self.split.target(self.keep[i])

    def stamp(self, i: int) -> str:
        """Its stamp in the whole split."""
        return stamp_of(self.split, self.keep[i])

    def changed(self) -> float:
        """As of the whole split."""
        return changed(self.split)


def stamp_of(split: Split, i: int) -> str:
    """The stamp of a picture; nothing where a source of someone's own has none."""
    return split.stamp(i) if hasattr(split, "stamp") else ""


def changed(split: Split) -> float:
    """When a picture was changed last; infinite where a source of someone's own does not say."""
    return split.changed() if hasattr(split, "changed") else inf


def fingerprint(split: Split, stamps: bool = True) -> str:
    """A hash of a split's names, labels and stamps (for files: sizes and times of change).

    Args:
        split: the pictures.
        stamps: without them, all but :class:`FileSplit` hash as in older caches, which had none.
    """
    digest = hashlib.sha256()
    for i, target in enumerate(split.targets):
        digest.update(f"{split.name(i)}\0{target}\0".encode("utf-8", "backslashreplace"))
        if stamps or isinstance(split, FileSplit):
            digest.update(stamp_of(split, i).encode())
    return digest.hexdigest()[:16]


def identity(split: Split) -> str:
    """A hash of a split's file names, sizes and labels in order: the same wherever the files lie."""
    digest = hashlib.sha256()
    for i, target in enumerate(split.targets):
        file, size = Path(split.name(i)), 0
        with suppress(OSError):  # not every source has files
            size = file.stat().st_size
        digest.update(f"{file.name}\0{target}\0{size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]

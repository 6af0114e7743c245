"""The source ``ImageFolder``: a folder with one subfolder a class."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from kd.data.label_text import plain
from kd.data.sources.base import Source, cache_bytes_of
from kd.data.sources.files import FileSplit, PathLike, printable, said
from kd.data.sources.labels import check_known, doubts, left_out
from kd.data.sources.places import (
    DISK,
    IMAGE_SUFFIXES,
    Place,
    expanded,
    is_hidden,
    joined,
    list_at,
    pictures_below,
    place_of,
)
from kd.data.sources.split_names import choose, split_of
from kd.errors import UserError
from kd.storage.objects import is_url

Note = Callable[[str], None]  # takes a line for the person who reads the run

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")
"""Endings of files that are most likely tables of pictures, where they lie beside these."""


class SplitFolders(NamedTuple):
    """Names of the split folders below a root; ``.`` where the root has the class folders itself."""

    train: str
    val: str | None  # None: no folder validates


class ImageFolder(Source):
    """A folder with one subfolder a class: ``root/train/<class>/*.jpg`` and ``root/val/<class>/*.jpg``.

    Split folders may have other usual names (``Training``, ``seg_test``). Class ids come from the folders of the
    training split that have a picture, sorted by name; ``val`` may hold fewer classes, but none that ``train`` lacks.
    Without split folders, ``root/<class>/*.jpg`` is the training split, and a part of it is held out
    (``data.val_fraction``).

    Args:
        root: the folder, or its URL (``s3://bucket/food``; extra ``stream``).
        train: name of the training split's folder below ``root``, ``.`` for ``root`` itself; default: the folder whose
            name means training.
        val: name of the validation split's; default: ``val``, ``valid``, ``validation`` or ``test``, or a folder whose
            name means one of these.
        cache_gb: of pictures by URL at most so much is kept on the local disk, of all processes together; what was used
            longest ago goes. Default: all that were read.
    """

    def __init__(
        self,
        root: str,
        train: str | None = None,
        val: str | None = None,
        cache_gb: float | None = None,
    ) -> None:
        """Expands ``~`` in the root; the arguments are the class's. Nothing is listed yet."""
        self.root = expanded(root)
        self.folders = {"train": train, "val": val}
        self.cache_bytes = cache_bytes_of(cache_gb)
        self._loaded: dict[str, FileSplit] = {}  # by split: each is listed once

    def load(self, split: str) -> FileSplit:
        """See :meth:`Source.load`. Any other split is the folder of its name below ``root``, or one whose name means it.

        Raises:
            UserError: no such folder, no pictures, or a class that the training split lacks.
        """
        if "train" not in self._loaded:
            self._loaded["train"] = self._load_train()
        if split in self._loaded:
            return self._loaded[split]
        folder = self._folder(split)
        if not self.place.is_folder(folder):
            raise self._no_folder(split, folder)
        listed = labelled_folder(folder, self.classes, self.key, self.place, self._noted(split))
        self._loaded[split] = listed
        return listed

    def _no_folder(self, split: str, folder: str) -> UserError:
        """The error, for the caller to raise, of a split without a folder; it names the setting that decides the folder.

        Args:
            split: ``train``, ``val``, or a name from a command.
            folder: that was looked for.
        """
        if self.folders.get(split) is not None:
            key = f"data.source.{split}"
        elif split in self.folders or self.key != Source.key:
            key = self.key
        else:  # of a command that reads a split by its name
            key = "split"
        names = ", ".join(map(printable, _visible(self.place, joined(self.root))))
        return UserError(
            f"{key}: folder {folder} not found; {self.root} has {names or 'no folders'}"
        )

    def _load_train(self) -> FileSplit:
        """Lists the training split; its class folders with a picture become the source's classes, in order of name.

        Raises:
            UserError: no such folder, no class folders or pictures, or folders that may be splits or tables instead.
        """
        folder = self._folder("train")
        if self.folders["train"] is not None and not self.place.is_folder(folder):
            raise self._no_folder("train", folder)
        self._check_no_table(folder)
        if self._layout.train == ".":
            self._check_no_splits_in_classes(folder)
        folders = class_folders(folder, self.key, self.place)
        names = sorted({plain(name) for name in folders})
        note = self._noted("train")
        split = labelled_folder(folder, names, self.key, self.place, note)
        # Folders without a picture are no classes: the others are numbered without them.
        used_ids = sorted(set(split.targets))
        self.classes = [names[i] for i in used_ids]
        new_ids = {old: new for new, old in enumerate(used_ids)}
        split.targets = [new_ids[target] for target in split.targets]
        self.note(*doubts(self.classes))
        return split

    def _check_no_table(self, folder: str) -> None:
        """Refuses a folder with a table of its pictures and no folders for two classes; names the table's source.

        Args:
            folder: the training split's.
        """
        root = joined(self.root)
        if not self.place.is_folder(root) or len(_visible(self.place, folder)) > 1:
            return
        tables = sorted(name for name in self.place.files(root) if name.lower().endswith(TABLES))
        if not tables:
            return
        of_train = [name for name in tables if split_of(name.rpartition(".")[0]) == "train"]
        table = joined(root, (of_train or tables)[0])
        image_dir = ""
        if not self._has_pictures(root, "."):  # else paths start beside the table
            names = _visible(self.place, root)
            holders = [joined(root, name) for name in names if self._has_pictures(root, name)]
            if holders:
                chosen = folder if folder in holders else holders[0]
                first_rows = list_at(table, self.key)[:4096]
                if f"{chosen.rpartition('/')[2]}/".encode() not in first_rows:
                    image_dir = f" data.source.image_dir={chosen}"
        raise UserError(
            f"{self.key}: {root} has no class folders, but {', '.join(tables[:3])}: data.source={table}{image_dir} reads a "
            "table of pictures and labels"
        )

    def _noted(self, split: str) -> Note:
        """A function that adds a line to the source's notes, with the split's name before it."""
        return lambda line: self.note(f"{split}: {line}")

    # -- which folders are the splits --------------------------------------------------------------------------------
    @cached_property
    def _layout(self) -> SplitFolders:
        """Which folders are the splits: those of the settings, else by their names; what is guessed is noted.

        Raises:
            UserError: folders that may be splits or classes, or two that may be the same split.
        """
        root = joined(self.root)
        names = _visible(self.place, root)
        splits = [name for name in names if split_of(name)]
        holders = [name for name in splits if _visible(self.place, joined(root, name))]
        train = self.folders["train"]
        val = self.folders["val"]
        nothing_chosen = train is None and val is None
        if nothing_chosen and not names and self.place.is_folder(root):
            self._check_no_table(root)
            raise _no_classes(self.key, root, "train/<class>/*.jpg and val/<class>/*.jpg, or ")
        may_be_classes = nothing_chosen and names and not holders
        if may_be_classes and self._are_classes(root, names, splits):
            self._doubt_classes(root, names)
            return SplitFolders(train=".", val=None)
        if train is None:
            train = self._choose(holders, "train")
            if train is None:
                train = self._choose(splits, "train") or "train"
            self._doubt_train(root, train, names, splits)
            train = self._inner(root, train)
        if train == ".":
            return SplitFolders(train=train, val=val)
        if val is None:
            val = self._val_folder(root, train, splits, holders)
        used = [name.split("/")[0] for name in (train, val) if name is not None]
        unread = [printable(name) for name in names if name not in used and not split_of(name)]
        if unread:
            self.note(f"folders beside the splits are not read: {', '.join(unread[:5])}")
        return SplitFolders(train=train, val=val)

    def _choose(self, names: Sequence[str], split: str) -> str | None:
        """Which folder is ``train`` or ``val``, None for none, by :func:`choose`; ``data.probe`` has no setting for them."""
        has_setting = self.key == Source.key
        return choose(names, split, self.key, joined(self.root), has_setting)

    def _val_folder(
        self, root: str, train: str, splits: Sequence[str], holders: Sequence[str]
    ) -> str | None:
        """The validation split's folder, or that of a test split where there is no other; None where no folder means either.
        A test split's folder without class folders is not taken, which is noted.

        Args:
            root: the source's folder.
            train: the training split's folder, below it.
            splits: the folders whose names mean a split.
            holders: those of them that hold class folders.
        """
        others = [name for name in holders if name != train.split("/")[0]]
        val = self._choose(others, "val")
        flat = self._choose([name for name in splits if name not in holders], "val")
        if val is None and flat is not None:
            if split_of(flat) == "val":
                val = flat  # without class folders: refused where it is read
            else:
                self.note(f"{flat} has no class folders and is not read")
        if val is not None:
            return self._inner(root, val)
        return None

    def _has_pictures(self, root: str, name: str) -> bool:
        """Whether pictures lie in the folder itself."""
        files = self.place.files(joined(root, name))
        return any(file.lower().endswith(IMAGE_SUFFIXES) for file in files)

    def _are_classes(self, root: str, names: Sequence[str], splits: Sequence[str]) -> bool:
        """Whether the root's folders are classes: none has a split's name, or one alone has, and pictures lie in it and in
        another folder (which is noted).

        Args:
            root: the source's folder.
            names: of all its folders.
            splits: those of them whose names mean a split.
        """
        if not splits:
            return True
        others = [name for name in names if name not in splits and self._has_pictures(root, name)]
        if len(splits) == 1 and others and self._has_pictures(root, splits[0]):
            self.note(
                f"{splits[0]} is a class: it has pictures and no class folders, as {others[0]} has"
            )
            return True
        return False

    def _doubt_train(
        self, root: str, train: str, names: Sequence[str], splits: Sequence[str]
    ) -> None:
        """Refuses the only folder with a split's name beside two or more folders of pictures: ``train`` may be a class of
        vehicles.

        Args:
            root: the source's folder.
            train: the folder that was chosen to train on.
            names: of all folders of the root.
            splits: those of them whose names mean a split.
        """
        others = [name for name in names if name not in splits and self._has_pictures(root, name)]
        if [*splits] == [train] and len(others) > 1:
            raise UserError(
                f"{self.key}: {joined(root, train)} may be the training split, or a class beside "
                f"{others[0]} and {others[1]}; data.source.train={train} or data.source.train=. says "
                "which"
            )

    def _doubt_classes(self, root: str, names: Sequence[str]) -> None:
        """Refuses class folders of which more than half hold the same two or more folders, as splits with unusual names do
        (``entrenamiento`` and ``prueba``).
        """
        holders_by_inner: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            folders = _visible(self.place, joined(root, name))
            inner = tuple(plain(folder) for folder in folders)
            if len(inner) > 1 and not self._has_pictures(root, name):
                holders_by_inner.setdefault(inner, []).append(name)
        for inner, holders in holders_by_inner.items():
            count = len(holders)
            if count > 1 and 2 * count > len(names):
                among = ", ".join(map(printable, holders[:3]))
                shared = ", ".join(map(printable, inner[:3]))
                raise UserError(
                    f"{self.key}: the folders {among} in {root} hold the same folders ({shared}), as splits do, and no "
                    f"name says which is which; data.source.train={printable(holders[0])} and data.source.val=NAME do, "
                    "data.source.train=. takes them for classes"
                )

    def _inner(self, root: str, name: str) -> str:
        """A split's folder below the root: ``name``, or ``name/inner`` where its only folder means the same split.

        ``seg_train/seg_train``, as some archives unpack.
        """
        folders = _visible(self.place, joined(root, name))
        split = split_of(name)
        if split is None or len(folders) != 1:
            return name
        (inner,) = folders
        if split_of(inner) == split:
            return f"{name}/{inner}"
        return name

    def _check_no_splits_in_classes(self, folder: str) -> None:
        """Refuses classes with splits of their own (``bottle/train``, ``bottle/test``): all would be trained on."""
        for name in _visible(self.place, folder):
            inner_by_split = {}
            for inner in _visible(self.place, joined(folder, name)):
                split = split_of(inner)
                if split is not None:
                    inner_by_split[split] = inner
            if "train" in inner_by_split and len(inner_by_split) > 1:
                within = " and ".join(sorted(inner_by_split.values()))
                raise UserError(
                    f"{self.key}: {joined(folder, name)} has splits of its own ({within}); expected "
                    f"{joined(folder, inner_by_split['train'], name)}"
                )

    def _folder(self, split: str) -> str:
        """The path or URL of a split's folder; a UserError where one from the settings is not below the root of a store."""
        name = self._name(split)
        root = joined(self.root)
        folder = joined(root, name)
        is_below = f"{folder}/".startswith(f"{root}/")  # only what is below a URL is listed
        if (is_url(self.root) or is_url(name)) and not is_below:
            raise UserError(f"data.source.{split}: must be a folder below {self.root}, got {name}")
        return folder

    def _name(self, split: str) -> str:
        """The folder of a split, relative to the root; ``.`` is the root itself.

        ``train`` and ``val`` are those of the layout, or of their own name; any other split the folder of its name, else one
        whose name means it. The folder need not exist.
        """
        if split in ("train", "val"):
            return getattr(self._layout, split) or split
        root = joined(self.root)
        folder = joined(root, split)
        if self.place.is_folder(folder):
            return split
        names = _visible(self.place, root)
        return choose(names, split, self.key, self.root, has_setting=False) or split

    def has(self, split: str) -> bool:
        """Whether the split has a folder; a name of ``val`` in the settings counts: :meth:`load` refuses a missing one."""
        if split == "val":
            return self._layout.val is not None
        return self.place.is_folder(joined(self.root, self._name(split)))

    def describe(self) -> str:
        """The folder, and the folders of the splits where their names are not ``train`` and ``val``."""
        train, val = self._layout
        text = f"ImageFolder {self.root}"
        if train not in ("train", "."):
            text += f", trained with {train}"
        if val not in ("val", None):
            text += f", validated with {val}"
        return text


def _visible(place: Place, folder: str) -> list[str]:
    """The sorted names of a folder's folders that are not hidden; none of a folder that is missing."""
    if not place.is_folder(folder):
        return []
    return sorted(name for name in place.folders(folder) if not is_hidden(name))


def class_folders(path: str, key: str, place: Place = DISK) -> list[str]:
    """The sorted names of the folders in ``path``, but those that programs leave behind.

    Args:
        path: folder or URL.
        key: the setting that names it, for messages.
        place: where it is.

    Raises:
        UserError: no such folder, no folders in it, or a name that is not UTF-8.
    """
    if not place.is_folder(path):
        raise UserError(f"{key}: folder {path} not found")
    names = _visible(place, path)
    if not names:
        raise _no_classes(key, path)
    for name in names:
        if printable(name) != name:
            raise UserError(
                f"{key}: the name of the class folder {path}/{printable(name)} is not UTF-8; rename it"
            )
    return names


def _no_classes(key: str, path: str, splits: str = "") -> UserError:
    """The error, for the caller to raise, of a folder without folders; ``splits``: what else may be in it."""
    return UserError(
        f"{key}: no class folders in {path} (expected {splits}<class>/*.jpg; recipe=foundation_vit takes pictures "
        "without labels)"
    )


def classes_below(folder: str, key: str) -> list[str]:
    """The labels that the folders in ``folder``, a path or URL, stand for, sorted; errors as of :func:`class_folders`."""
    root = joined(expanded(folder))
    return sorted({plain(name) for name in class_folders(root, key, place_of(root, key))})


def labelled_folder(
    path: str, classes: Sequence[str], key: str, place: Place = DISK, note: Note | None = None
) -> FileSplit:
    """The pictures below ``path/<class>``, at any depth, with ids from ``classes``, of which ``path`` may lack some.

    Args:
        path: folder or URL.
        classes: names of the classes by id, as :func:`plain` writes them.
        key: the setting that names the folder, for messages.
        place: where the folder is.
        note: takes a line about folders without a usable picture, which are left out; None: it is dropped.

    Raises:
        UserError: no folders or pictures, or a folder with pictures that is not among ``classes``.
    """
    ids = {name: i for i, name in enumerate(classes)}
    paths: list[PathLike] = []
    targets: list[int] = []
    others: Counter[str] = Counter()
    empty: dict[str, str] = {}
    unknown: dict[str, list[str]] = {}
    for folder in class_folders(path, key, place):
        name = plain(folder)
        pictures, other_files = pictures_below(joined(path, folder), place)
        others.update(other_files)
        if not pictures:
            empty[name] = said(other_files).removeprefix("; left out: ") or "empty"
        elif name not in ids:
            unknown.setdefault(name, []).extend(pictures)
        else:
            paths += pictures
            targets += [ids[name]] * len(pictures)
    check_known(unknown, ids, key)
    if not paths:
        raise UserError(
            f"{key}: no pictures below {path} ({', '.join(IMAGE_SUFFIXES)}){said(dict(others))}"
        )
    if empty and note is not None:
        note(left_out(empty))
    return FileSplit(paths, targets, dict(others), place)

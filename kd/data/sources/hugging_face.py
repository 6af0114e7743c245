"""The source ``HuggingFace``: a data set of the hub, or a local one (extra ``hf``)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kd.data.info import Target
from kd.data.label_text import plain_label
from kd.data.sources.arrays import Column
from kd.data.sources.base import Source, Split
from kd.data.sources.labels import numbered
from kd.data.sources.places import expanded, files_under, is_picture, stamp_of_file
from kd.data.sources.split_names import choose_split_name, split_of
from kd.errors import UserError, first_line
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import open_regular, regular, text_of
from kd.storage.hub import FORMATS, REMEDIES, check_dataset, without_retries
from kd.storage.parquet_files import check_parquet

TABLES = {
    ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json",
}  # fmt: skip
"""The readers of ``datasets`` for a local folder's files, by their endings; pictures have another."""
TYPED = ("parquet", "arrow")
"""Those whose files hold the names of their class ids."""
OF_PICTURES = {"metadata.csv", "metadata.jsonl", "metadata.parquet"}
"""Files with the columns of the pictures that lie beside them."""
SETTINGS = {"dataset_infos.json", "dataset_info.json", "state.json"}
"""JSON files of ``datasets`` that hold no pictures."""
CARDS = ("README.md", ".huggingface.yaml")
"""Files in which a data set's settings are."""


class HubTable(Protocol):
    """What is used of a ``datasets.Dataset``."""

    features: Mapping[str, object]
    column_names: list[str]
    data: Any
    _fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, key: int | str) -> Any: ...


class HubRows(NamedTuple):
    """A split of a data set."""

    data: HubTable
    labels: list[str]
    """The label of each row, "" without one."""
    names: list[str] | None
    """The classes that the data set itself lists."""


class LocalFiles(NamedTuple):
    """The files of a local data set."""

    reader: str
    """That ``datasets`` has for them."""
    by_split: dict[str, list[str]]
    """Paths by split: ``train``, ``val``, ``test``."""
    unread: int
    """How many files name no split, where others do."""


class HuggingFace(Source):
    """A Hugging Face data set with a picture and a label column (extra ``hf``).

    Classes are those of the training split: its ``ClassLabel`` names with their ids, or its labels in order. Of a local
    folder the names of files and folders say which split they are (``train-00000-of-00002.parquet``, ``data/val/...``);
    its card and other settings are not read.

    Args:
        path: as in ``datasets.load_dataset``: a name on the hub, or a local folder.
        train: its training split; default: the one whose name means it.
        val: its validation split; ``auto``: the one whose name means it, else a test split; null: a part of train is
            held out (``data.val_fraction``), as where no split is for validation.
        image_column: column of pictures.
        label_column: column of labels (a ``ClassLabel``, integers or text); null: pictures without labels.
    """

    needs = ("datasets", "hf")

    def __init__(
        self,
        path: str,
        train: str | None = None,
        val: str | None = "auto",
        image_column: str = "image",
        label_column: str | None = "label",
    ) -> None:
        """Stores the arguments, which are the class's; nothing is loaded yet."""
        self.path = expanded(path)
        self.given = {"train": train, "val": val}
        self.columns = image_column, label_column
        self._tables: dict[str, HubRows] = {}  # by the name of the data set's split

    def check_there(self) -> None:
        """See :meth:`Source.check_there`: the hub may be asked whether it has the data set."""
        check_dataset(self.path, "data.source.path")

    def load(self, split: str) -> Split:
        """See :meth:`Source.load`. Any other split is one that the data set has.

        Raises:
            UserError: no such split or pictures, or labels that are missing or unknown.
        """
        train = self._rows("train")
        name = self._name(split)
        if name is None:
            there = ", ".join(self._split_names)
            raise UserError(
                f"split: no pictures of '{split}' in {self.path}, which has the splits {there}"
            )
        table = self._rows(split)
        pictures = ((f"{self.path}[{i}] ({name})", label) for i, label in enumerate(table.labels))
        remedy = "data.source.label_column=null"
        found = numbered(pictures, train.labels, f"data.source.{split}", remedy, train.names)
        self.classes = found.classes
        self.note(*found.notes)
        image_column, _ = self.columns
        split_name = "" if split == "train" else f" ({name})"
        return _HuggingFaceSplit(table.data, image_column, Column(found.ids), self.path, split_name)

    def _rows(self, split: str) -> HubRows:
        """The rows of a split and their labels; loaded once. A note says where a column ``split`` is not read.

        Raises:
            UserError: it can't be loaded, lacks a column, or has rows of several labels.
        """
        name = str(self._name(split))
        if name not in self._tables:
            data = self._table(name)
            labels, names = self._labels(data, f"data.source.{split}: {self.path} ({name})")
            self._tables[name] = HubRows(data, labels, names)
            if "split" in data.column_names:
                self.note(f"{split}: the column split is not read: a data set names its own splits")
        return self._tables[name]

    def _table(self, name: str) -> HubTable:
        """A split of the data set with its pictures as encoded bytes.

        Raises:
            UserError: it can't be loaded, lacks a column of pictures or labels, or that of pictures holds none.
        """
        import datasets

        where = f"{self.path} ({name})"
        arguments = self._arguments(name)
        with without_retries(self.path) as unreachable:
            try:
                builder: Any = datasets.load_dataset_builder(*arguments)
                if self._local is None:
                    _check_format(builder)
                builder.download_and_prepare()
                data = builder.as_dataset(split=name)
            # The hub, the file system and the format readers raise many kinds.
            except Exception as error:
                why = first_line(error)
                if unreachable:
                    why = f"no folder of this name, and {unreachable}; {REMEDIES}"
                raise UserError(f"data.source: {where}: {why}") from error
        image, label = self.columns
        for key, column in (("image_column", image), ("label_column", label)):
            if column is not None and column not in data.column_names:
                names = ", ".join(data.column_names)[:120]
                raise UserError(
                    f"data.source.{key}: {where} has no column '{column}' (it has {names})"
                )
        try:
            data = data.cast_column(image, datasets.Image(decode=False))
            data.features  # noqa: B018 - a column that is no picture is refused here
        except Exception as error:  # many kinds, by the column's type
            raise UserError(
                f"data.source.image_column: '{image}' of {where} holds no pictures ({first_line(error)})"
            ) from error
        return data

    def _labels(self, data: HubTable, where: str) -> tuple[list[str], list[str] | None]:
        """The label of each row, "" without one; of a column of class ids also the classes' names.

        Raises:
            UserError: a row has several labels; it begins with ``where``.
        """
        column = self.columns[1]
        if column is None:
            return [""] * len(data), None
        # -1: no label, as datasets write it
        values = [None if value == -1 else value for value in data[column][:]]
        names = getattr(data.features[column], "names", None)
        if names is not None:
            names = [plain_label(name) for name in names]
            return ["" if value is None else names[value] for value in values], names
        for i, value in enumerate(values):
            if isinstance(value, list):
                raise UserError(
                    f"{where} gives {self.path}[{i}] {len(value)} labels ({str(value)[1:-1]:.60}); a list takes several "
                    "(data.source=Manifest data.source.multi_label=true)"
                )
        return [plain_label(value) for value in values], None

    @cached_property
    def _local(self) -> LocalFiles | None:
        """The files of a folder; None for a name on the hub.

        Raises:
            UserError: the folder has no file that is read, or one that is refused.
        """
        if not Path(self.path).is_dir():
            return None
        files = local_files(self.path)
        if files.unread:
            self.note(f"{files.unread} file(s) that name no split are not read")
        return files

    def _arguments(self, name: str = "") -> list[Any]:
        """The arguments of ``load_dataset_builder``, by position.

        They are the name on the hub; for a folder its files' reader, two that are not given, and the files by split, with
        the stamp of each, so that a changed file is read again. Of files that list their classes themselves
        (:data:`TYPED`) only those of the split ``name``: ``datasets`` reads all ids by the list in the first file.

        Raises:
            UserError: the path is the name of a reader of ``datasets``.
        """
        from datasets.data_files import DataFilesList
        from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as readers

        if self._local is None:
            if self.path in readers:  # some run code, and all read the present folder
                raise UserError(
                    f"data.source.path: must be a folder or a name on the hub, got '{self.path}'"
                )
            return [self.path]

        by_split = {}
        splits = self._local.by_split
        if self._local.reader in TYPED and name in splits:
            splits = {name: splits[name]}
        for split, files in splits.items():
            stamps = [(stamp_of_file(file),) for file in files]  # another state, another table
            by_split[split] = DataFilesList(files, stamps)
        return [self._local.reader, None, None, by_split]

    # -- which splits there are --------------------------------------------------------------------------------------
    @cached_property
    def _split_names(self) -> list[str]:
        """Names of the data set's splits, asked for once (of the hub too); none where they can't be listed: :meth:`load`
        raises the error.
        """
        if self._local is not None:
            return list(self._local.by_split)
        try:
            import datasets

            with without_retries(self.path):
                return list(datasets.get_dataset_split_names(*self._arguments()))
        except Exception:  # the hub, the file system and the format readers raise many kinds
            return []

    def _name(self, split: str) -> str | None:
        """The data set's name of a split; None where it has no such split, and for ``val`` where the setting is null.

        The name in the settings counts first (of local files the split that it means), then ``split`` itself where a split
        has that name, then a name that means it. ``train`` is returned where none does: loading it reports that.

        Raises:
            UserError: two names fit equally well.
        """
        given = self.given.get(split)
        if given not in (None, "auto"):
            return given if self._local is None else split_of(given) or given
        if split == "val" and given is None:
            return None
        name = choose_split_name(self._split_names, split, "data.source", self.path)
        if name is None and split == "train":
            return split
        return split if split in self._split_names else name

    def has(self, split: str) -> bool:
        """Whether the set has the split; a name in the settings counts. May send a request to the hub."""
        return self._name(split) is not None

    def describe(self) -> str:
        """The set's path."""
        return f"HuggingFace {self.path}"


def local_files(folder: str) -> LocalFiles:
    """The files of a local data set, of the format that most of them have, by the split that their paths name.

    Where no file names a split, all are of ``train``; else those that name none are only counted. Files with the columns
    of pictures (:data:`OF_PICTURES`) belong to the split that they name, else to all.

    Raises:
        UserError: no such file, or one that is refused (a table: :func:`~kd.storage.parquet_files.check_parquet`).
    """
    reader, files, beside = _files_of_a_reader(folder)
    by_split: dict[str, list[str]] = {}
    without = []
    for file in files:
        split = _split_of_file(folder, file)
        if split is None:
            without.append(file)
        else:
            by_split.setdefault(split, []).append(file)
    if without:
        _check_card(folder, without[0])
    if not by_split:
        return LocalFiles(reader, {"train": [*without, *beside]}, 0)
    for file in beside:
        own = _split_of_file(folder, file)
        for split in [own] if own else by_split:
            by_split.setdefault(split, []).append(file)
    return LocalFiles(reader, by_split, len(without))


def _files_of_a_reader(folder: str) -> tuple[str, list[str], list[str]]:
    """The reader of ``datasets`` that most files of a folder need, these files, and those with the columns of pictures.

    Raises:
        UserError: no such files, or one that is refused: it is not a regular file, or a damaged parquet file, or one that
            lists other classes than the first of its split, by whose list ``datasets`` reads all class ids.
    """
    by_reader: dict[str, list[str]] = {}
    lists: dict[str | None, list[bytes]] = {}
    beside = []
    for path in map(Path, sorted(files_under(folder))):
        if path.name in SETTINGS:
            continue
        reader = "imagefolder" if is_picture(path.name) else TABLES.get(path.suffix)
        if path.suffix == ".parquet":
            names = check_parquet(path)
            split = _split_of_file(folder, str(path))
            if names and lists.setdefault(split, names) != names:
                raise UserError(
                    f"data.source.path: {path} lists other classes than the first file of its split, by whose list its "
                    "class ids would be read"
                )
        elif reader:
            regular(path)
        if path.name in OF_PICTURES:
            beside.append(str(path))
        elif reader:
            by_reader.setdefault(reader, []).append(str(path))
    if not by_reader:
        raise UserError(
            f"data.source.path: {folder} has no files of a data set ({', '.join(TABLES)}, pictures)"
        )
    reader, files = max(by_reader.items(), key=lambda item: len(item[1]))
    return reader, files, beside if reader == "imagefolder" else []


def _split_of_file(folder: str, file: str) -> str | None:
    """The split that a folder below the data set's, or the file's name, means; None without one."""
    parts = Path(file).relative_to(folder).with_suffix("").parts
    return next(filter(None, map(split_of, parts)), None)


def _check_card(folder: str, file: str) -> None:
    """Refuses, by a UserError, a folder whose card says which files are a split; ``file``: one whose name says none."""
    for name in CARDS:
        card = Path(folder, name)
        if card.is_file() and "data_files" in text_of(card, errors="replace"):
            raise UserError(
                f"data.source.path: {card} says which splits its files are; kd goes by their names: "
                f"{Path(file).relative_to(folder)} must name its split (train, val, test)"
            )


def _check_format(builder: object) -> None:
    """Refuses a reader of ``datasets`` that is not one of :data:`~kd.storage.hub.FORMATS`; a ValueError."""
    format_name = type(builder).__module__.rpartition(".")[2]
    if format_name not in FORMATS:
        raise ValueError(f"its files are {format_name}, not one of {', '.join(FORMATS)}")


@dataclass(eq=False)
class _HuggingFaceSplit:
    """Some rows of a data set as a :class:`~kd.data.sources.base.Split`; pictures are decoded elsewhere."""

    data: HubTable
    """The rows, with the pictures still encoded."""
    column: str
    """That holds them."""
    targets: Column
    """Class ids, by row."""
    path: str
    """Of the data set: picture ``i`` of the training split is called ``path[i]``."""
    split_name: str
    """Follows that name in other splits, which are other pictures (``path[i] (val)``)."""

    def read(self, i: int) -> bytes:
        """The encoded bytes of picture ``i``: from the table itself, or from the file that it names (an OSError where that
        can't be read, or the row has no picture).
        """
        picture = self.data[i][self.column] or {"bytes": None, "path": None}
        if picture["bytes"] is not None:
            return picture["bytes"]
        if not picture["path"]:
            raise OSError("its row has no picture")
        with open_regular(picture["path"], MAX_BYTES) as file:
            return file.read()

    @cached_property
    def sizes(self) -> list[int | str]:
        """Bytes of each picture in the table, which is not read for them, or in the file that its row names; else ""."""
        from pyarrow import compute

        contents, paths = self.data.data.column(self.column).flatten()
        lengths = compute.binary_length(contents).to_pylist()
        for i, path in enumerate(paths.to_pylist()):
            lengths[i] = lengths[i] or stamp_of_file(str(path)).partition("\0")[0]
        return list(lengths)

    def stamp(self, i: int) -> str:
        """The same for all pictures of the split: ``datasets``' hash of what it has built these rows from."""
        return str(self.data._fingerprint)

    def name(self, i: int) -> str:
        return f"{self.path}[{i}]{self.split_name}"

    def target(self, i: int) -> Target:
        return self.targets[i]

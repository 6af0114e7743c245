"""Which split a name means (train, val or test): of a folder, of a shard, of a data set's part, of a list's column.

Every source finds its splits here. A guess that other evidence contradicts is refused, with the key that decides it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kd.errors import UserError

Column = str | int
"""A column of a list: its name, or its number where there is no header."""

WORDS = {
    "train": "train", "training": "train", "trn": "train", "trainval": "train",
    "val": "val", "valid": "val", "validation": "val", "validate": "val", "validating": "val", "vali": "val",
    "dev": "val", "devel": "val", "development": "val", "eval": "val", "evaluation": "val", "holdout": "val",
    "test": "test", "testing": "test", "tst": "test",
}  # fmt: skip
"""The words that name a split, in lower case."""

BESIDE = {
    "set", "sets", "data", "dataset", "split", "part", "folder", "dir", "seg", "images", "image", "imgs", "img",
    "pics", "pictures", "photos",
}  # fmt: skip
"""Words that may accompany such a word: ``seg_train``, ``Training Set``, ``images-val``. Numbers may too: train2017."""

USUAL = ("train", "val", "valid", "validation", "test")
"""Names that are taken before any other name of the same split, in this order."""

SPLIT_COLUMNS = {
    "split", "splits", "subset", "set", "partition", "phase", "usage", "data_split", "dataset_split", "split_name",
    "data_set", "dataset",
}  # fmt: skip
"""Names of columns that usually name each row's split; a column of any name does so if all its values are splits."""

TRUE = {"1", "1.0", "true", "yes", "t", "y"}
FALSE = {"0", "0.0", "false", "no", "f", "n", ""}


class Unfit(ValueError):
    """What is wrong with a list, as the end of a sentence that begins with its name: the source makes a UserError of it."""


def split_of(name: object) -> str | None:
    """The split that a name means: ``train``, ``val`` or ``test``; None for any other name.

    >>> [split_of(name) for name in ("Training", "seg_test", "val_set", "TrainSet", "train2017", "Dev", "trainval")]
    ['train', 'test', 'val', 'train', 'train', 'val', 'train']
    >>> [split_of(name) for name in ("test tube", "bullet_train", "cat", "train_test")]
    [None, None, None, None]
    """
    meanings: set[str] = set()
    for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+", str(name)):
        lower = word.lower()
        stem = re.sub(r"(set|data|images|split)$", "", lower)
        meaning = WORDS.get(lower) or WORDS.get(stem)
        if meaning is not None:
            meanings.add(meaning)
        elif not (lower in BESIDE or lower.isdecimal()):
            return None
    if meanings == {"train", "val"}:  # as of PASCAL VOC's trainval
        return "train"
    if len(meanings) == 1:
        return meanings.pop()
    return None


def choose(
    names: Iterable[str], split: str, key: str, where: str, has_setting: bool = True
) -> str | None:
    """Which of some names is the split ``train``, ``val`` or ``test``; None where no name means it.

    A test split validates where there is no validation split.

    Args:
        names: of folders, or of a data set's parts.
        split: that is wanted.
        key: the setting that names ``where``; it begins the message.
        where: the folder or data set that has the names, for the message.
        has_setting: whether the source has a setting ``data.source.SPLIT`` that names the split.

    Raises:
        UserError: two names fit equally well.

    >>> choose(["Testing", "valid", "Training", "cat"], "val", "data.source", "DIR")
    'valid'
    """
    wanted = ("val", "test") if split == "val" else (split,)
    fitting = [name for name in names if split_of(name) in wanted]
    if not fitting:
        return None

    def rank(name: str) -> tuple[int, int]:
        """Where a name comes in the search: by its split, in the order wanted, then the usual names first."""
        if name in USUAL:
            usual = USUAL.index(name)
        else:
            usual = len(USUAL)
        return wanted.index(split_of(name) or ""), usual

    first, *later = sorted(fitting, key=lambda name: (rank(name), name))
    equal = [name for name in later if rank(name) == rank(first)]
    if equal:
        among = ", ".join([first, *equal])
        remedy = "rename or move all but one"
        if has_setting:
            remedy = f"data.source.{split}=NAME says which"
        raise UserError(
            f"{key}: {where} has several splits that could be {split}: {among}; {remedy}"
        )
    return first


def may_name_split(column: Column) -> bool:
    """Whether a column of this name usually says which split a row belongs to: ``subset``, ``is_valid``."""
    name = re.sub(r"[\W]+", "_", str(column).strip().lower())
    return name in SPLIT_COLUMNS or split_of(re.sub(r"^(is|in|for|use)_+", "", name)) is not None


class RowSplits(NamedTuple):
    """The split of each row of a list, and notes for the user on how it was found."""

    splits: list[str | None] | None  # None: no column names splits. A row of None is in no split
    notes: list[str]
    columns: Sequence[Column] = ()  # those that name the splits


def splits_by_row(
    columns: Mapping[Column, Sequence[object]], wanted: Column | None = None, one_hot: bool = False
) -> RowSplits:
    """Finds the column that names each row's split: ``split=train``, ``subset=testing``, ``is_valid=True``.

    Args:
        columns: the values of each column but those of paths and labels.
        wanted: the column that a user has named; ``"none"``: no column names splits; None: it is found.
        one_hot: whether columns of 0 and 1 may be classes: then ``train`` is a class, unless another column of yes and no
            is about a split, or ``wanted`` is given.

    Raises:
        Unfit: two columns contradict each other, a column names splits in some rows and something else in others
            (:func:`_named_splits`), columns of yes and no put a row into two splits, or the column ``wanted`` is missing
            or names no splits.
    """
    if wanted == "none":
        return RowSplits(splits=None, notes=[])
    if wanted is not None:
        if wanted not in columns:
            there = ", ".join(map(str, columns))[:120]
            raise Unfit(f"has no column {wanted} (data.source.split_column; it has {there})")
        columns = {wanted: columns[wanted]}
    by_column: dict[Column, list[str | None]] = {}
    notes: list[str] = []
    for column, values in columns.items():
        splits, note = _named_splits(column, values, wanted is not None)
        if splits is not None:
            by_column[column] = splits
        notes += [note] if note else []
    flags = _flags(columns)
    if one_hot and [*flags] == ["train"] and wanted is None:
        flags = {}
    if flags:  # is_valid, is_test: each a column of yes and no
        columns_of_flags = {column: columns[column] for column in flags}
        by_column[", ".join(map(str, flags))] = _flagged(columns_of_flags, flags)
    if not by_column and wanted is not None:
        raise Unfit(
            f"names no splits in its column {wanted} (data.source.split_column), but {_some(columns[wanted])}"
        )
    if not by_column:
        return RowSplits(splits=None, notes=notes)
    first, *others = by_column
    for other in others:
        if by_column[other] != by_column[first]:
            raise Unfit(
                f"names splits in columns that differ: {first}, and {other}; data.source.split_column=NAME "
                "says which column is right"
            )
    used = [*(column for column in by_column if column in columns), *flags]
    return RowSplits(
        splits=by_column[first], notes=[*notes, _counted(first, by_column[first])], columns=used
    )


def _named_splits(
    column: Column, values: Sequence[object], named: bool
) -> tuple[list[str | None] | None, str]:
    """The split of each row as a column of words names it, None where it names none; and a note, "" without one.

    Args:
        column: its name or number.
        values: its cells.
        named: whether the user has named the column (``data.source.split_column``).

    Raises:
        Unfit: it names splits in some rows and something else in others; of a column that is neither named nor called as
            :data:`SPLIT_COLUMNS` are, two or more splits in more than half of the rows.
    """
    usual = named or (
        isinstance(column, str) and re.sub(r"[\W]+", "_", column.strip().lower()) in SPLIT_COLUMNS
    )
    texts = ["" if value is None else str(value).strip() for value in values]
    splits = [split_of(text) for text in texts]
    strangers = [text for text, split in zip(texts, splits, strict=True) if split is None]
    if values and not strangers:
        return list(splits), ""
    if len(strangers) < len(texts):
        several = {split for split in splits if split is not None}
        # one class of vehicles may be called "train": a column that does not usually name splits must name two
        if usual or (len(several) > 1 and len(strangers) * 2 < len(texts)):
            raise Unfit(
                f"names splits in its column {column}, but {_some(strangers)} in {len(strangers)} of {len(texts)} "
                "rows; write train, val or test there, or data.source.split_column=none reads the column as no split"
            )
    if usual and texts and not _flag(column, values):
        return None, f"column '{column}' is not read as splits: it holds {_some(texts)}"
    if isinstance(column, str) and column.strip().lower() in ("fold", "kfold", "folds"):
        return (
            None,
            f"column '{column}' ({_some(texts)}) is not used: rows of all folds are in the same split",
        )
    return None, ""


def _some(values: Iterable[object]) -> str:
    """Up to three of the different values, in quotes, for a message."""
    different: list[str] = []
    for value in values:
        text = "nothing"
        if value not in ("", None):
            text = f"'{str(value)[:30]}'"
        if text not in different:
            different.append(text)
        if len(different) > 3:
            return ", ".join(different[:3]) + " ..."
    return ", ".join(different)


def _flags(columns: Mapping[Column, Sequence[object]]) -> dict[Column, str]:
    """By column of yes and no, the split that its name is about; all other columns are left out."""
    flags = {}
    for column, values in columns.items():
        split = _flag(column, values)
        if split is not None:
            flags[column] = split
    return flags


def _flag(column: Column, values: Sequence[object]) -> str | None:
    """The split that a column of yes and no is about; None for other columns.

    >>> [_flag(name, ["True", "False"]) for name in ("is_valid", "isTest", "for test", "train", "island")]
    ['val', 'test', 'test', 'train', None]
    """
    if not isinstance(column, str):
        return None
    texts = {"" if value is None else str(value).strip().lower() for value in values}
    if not texts or not texts <= TRUE | FALSE:
        return None
    # is_valid, isValid
    without_is = re.sub(r"^(?i:is|in|for|use)([\W_]+|(?=[A-Z]))", "", column.strip())
    return split_of(without_is)


def _flagged(
    columns: Mapping[Column, Sequence[object]], flags: Mapping[Column, str]
) -> list[str | None]:
    """Rows' splits by columns of yes and no.

    A row without a yes is trained on. Where a column says which rows are trained on (``train``), a row without a yes is in
    no split, or validates if that is the only column.

    Args:
        columns: the cells of each.
        flags: the split that each is about, in the same order.

    Raises:
        Unfit: a row with two splits.
    """
    default: str | None = "train"
    if "train" in flags.values():
        default = None
        if len(flags) == 1:
            default = "val"
    splits: list[str | None] = []
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        yes = set()
        for value, split in zip(row, flags.values(), strict=True):
            if str(value).strip().lower() in TRUE:
                yes.add(split)
        if len(yes) > 1:
            raise Unfit(
                f"puts row {number + 1} into {len(yes)} splits: {', '.join(sorted(yes))} "
                f"(columns {', '.join(map(str, flags))})"
            )
        splits.append(yes.pop() if yes else default)
    return splits


def _counted(column: Column, splits: Sequence[str | None]) -> str:
    """The note on a column that names splits: how many rows it gives to each."""
    counts = Counter(splits)
    texts = []
    for split in ("train", "val", "test"):
        if counts[split]:
            texts.append(f"{counts[split]} {split}")
    if counts[None]:
        texts.append(f"{counts[None]} in no split, left out")
    return f"column '{column}' names the splits: {', '.join(texts)}"


def numbers_in(splits: Sequence[str | None], split: str) -> list[int]:
    """Numbers of the rows of a split; a test split validates where there is no validation split."""
    if split == "val" and "val" not in splits:
        split = "test"
    return [i for i, name in enumerate(splits) if name == split]

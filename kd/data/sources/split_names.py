"""Which split a name means (train, val or test): of a folder, of a shard, of a data set's part, in a column of splits.

Every source finds its splits here. Where two names fit, the message names the key that decides.
"""

import re
from collections.abc import Iterable, Mapping

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

SPLITS = "split"
"""The column that names each row's split where no setting names another."""
TRUE = {"1", "1.0", "true", "yes"}
FALSE = {"0", "0.0", "false", "no"}


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
    ranks: dict[str, tuple[int, int]] = {}
    for name in sorted(names):
        meaning = split_of(name)
        if meaning in wanted:
            usual = USUAL.index(name) if name in USUAL else len(USUAL)
            ranks[name] = (wanted.index(meaning), usual)
    if not ranks:
        return None
    best = min(ranks.values())
    first, *equal = [name for name, rank in ranks.items() if rank == best]
    if equal:
        among = ", ".join([first, *equal])
        remedy = "rename or move all but one"
        if has_setting:
            remedy = f"data.source.{split}=NAME says which"
        raise UserError(
            f"{key}: {where} has several splits that could be {split}: {among}; {remedy}"
        )
    return first


def split_in(column: Column, value: object) -> str | None:
    """The split that a cell names: by its word, or by yes and no in a column such as ``is_valid``; None for other cells.

    >>> split_in("subset", "Testing"), split_in("is_valid", "True"), split_in("is_valid", 0), split_in("age", 0)
    ('test', 'val', 'train', None)
    """
    text = str(value).strip()
    flag = text.lower()
    if flag not in TRUE | FALSE:
        return split_of(text)
    without_is = re.sub(r"^(?i:is)([\W_]+|(?=[A-Z]))", "", str(column).strip())
    named = split_of(without_is)
    if named is None or flag in TRUE:
        return named
    return "val" if named == "train" else "train"


class RowSplits:
    """Finds each row's split by the column that a setting names, or by the column ``split``.

    Args:
        wanted: the setting ``data.source.split_column``: a column; ``none``: no column names splits; None: ``split``.
        used: columns that hold something else.
    """

    def __init__(self, wanted: Column | None, used: Iterable[Column]) -> None:
        """Stores what columns are for; the arguments are the class's."""
        self.wanted = wanted
        self.others: dict[Column, set[str | None]] = {}  # what the cells of each other column mean
        self.used = set(used)

    def of(self, row: Mapping[Column, object]) -> str | None:
        """The split of a row; None where no column names splits.

        Raises:
            Unfit: a cell of the column names no split, or there is no such column.
        """
        column = SPLITS if self.wanted is None else self.wanted
        if column in row and column not in self.used:
            split = split_in(column, row[column])
            if split is None:
                raise Unfit(
                    f"names splits in its column {column}, but has '{row[column]}' there; write train, val or test, or "
                    "data.source.split_column=none reads the column as no split"
                )
            return split
        if self.wanted is None:
            for other in row.keys() - self.used:
                meanings = self.others.setdefault(other, set())
                if None not in meanings:
                    meanings.add(split_in(other, row[other]))
        elif self.wanted != "none":
            there = ", ".join(map(str, row))[:120]
            raise Unfit(f"has no column {column} (data.source.split_column; it has {there})")
        return None

    def check(self) -> None:
        """Refuses a column that names splits in all rows without a setting that says so; call it after the last row.

        Raises:
            Unfit: names the column, and the setting.
        """
        for column, meanings in self.others.items():
            if None not in meanings and len(meanings) > 1:
                raise Unfit(
                    f"has a column {column} that may name splits: data.source.split_column={column} reads it, "
                    "data.source.split_column=none takes all rows"
                )

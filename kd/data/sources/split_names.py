"""Which split a name means (train, val or test): of a folder, of a shard, of a data set's part, in a column of splits.

Every source finds its splits here. Where two names fit, the message names the key that decides.
"""

import re
from collections.abc import Collection

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
    "pics", "pictures", "photos", "of",
}  # fmt: skip
"""Words that may accompany such a word: ``seg_train``, ``Training Set``, ``images-val``. Numbers may too: train2017,
train-00000-of-00002."""

USUAL = ("train", "val", "valid", "validation", "test")
"""Names that are taken before any other name of the same split, in this order."""


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


def choose_split_name(
    names: Collection[str], split: str, key: str, where: str, has_setting: bool = True
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

    >>> choose_split_name(["Testing", "valid", "Training", "cat"], "val", "data.source", "DIR")
    'valid'
    """
    for meaning in ("val", "test") if split == "val" else (split,):
        fitting = sorted(name for name in names if split_of(name) == meaning)
        usual = [name for name in USUAL if name in fitting]
        if usual or len(fitting) == 1:
            return [*usual, *fitting][0]
        if fitting:
            remedy = "rename or move all but one"
            if has_setting:
                remedy = f"data.source.{split}=NAME says which"
            raise UserError(
                f"{key}: {where} has several splits that could be {split}: {', '.join(fitting)}; {remedy}"
            )
    return None


def column_of_splits(wanted: Column | None, columns: Collection[Column]) -> Column | None:
    """The column that names each row's split; None where there is none.

    Args:
        wanted: the setting ``data.source.split_column``: a column; ``none``: no column; None: ``split`` where there is one.
        columns: those of the list that hold neither paths nor labels.

    Raises:
        Unfit: there is no such column.
    """
    column = "split" if wanted is None else wanted
    if column in columns:
        return column
    if wanted in (None, "none"):
        return None
    there = ", ".join(map(str, columns))[:120]
    raise Unfit(f"has no column {column} (data.source.split_column; it has {there})")


def split_in(column: Column, cell: object) -> str:
    """The split that a cell of a column of splits names.

    Raises:
        Unfit: it names none.
    """
    split = split_of(cell)
    if split is None:
        raise Unfit(
            f"names splits in its column {column}, but has '{cell}' there; write train, val or test, or "
            "data.source.split_column=none reads the column as no split"
        )
    return split

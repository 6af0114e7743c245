"""The source ``Manifest``: lists of paths and labels."""

import csv
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kd.data.sources.base import Source, bytes_of
from kd.data.sources.files import UNLABELLED, FileSplit, printable
from kd.data.sources.places import DISK, Place, Store, joined, list_at
from kd.errors import UserError
from kd.object_store import is_url


class Manifest(Source):
    """Lists of (path, label): CSV with a header ``path,label``, or JSON lines ``{"path": ..., "label": ...}``.

    Labels are class names; ids are their sorted order in the training list, by value where all are whole numbers.
    Relative paths start at ``image_dir``. Lists of the one column ``path`` are pictures without labels. Lists, folder
    and paths may be URLs (``s3://bucket/train.csv``; extra ``stream``).

    Args:
        train: the training list (``.csv``, ``.jsonl``).
        val: the validation list; without one a part of the training list is held out (``data.val_fraction``).
        image_dir: folder that relative paths start at; default: the list's own folder.
        multi_label: a picture has any number of labels, separated by ``;`` (or a JSON list).
        cache_gb: as of :class:`~kd.data.sources.ImageFolder`.
    """

    def __init__(
        self,
        train: str,
        val: str | None = None,
        image_dir: str | None = None,
        multi_label: bool = False,
        cache_gb: float | None = None,
    ) -> None:
        self.cache_bytes = bytes_of(cache_gb)
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
        paths = [path for path, _ in rows]
        place = self._place(split, paths)
        if not self.classes:
            return FileSplit(paths, [UNLABELLED] * len(rows), place=place)
        targets = [[ids[label] for label in labels] for _, labels in rows]
        return FileSplit(paths, targets if self.multi_label else [t[0] for t in targets], place=place)

    def _place(self, split: str, paths: list[str]) -> Place:
        urls = [path for path in paths if is_url(path)]
        return Store.holding(str(self.lists["train"]), urls, f"data.source.{split}", self.cache_bytes) if urls else DISK

    def _labels(self, given: object) -> list[str]:
        if not self.multi_label:
            return [] if given is None or not str(given).strip() else [str(given)]
        parts = given if isinstance(given, list) else str(given or "").split(";")
        return [str(part).strip() for part in parts if str(part).strip()]

    def _rows(self, split: str) -> list[tuple[str, list[str]]]:
        key = f"data.source.{split}"
        if split not in self.lists:
            raise UserError(f"data.source: a manifest has the splits train and val, not '{split}'")
        file = joined(self.lists[split] or "")
        read = list_at(file, key)
        root = self.image_dir or (joined(file, "..") if is_url(file) else str(Path(file).parent))
        try:
            lines = io.StringIO(read.decode(), newline="")
            if Path(file).suffix == ".csv":
                records: list[dict[str, Any]] = list(csv.DictReader(lines))
            else:
                records = [json.loads(line) for line in lines if line.strip()]
            without = all(set(r) == {"path"} for r in records)
            rows = [(joined(root, r["path"]), [] if without else self._labels(r["label"])) for r in records]
            may_lack = without or self.multi_label
            bare = None if may_lack else next((path for path, labels in rows if not labels), None)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{key}: {file} needs the columns path and label ({type(error).__name__}: {error})"
            ) from error
        if not rows:
            raise UserError(f"{key}: {file} lists no pictures")
        if bare:
            raise UserError(f"{key}: {file}: {printable(bare)} has no label")
        return rows

    def has(self, split: str) -> bool:
        """See :meth:`Source.has`."""
        return self.lists.get(split) is not None

    def describe(self) -> str:
        """One line."""
        return f"Manifest {', '.join(str(file) for file in self.lists.values() if file is not None)}"


def in_order(labels: Iterable[str]) -> list[str]:
    """Labels sorted by name; by value where all are whole numbers, as the column of class ids that they then are.

    >>> in_order(["10", "9"]), in_order(["10", "9", "b"])
    (['9', '10'], ['10', '9', 'b'])
    """
    names = sorted(labels)
    return sorted(names, key=int) if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names) else names

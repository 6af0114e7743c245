"""The source ``HuggingFace``: a data set of the hub, or a local one (extra ``hf``)."""

from typing import Any

from kd.data.pictures import MAX_BYTES
from kd.data.sources.base import Source, Split
from kd.data.sources.files import UNLABELLED
from kd.errors import UserError, first_line, needs_extra
from kd.storage.elsewhere import open_regular


class HuggingFace(Source):
    """A Hugging Face data set with a picture and a label column (extra ``hf``).

    Args:
        path: as in ``datasets.load_dataset``: a name on the hub, or a local folder.
        train: its training split.
        val: its validation split; null where it has none, and a part of train is held out (``data.val_fraction``).
        image_column: column of pictures.
        label_column: column of class ids (a ``ClassLabel``, or integers); null: pictures without labels.
    """

    def __init__(
        self,
        path: str,
        train: str = "train",
        val: str | None = "validation",
        image_column: str = "image",
        label_column: str | None = "label",
    ) -> None:
        self.path, self.splits = path, {"train": train, "val": val}
        self.columns = image_column, label_column

    def load(self, split: str) -> Split:
        """Reads a split with the package ``datasets``; pictures stay encoded until they are read.

        Raises:
            UserError: the extra is not installed, or the set, split or column can't be read.
        """
        try:
            import datasets
        except ImportError as error:
            raise UserError(f"data.source: HuggingFace {needs_extra('hf')}") from error
        image, label = self.columns
        try:
            data = datasets.load_dataset(self.path, split=self.splits.get(split, split))
            data = data.cast_column(image, datasets.Image(decode=False))
            kind = data.features[label] if label else None
            targets = [int(t) for t in data[label]] if label else [UNLABELLED] * len(data)
        except Exception as error:  # the hub, the file system and the format readers raise many kinds
            raise UserError(f"data.source: {self.path} ({split}): {first_line(error)}") from error
        self.classes = list(getattr(kind, "names", None) or [str(i) for i in range(max(targets) + 1)])
        return _HuggingFaceSplit(data, image, targets, self.path)

    def has(self, split: str) -> bool:
        """Whether the set has the split; one that was named in the settings always counts as there. May ask the hub."""
        name = self.splits.get(split, split)
        if name != "validation":  # a name that was given must be there
            return name is not None
        try:
            import datasets

            return name in datasets.get_dataset_split_names(self.path)
        except Exception:  # load() says what is wrong
            return True

    def describe(self) -> str:
        """The set's path."""
        return f"HuggingFace {self.path}"


class _HuggingFaceSplit:
    def __init__(self, data: Any, column: str, targets: list[int], path: str) -> None:
        self.data, self.column, self.targets, self.path = data, column, targets, path

    def read(self, i: int) -> bytes:
        picture = self.data[i][self.column]
        if picture["bytes"] is not None:
            return picture["bytes"]
        with open_regular(picture["path"], MAX_BYTES) as file:
            return file.read()

    def stamp(self, i: int) -> str:
        return str(self.data._fingerprint)  # datasets hashes the files that it has built the set from

    def name(self, i: int) -> str:
        return f"{self.path}[{i}]"

    def target(self, i: int) -> int:
        return self.targets[i]

"""The source ``Food101``: 101,000 photographs of dishes."""

from contextlib import nullcontext
from pathlib import Path

from kd.data.sources.base import Source
from kd.data.sources.files import FileSplit
from kd.data.sources.places import expanded
from kd.errors import UserError, first_line
from kd.machine import cache_dir
from kd.storage.objects import is_url


class Food101(Source):
    """torchvision's Food101: 101,000 photographs of 101 dishes; its test split is our ``val``.

    Args:
        data_dir: folder to keep it in (torchvision makes ``food-101`` below it); default: the user's cache folder.
        download: download it (5 GB) where it is missing.
    """

    def __init__(self, data_dir: str | None = None, download: bool = True) -> None:
        self.data_dir = expanded(data_dir) if data_dir else data_dir
        self.download = download

    def load(self, split: str) -> FileSplit:
        """Downloads the set where it is missing and ``download`` is set, under a lock: one process of a machine does, the
        others find it. Then reads the list of the split; ``val`` is the set's ``test``.

        Raises:
            UserError: the set is not there, can't be downloaded or has no such split, or ``data_dir`` is a URL.
        """
        from filelock import FileLock
        from torchvision import datasets

        if is_url(self.data_dir or ""):
            raise UserError(
                f"data.source.data_dir: must be a folder of this machine, got {self.data_dir}"
            )
        if self.data_dir:
            root = Path(self.data_dir)
        else:
            root = cache_dir()
        # Several processes start at once.
        lock = FileLock(root / "food-101.lock") if self.download else nullcontext()
        try:
            if self.download:
                root.mkdir(parents=True, exist_ok=True)
            with lock:
                data = datasets.Food101(
                    str(root), split={"val": "test"}.get(split, split), download=self.download
                )
        except (RuntimeError, OSError, ValueError) as error:
            raise UserError(f"data.source: Food101 in {root}: {first_line(error)}") from error
        self.classes = list(data.classes)
        return FileSplit(data._image_files, data._labels)

    def describe(self) -> str:
        """The set's name and folder."""
        return f"Food101 in {self.data_dir or cache_dir()}"

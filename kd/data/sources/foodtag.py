"""The source ``FoodTagMini``: the embedded food set."""

from kd.data import foodtag_mini
from kd.data.sources.base import cache_dir
from kd.data.sources.files import FileSplit
from kd.data.sources.folder import ImageFolder


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
        if not self.root:
            self.root = str(foodtag_mini.build(cache_dir(), self.train_per_class, self.val_per_class))
        return super().load(split)

    def has(self, split: str) -> bool:
        return split in self.folders  # they are drawn by load()

    def describe(self) -> str:
        return (
            f"FoodTag-mini, drawn food pictures in {self.root} (your own: data.source=ImageFolder data.source.root=DIR)"
        )

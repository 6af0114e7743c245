"""The sources ``FoodTagMini`` and ``FoodTagCalories``: the embedded food sets."""

from pathlib import Path

from kd.data import foodtag
from kd.data.sources.base import Source
from kd.data.sources.files import FileSplit
from kd.data.sources.folder import ImageFolder
from kd.data.sources.places import pictures_below
from kd.data.targets import Numbers
from kd.errors import UserError
from kd.machine import cache_dir


class FoodTagMini(ImageFolder):
    """The embedded food set: drawn on first use into the user's cache folder, see :mod:`kd.data.foodtag`.

    Args:
        train_per_class: training pictures a class.
        val_per_class: validation pictures a class.
    """

    def __init__(self, train_per_class: int = 300, val_per_class: int = 60) -> None:
        """Checks the numbers of pictures; they are drawn when they are first needed."""
        foodtag.check(train_per_class=train_per_class, val_per_class=val_per_class)
        super().__init__(root="")
        self.train_per_class = train_per_class
        self.val_per_class = val_per_class

    def load(self, split: str) -> FileSplit:
        """Draws the set where it is not drawn yet (one process of a machine does), then reads it as an image folder."""
        if not self.root:
            self.root = str(foodtag.build(cache_dir(), self.train_per_class, self.val_per_class))
        return super().load(split)

    def has(self, split: str) -> bool:
        """Whether it is ``train`` or ``val``: :meth:`load` draws both."""
        return split in self.folders

    def describe(self) -> str:
        """The set's name and folder ("" before :meth:`load`), and how one's own pictures are given."""
        return f"FoodTag-mini, drawn food pictures in {self.root} (your own: data.source=ImageFolder data.source.root=DIR)"


class FoodTagCalories(Source):
    """Drawn food in portions of any size; the target is what the portion has in kcal (``model.task=Regression``).

    Args:
        train_per_class: training pictures of each food.
        val_per_class: validation pictures of each food.
    """

    kind = Numbers()

    def __init__(self, train_per_class: int = 300, val_per_class: int = 60) -> None:
        """Checks the numbers of pictures; they are drawn when they are first needed."""
        foodtag.check(train_per_class=train_per_class, val_per_class=val_per_class)
        self.train_per_class = train_per_class
        self.val_per_class = val_per_class
        self.classes = ["calories"]

    def load(self, split: str) -> FileSplit:
        """Draws the set where it is not drawn yet (one process of a machine does); the target of a picture is ``[kcal]``,
        by the class and seed in its path.

        Raises:
            UserError: another split than ``train`` and ``val``.
        """
        if not self.has(split):
            raise UserError(f"split: FoodTagCalories has the splits train and val, got '{split}'")
        root = foodtag.build(cache_dir(), self.train_per_class, self.val_per_class, portions=True)
        paths, _ = pictures_below(f"{root}/{split}")
        targets = []
        for path in map(Path, paths):  # .../class/seed.jpg
            label = foodtag.CLASSES.index(path.parent.name)
            seed = int(path.stem)
            calories = foodtag.calories_of(label, seed)
            targets.append([calories])
        return FileSplit(paths, targets)

    def has(self, split: str) -> bool:
        """Whether it is ``train`` or ``val``: :meth:`load` draws both."""
        return split in ("train", "val")

    def describe(self) -> str:
        """What the set is, in a line."""
        return "FoodTag-mini with portions of any size and their calories, drawn"

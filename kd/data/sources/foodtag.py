"""The sources ``FoodTagMini`` and ``FoodTagCalories``: food that a program beside kd's recipes draws."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from kd.data.sources.base import Source
from kd.data.sources.files import FileSplit
from kd.data.sources.folder import ImageFolder, labelled_folder
from kd.data.sources.places import pictures_below
from kd.data.targets import Numbers
from kd.errors import UserError
from kd.machine import cache_dir, shipped

SPLITS = ("train", "val", "test")
"""Splits that are drawn; ``test`` on its own, when a command first reads it."""
TEST_PER_CLASS = 300
"""Test pictures a class: enough for a certificate of a few points."""


@cache
def drawing_program() -> ModuleType:
    """The program that draws the pictures, ``recipes/foodtag``. It imports no torch."""
    folder = shipped("recipes") / "foodtag"
    spec = importlib.util.spec_from_file_location("kd_foodtag", folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def drawn_folder(split: str, counts: dict[str, int], portions: bool = False) -> str:
    """The folder of a split, which is drawn into the user's cache folder where it is not there yet; one process of a
    machine draws.

    Args:
        split: one of :data:`SPLITS`.
        counts: pictures a class of ``train`` and ``val``.
        portions: draw portions of any size, not the usual one.

    Raises:
        UserError: another split.
    """
    if split not in SPLITS:
        allowed = ", ".join(SPLITS)
        raise UserError(f"split: FoodTag has the splits {allowed}, got '{split}'")
    sizes = {"test": TEST_PER_CLASS} if split == "test" else counts
    root: Path = drawing_program().build(cache_dir(), sizes, portions)
    return str(root / split)


class FoodTagMini(ImageFolder):
    """Drawn food in 20 classes, in the user's cache folder since its first use.

    Args:
        train_per_class: training pictures a class.
        val_per_class: validation pictures a class.
    """

    def __init__(self, train_per_class: int = 300, val_per_class: int = 60) -> None:
        """Checks the numbers of pictures; they are drawn when they are first needed."""
        self.counts = {"train": train_per_class, "val": val_per_class}
        drawing_program().check(
            **{f"{split}_per_class": count for split, count in self.counts.items()}
        )
        super().__init__(root="")

    def load(self, split: str) -> FileSplit:
        """Draws the set where it is not drawn yet (one process of a machine does), then reads it as an image folder."""
        folder = drawn_folder(split, self.counts)
        if not self.root:
            self.root = str(Path(drawn_folder("train", self.counts)).parent)
        if split != "test":
            return super().load(split)
        super().load("train")  # names the classes
        return labelled_folder(folder, self.classes, self.key, self._noted(split))

    def has(self, split: str) -> bool:
        """Whether :meth:`load` draws the split."""
        return split in SPLITS

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
        self.counts = {"train": train_per_class, "val": val_per_class}
        drawing_program().check(
            **{f"{split}_per_class": count for split, count in self.counts.items()}
        )
        self.classes = ["calories"]

    def load(self, split: str) -> FileSplit:
        """Draws the set where it is not drawn yet (one process of a machine does); the target of a picture is ``[kcal]``,
        by the class and seed in its path.
        """
        paths, _ = pictures_below(drawn_folder(split, self.counts, portions=True))
        targets = []
        for path in map(Path, paths):  # .../class/seed.jpg
            label = drawing_program().CLASSES.index(path.parent.name)
            seed = int(path.stem)
            calories = drawing_program().calories_of(label, seed)
            targets.append([calories])
        return FileSplit(paths, targets)

    def has(self, split: str) -> bool:
        """Whether :meth:`load` draws the split."""
        return split in SPLITS

    def describe(self) -> str:
        """What the set is, in a line."""
        return "FoodTag-mini with portions of any size and their calories, drawn"

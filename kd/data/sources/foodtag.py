"""The sources ``FoodTagMini`` and ``FoodTagCalories``: food that a program beside kd's recipes draws."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from kd.data.sources.base import Source
from kd.data.sources.files import FileSplit
from kd.data.sources.folder import classes_below, labelled_folder
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


class _Drawn(Source):
    """Drawn food, in the user's cache folder since its first use.

    Args:
        train_per_class: training pictures of each food.
        val_per_class: validation pictures of each food.
    """

    portions = False
    """Whether portions of any size are drawn, not the usual one."""

    def __init__(self, train_per_class: int = 300, val_per_class: int = 60) -> None:
        """Checks the numbers of pictures; they are drawn when they are first needed."""
        self.counts = {"train": train_per_class, "val": val_per_class}
        drawing_program().check(train_per_class=train_per_class, val_per_class=val_per_class)

    def _folder(self, split: str) -> str:
        """The folder of a split, which is drawn where it is not there yet, by one process of a machine; sets ``root``.

        Raises:
            UserError: not one of :data:`SPLITS`.
        """
        if split not in SPLITS:
            allowed = ", ".join(SPLITS)
            raise UserError(f"split: FoodTag has the splits {allowed}, got '{split}'")
        sizes = {"test": TEST_PER_CLASS} if split == "test" else self.counts
        root: Path = drawing_program().build(cache_dir(), sizes, self.portions)
        self.root = str(root)
        return str(root / split)

    def has(self, split: str) -> bool:
        """Whether :meth:`load` draws the split."""
        return split in SPLITS


class FoodTagMini(_Drawn):
    """Drawn food in 20 classes, in the user's cache folder since its first use.

    Args:
        train_per_class: training pictures a class.
        val_per_class: validation pictures a class.
    """

    listed_early = True

    def load(self, split: str) -> FileSplit:
        """Draws the split where it is not drawn yet, then reads its folders of classes."""
        folder = self._folder(split)
        self.classes = classes_below(folder, self.key)
        return labelled_folder(folder, self.classes, self.key)

    def describe(self) -> str:
        """The set's name and folder ("" before :meth:`load`), and how one's own pictures are given."""
        return f"FoodTag-mini, drawn food pictures in {self.root} (your own: data.source=ImageFolder data.source.root=DIR)"


class FoodTagCalories(_Drawn):
    """Drawn food in portions of any size; the target is what the portion has in kcal (``model.task=Regression``).

    Args:
        train_per_class: training pictures of each food.
        val_per_class: validation pictures of each food.
    """

    kind = Numbers()
    portions = True

    def load(self, split: str) -> FileSplit:
        """Draws the split where it is not drawn yet; the target of a picture is ``[kcal]``, by the class and seed in its
        path.
        """
        paths, _ = pictures_below(self._folder(split))
        self.classes = ["calories"]
        program = drawing_program()
        targets = []
        for path in map(Path, paths):  # .../class/seed.jpg
            label = program.CLASSES.index(path.parent.name)
            targets.append([program.calories_of(label, int(path.stem))])
        return FileSplit(paths, targets)

    def describe(self) -> str:
        """What the set is, in a line."""
        return "FoodTag-mini with portions of any size and their calories, drawn"

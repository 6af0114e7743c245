"""Labelled pictures that features are measured on; nothing is trained with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kd.data.sources import ImageFolder
from kd.data.sources.folder import class_folders
from kd.data.sources.unlabelled import Joined
from kd.data.splits import Splits
from kd.errors import UserError


@dataclass
class Probe:
    """Where a student without a classifier is measured, by k nearest neighbours and a ridge probe of its features.

    Attributes:
        root: a folder of pictures with labels, ``root/train/<class>/*.jpg`` to look answers up in and
            ``root/val/<class>/*.jpg`` to ask for.
    """

    root: str | None = None

    def check(self) -> None:
        """Raises a UserError where one of the folders is missing or empty, or there is one class alone."""
        root, key = Path(self.root or ""), "data.probe.root"
        classes = class_folders(root / "train", key)
        class_folders(root / "val", key)
        if len(classes) == 1:
            raise UserError(f"{key}: one class ('{classes[0]}') leaves nothing to tell apart; two are needed")

    def split(self, like: Splits) -> Joined:
        """The pictures of ``train``, and behind them those of ``val``; damaged ones are treated as ``like`` says.

        Raises:
            UserError: missing or damaged pictures.
        """
        source = ImageFolder(self.root or "")
        own = Splits(source, on_bad_image=like.on_bad_image, check=like.check, max_pixels=like.max_pixels)
        with _named():
            return Joined(own.split("train"), own.split("val"))


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        told = str(error).replace("data.source.root", "data.probe.root").replace("data.source:", "data.probe.root:")
        raise UserError(told) from error

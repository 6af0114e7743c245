"""Pictures without labels, alone or beside labelled ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torchvision import tv_tensors

from kd.data.sources.base import Split, changed, stamp_of
from kd.data.sources.files import IMAGE_SUFFIXES, FileSplit, pictures_below, said
from kd.errors import UserError

UNLABELLED = -1


def unlabelled_folder(root: str) -> FileSplit:
    """All pictures below ``root``, at any depth, sorted by path; their target is -1.

    Raises:
        UserError: no such folder, or no pictures in it.
    """
    if not Path(root).is_dir():
        raise UserError(f"data.unlabeled: there is no folder {root}")
    paths, others = pictures_below(root)
    if not paths:
        raise UserError(f"data.unlabeled: no pictures below {root} ({', '.join(IMAGE_SUFFIXES)}){said(others)}")
    return FileSplit(paths, [UNLABELLED] * len(paths), others)


class Joined:
    """A labelled split, and behind it the pictures of an unlabelled one."""

    def __init__(self, labelled: Split, unlabelled: Split) -> None:
        self.parts = (labelled, unlabelled)
        self.border = len(labelled.targets)
        self.targets: Sequence[Any] = [*labelled.targets, *unlabelled.targets]

    def _at(self, i: int) -> tuple[Split, int]:
        return (self.parts[0], i) if i < self.border else (self.parts[1], i - self.border)

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``."""
        split, j = self._at(i)
        return split.read(j)

    def name(self, i: int) -> str:
        """Its name in its own split."""
        split, j = self._at(i)
        return split.name(j)

    def target(self, i: int) -> Any:
        """Its target; -1 without a label."""
        split, j = self._at(i)
        return split.target(j)

    def stamp(self, i: int) -> str:
        """Its stamp in its own split."""
        return stamp_of(*self._at(i))

    def changed(self) -> float:
        """When a picture of either part was changed last."""
        return max(map(changed, self.parts))


def unlabelled_mask(height: int, width: int, ignore: int | None) -> tv_tensors.Mask:
    """The mask of a picture without one: no class, so the task skips it; not ``ignore``, so distillation does not."""
    value = 254 if ignore == 255 else 255
    return tv_tensors.Mask(torch.full((1, height, width), value, dtype=torch.uint8))

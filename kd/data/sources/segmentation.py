"""The source ``SegmentationFolder``: pictures with a class for every pixel."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from posixpath import splitext
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Image

from kd.data.sources.arrays import Names
from kd.data.sources.base import Source
from kd.data.sources.files import FileSplit, PathLike, said
from kd.data.sources.places import (
    IMAGE_SUFFIXES,
    expanded,
    files_under,
    folders_in,
    joined,
    pictures_below,
)
from kd.data.sources.split_names import choose_split_name
from kd.data.targets import Masks
from kd.errors import UserError
from kd.storage.decoding import MAX_BYTES, BadPicture, open_picture, orientation, upright
from kd.storage.elsewhere import open_regular

if TYPE_CHECKING:
    from torchvision import tv_tensors


class MaskSplit(FileSplit):
    """Picture files, each with a mask of its size: one byte a pixel, the class id. ``targets`` is 0 for each picture."""

    def __init__(
        self,
        paths: Sequence[PathLike],
        masks: Sequence[PathLike],
        classes: int,
        ignore: int | None,
        left_out: dict[str, int] | None = None,
    ) -> None:
        """Stores pictures and masks.

        Args:
            paths: of the pictures.
            masks: of their masks, in the same order.
            classes: how many class ids a mask may hold, from 0.
            ignore: a further value that a mask may hold, of pixels that take no part; None: no such value.
            left_out: how many files beside the pictures were passed over, by ending.
        """
        super().__init__(paths, [0] * len(paths), left_out)
        self.masks = Names(map(str, masks))
        self.classes = classes
        self.ignore = ignore

    def files(self, i: int) -> list[str]:
        """Paths of picture and mask."""
        return [self.paths[i], self.masks[i]]

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``; errors as of :meth:`check_turned` and, an OSError, where it can't be read."""
        content = super().read(i)
        with suppress(BadPicture), open_picture(BytesIO(content)) as opened:  # the decoder says why
            self.check_turned(i, opened)
        return content

    @contextmanager
    def _open_mask(self, i: int) -> Iterator[Image]:
        """The mask of picture ``i``, whose header alone is read; errors as of :meth:`open`."""
        with open_regular(self.masks[i], MAX_BYTES) as stream, open_picture(stream) as mask:
            yield mask

    def check_turned(self, i: int, picture: Image) -> None:
        """Refuses a picture that its EXIF orientation turns, where it is not known whether its mask is turned with it.

        It is known where the mask has the same orientation; or where it has none, but has the width and height of the turned
        picture, which is not square.

        Args:
            i: its number.
            picture: opened.

        Raises:
            RuntimeError: names both orientations, and the mask.
        """
        turn = orientation(picture)
        if turn == 1:
            return
        with self._open_mask(i) as mask:
            turn_of_mask = orientation(mask)
            is_upright = turn >= 5 and mask.size == picture.size[::-1] != picture.size
        if turn_of_mask == turn or (turn_of_mask == 1 and is_upright):
            return
        raise RuntimeError(
            f"its EXIF orientation is {turn}, and that of its mask {self.masks[i]} {turn_of_mask}: whether the mask is "
            "turned too is not known; store both upright and without EXIF"
        )

    def target(self, i: int) -> "tv_tensors.Mask":
        """The mask of picture ``i``, uint8 ``(1, H, W)``, turned upright by its EXIF orientation.

        Whether it has the picture's size is not looked at here, see :meth:`check_mask`.

        Raises:
            RuntimeError: it can't be read, has colours, or a value that is neither a class id nor ignored; the message names
                its path.
        """
        import torch
        from torchvision import tv_tensors

        file = self.masks[i]
        try:
            with self._open_mask(i) as opened:
                is_grey = opened.mode in ("L", "P", "1")
                mask = np.array(upright(opened if is_grey else opened.convert("L")))
        except Exception as error:
            raise RuntimeError(f"its mask {file} can't be read: {error}") from error
        if not is_grey:
            raise RuntimeError(f"its mask {file} must hold one byte a pixel, not colours")
        ignored = [] if self.ignore is None else [self.ignore]
        odd = np.setdiff1d(mask, [*range(self.classes), *ignored])
        if odd.size:
            known = f"0..{self.classes - 1}" + f" and {self.ignore} (ignored)" * len(ignored)
            raise RuntimeError(f"its mask {file} holds the value {odd[0]}, not one of {known}")
        return tv_tensors.Mask(torch.from_numpy(mask.astype(np.uint8))[None])

    def check_mask(self, i: int, height: int, width: int) -> None:
        """Raises a RuntimeError unless the mask of picture ``i`` can be read, holds class ids and the ignored value alone,
        and is ``height`` x ``width`` pixels.
        """
        mask = self.target(i)
        mask_height, mask_width = mask.shape[1:]
        size = f"{mask_width}x{mask_height}"
        wanted = f"{width}x{height}"
        if size != wanted:
            file = self.masks[i]
            raise RuntimeError(f"its mask {file} has {size} pixels, not {wanted}")


class SegmentationFolder(Source):
    """``root/images/<split>/*.jpg`` with ``root/masks/<split>/<same name>.png``, one byte a pixel: the class id.

    Args:
        root: the folder, or its URL (extra ``stream``).
        class_names: names of the classes 0, 1, ...
        ignore_index: the id of pixels that take no part in losses and metrics.
        images: folder of the pictures below ``root``.
        masks: folder of the masks.
    """

    kind = Masks()
    listed_early = True
    takes_folder = True

    def __init__(
        self,
        root: str,
        class_names: list[str],
        ignore_index: int | None = None,
        images: str = "images",
        masks: str = "masks",
    ) -> None:
        """Checks the arguments, which are the class's; nothing is listed yet.

        Raises:
            ValueError: an argument out of its range; begins with its name.
        """
        if ignore_index is not None and not 0 <= ignore_index <= 255:
            raise ValueError(f"ignore_index must be between 0 and 255, got {ignore_index}")
        if not 2 <= len(class_names) <= 255:
            raise ValueError(f"class_names must hold 2 to 255 names, got {len(class_names)}")
        self.root = expanded(root)
        self.ignore_index = ignore_index
        self.classes = list(class_names)
        self.folders = images, masks

    def _name(self, split: str) -> str:
        """Name of a split's folder below both the pictures' and the masks' folder.

        It is ``split``; else the name of a folder of pictures that means it (``Training``, :func:`choose_split_name`); else
        ``split`` again, for which :meth:`load` finds no folder.

        Raises:
            UserError: two folders could be the split.
        """
        images = joined(self.folder, self.folders[0])
        names = folders_in(images)
        name = choose_split_name(names, split, "data.source.root", images, has_setting=False)
        return name or split

    def load(self, split: str) -> MaskSplit:
        """See :meth:`Source.load`; pictures may lie at any depth of the split's folder. No mask is opened.

        Raises:
            UserError: missing folders, no pictures, or a picture without a mask.
        """
        if not Path(self.folder).is_dir():
            raise UserError(
                f"data.source.root: folder {self.root} not found (SegmentationFolder reads images/train, images/val, "
                "masks/train and masks/val in it)"
            )
        images, masks = (joined(self.folder, folder, self._name(split)) for folder in self.folders)
        for folder in (images, masks):
            if not Path(folder).is_dir():
                raise UserError(f"data.source.root: folder {folder} not found")

        paths, left_out = pictures_below(images)
        if not paths:
            raise UserError(
                f"data.source.root: no pictures in {images} ({', '.join(IMAGE_SUFFIXES)}){said(left_out)}"
            )
        # The mask of a picture has its name.
        mask_paths = [f"{masks}{splitext(path[len(images) :])[0]}.png" for path in paths]
        missing = sorted({*mask_paths} - {*files_under(masks)})
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise UserError(f"data.source.root: mask {missing[0]} not found{more}")
        classes = len(self.classes)
        return MaskSplit(paths, mask_paths, classes, self.ignore_index, left_out)

    def has(self, split: str) -> bool:
        """Whether both folders, of pictures and of masks, have the split."""
        name = self._name(split)
        return all(Path(self.folder, folder, name).is_dir() for folder in self.folders)

    def describe(self) -> str:
        """The folder, and the folders of the splits where their names are not ``train`` and ``val``."""
        names = {split: self._name(split) for split in ("train", "val")}
        other = [f"{name} is {split}" for split, name in names.items() if name != split]
        return f"SegmentationFolder {self.root}" + "".join(f", {text}" for text in other)

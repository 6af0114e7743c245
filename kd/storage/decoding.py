"""Pictures by Pillow: opened within a bound of pixels, upright, in eight bits; and the part that validation shows."""

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from kd.errors import first_line

MAX_PIXELS = 200_000_000
MAX_BYTES = 2**30  # of an encoded picture: more is a disk image or a sparse file
LEAST_BOUND = 64
"""Scaling a picture may take the pixels of so many views, however low ``max_pixels`` is."""
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF", "JPEG2000")
"""Formats that are read; EPS would start Ghostscript."""


class BadPicture(RuntimeError):
    """Not a picture, a damaged one, or one that is not read; the message is one line."""


class TooLarge(BadPicture):
    """A picture that claims more pixels than are allowed, or takes more memory than there is."""


def open_picture(stream: IO[bytes], max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Opens an encoded picture with Pillow, which reads its header alone: ``stream`` must stay open until :func:`decoded`.

    Raises:
        TooLarge: its header claims more than ``max_pixels``, or memory runs out.
        BadPicture: not a picture.
    """
    if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own bound must not be the tighter one
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        image = Image.open(stream, formats=FORMATS)
    except Exception as error:  # its readers raise many kinds, of headers too
        raise bad_picture_of(error) from error
    width, height = image.size
    if width * height > max_pixels:
        image.close()
        raise TooLarge(f"its {width} x {height} pixels are more than data.max_pixels={max_pixels}")
    return image


def decoded(image: Image.Image) -> Image.Image:
    """An opened picture in RGB of eight bits, upright by its EXIF orientation; of 16 bits the upper eight.

    Raises:
        TooLarge: memory runs out.
        BadPicture: damaged or truncated, or samples of 32 bits.
    """
    try:
        image.load()
        return upright(_eight_bits(image))
    except Exception as error:  # Pillow's readers raise many kinds
        raise bad_picture_of(error) from error


class Frame(NamedTuple):
    """How a picture becomes a view: it is scaled to ``scaled``, of which the view begins at ``corner``."""

    scaled: tuple[int, int]
    """Width and height in pixels after scaling."""
    corner: tuple[int, int]
    """Left and top of the view in the scaled picture."""


def frame(
    picture: tuple[int, int],
    size: Sequence[int],
    crop_ratio: float | None,
    max_pixels: int = MAX_PIXELS,
) -> Frame:
    """Where the view of validation, prediction and server lies in a picture.

    Of a square view the shorter side is scaled to ``floor(size / crop_ratio)`` pixels, as by timm's transform for
    validation. For any other view the picture is stretched: both sides become the view's over ``crop_ratio``.

    Args:
        picture: its width and height in pixels.
        size: height and width of the view in pixels.
        crop_ratio: share of the scaled picture's side that the view has, in (0, 1]; None: the view is the whole
            picture, stretched, a square one too.
        max_pixels: most pixels that scaling may take, unless :data:`LEAST_BOUND` allows more.

    Raises:
        TooLarge: the picture is so long and narrow that scaling would take more memory than that.
    """
    width, height = picture
    crop_height, crop_width = size

    # the whole picture, scaled: both sides to the view's over crop_ratio; of a square view the shorter side alone
    scaled_width = math.floor(crop_width / (crop_ratio or 1))
    scaled_height = math.floor(crop_height / (crop_ratio or 1))
    if scaled_width == scaled_height and crop_ratio:
        shorter = min(picture)
        shorter_scaled = scaled_height
        if width > shorter:
            scaled_width = int(shorter_scaled * width / shorter)
        if height > shorter:
            scaled_height = int(shorter_scaled * height / shorter)

    # Pillow scales the width first: so many pixels lie between its two passes
    intermediate = scaled_width * max(scaled_height, height)
    most = max(max_pixels, LEAST_BOUND * crop_height * crop_width)
    # a pass's table holds two doubles for each pixel of the side that it scales: as much memory as 4 pixels
    if intermediate > most or 4 * max(picture) > most:
        raise TooLarge(f"its {width} x {height} pixels are too long and narrow to be scaled")

    x = round((scaled_width - crop_width) / 2)
    y = round((scaled_height - crop_height) / 2)
    return Frame((scaled_width, scaled_height), (x, y))


def _eight_bits(image: Image.Image) -> Image.Image:
    """A loaded picture of any mode in RGB of 8 bits; of 16 bits the upper 8, which Pillow itself would clip to white.

    Raises:
        BadPicture: samples of 32 bits.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # in one expression: a name would keep the copy of 16 bits in memory
        grey = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        grey.info = image.info
        return grey.convert("RGB")
    if image.mode in ("I", "F"):
        raise BadPicture("its samples have 32 bits; pictures have 8 or 16")
    if image.mode == "RGB":
        return image
    return image.convert("RGB")


def upright(image: Image.Image) -> Image.Image:
    """The picture turned by its EXIF orientation; damaged EXIF is ignored."""
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def orientation(image: Image.Image) -> int:
    """The picture's EXIF orientation: 1 is upright, also where the EXIF is damaged or missing; 5 to 8 swap its sides."""
    try:
        turn = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF says nothing of the pixels
        return 1
    return turn if turn in range(2, 9) else 1


def bad_picture_of(error: Exception) -> BadPicture:
    """Why a picture can't be read, in one line without the library's paths. The caller raises what is returned: a
    :class:`TooLarge` where pixels or memory are the reason.
    """
    if isinstance(error, BadPicture):
        return error
    if isinstance(error, UnidentifiedImageError):
        return BadPicture("not a picture, or its header is damaged")
    if isinstance(error, Image.DecompressionBombError):
        return TooLarge("it has more pixels than data.max_pixels")
    if isinstance(error, MemoryError):
        return TooLarge("its pixels need more memory than there is")
    return BadPicture(f"its data is damaged ({first_line(error)[:80]})")


# Pillow's warnings: what matters is in the error
for message in (
    ".*decompression bomb.*",
    "Truncated File Read",
    "Corrupt EXIF data.*",
    ".*Expecting to read .*",
):
    warnings.filterwarnings("ignore", message=message)

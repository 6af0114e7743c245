"""Uploaded bytes -> the view that the model takes, by Pillow alone; nothing is decoded before its size is known."""

import io

import numpy as np
from PIL import Image, ImageOps

from kd.export.manifest import Manifest

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
"""Pillow would open more, and some of it by other programs."""


class BadPicture(Exception):
    """An upload that is refused.

    Args:
        status: of the HTTP answer, 413 or 415.
        reason: in words.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def view(data: bytes, manifest: Manifest, max_pixels: int) -> np.ndarray:
    """What validation would show of a picture: scaled, its centre cut out.

    Args:
        data: the encoded picture.
        manifest: of the model.
        max_pixels: of the decoded picture.

    Returns:
        uint8, ``manifest.shape``.

    Raises:
        BadPicture: not a picture, a damaged one, or one of too many pixels.
    """
    if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own bound must not be the tighter one
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            if opened.width * opened.height > max_pixels:
                raise BadPicture(413, f"{opened.width} x {opened.height} pixels are more than {max_pixels}")
            picture = _upright(_eight_bits(opened))
    except BadPicture:
        raise
    except Image.DecompressionBombError as error:
        raise BadPicture(413, "too many pixels") from error
    except Exception as error:  # decoders raise all kinds on damaged data
        raise BadPicture(415, "not a picture, or a damaged one") from error
    pixels = np.asarray(_whole(picture, manifest) if manifest.task == "segmentation" else _cut(picture, manifest))
    return pixels if manifest.layout == "nhwc" else pixels.transpose(2, 0, 1)


def _eight_bits(picture: Image.Image) -> Image.Image:
    """RGB of any mode, as :func:`kd.data.pictures.decode` gives it: of 16 bits the upper eight."""
    if picture.mode.startswith("I"):
        grey = Image.fromarray((np.array(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
        grey.info = picture.info
        return grey.convert("RGB")
    return picture.convert("RGB")


def _upright(picture: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # damaged EXIF says nothing of the pixels
        return picture


def _whole(picture: Image.Image, manifest: Manifest) -> Image.Image:
    """Masks are of the whole picture, scaled."""
    height, width = manifest.size
    return picture.resize((width, height), Image.Resampling.BILINEAR)


def _cut(picture: Image.Image, manifest: Manifest) -> Image.Image:
    """As :func:`kd.data.transforms.eval_transform` does."""
    height, width = manifest.size
    tall, wide = (round(side / manifest.crop_ratio) for side in manifest.size)
    if height == width:  # keeps the picture's shape
        short = min(picture.size)
        wide, tall = (tall if side == short else int(tall * side / short) for side in picture.size)
    scaled = picture.resize((wide, tall), Image.Resampling.BILINEAR)
    left, top = round((wide - width) / 2), round((tall - height) / 2)
    return scaled.crop((left, top, left + width, top + height))

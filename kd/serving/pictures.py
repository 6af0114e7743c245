"""Uploaded bytes -> the view that the model takes, by Pillow alone; nothing is decoded before its size is known."""

import io

import numpy as np
from PIL import Image

from kd.decoding import BadPicture, TooLarge, decoded, open_picture
from kd.export.manifest import Manifest


class BadUpload(Exception):
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
        BadUpload: not a picture, a damaged one, or one of too many pixels.
    """
    try:
        with open_picture(io.BytesIO(data), max_pixels) as opened:
            picture = decoded(opened)
    except TooLarge as error:
        raise BadUpload(413, f"more pixels than the {max_pixels} that are allowed") from error
    except BadPicture as error:
        raise BadUpload(415, str(error)) from error
    pixels = np.asarray(_whole(picture, manifest) if manifest.task == "segmentation" else _cut(picture, manifest))
    return pixels if manifest.layout == "nhwc" else pixels.transpose(2, 0, 1)


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

"""Uploaded bytes -> the view that the model takes, by Pillow alone; nothing is decoded before its size is known."""

import io

import numpy as np
from PIL import Image

from kd.ship.export.manifest import ExportManifest
from kd.ship.serving.bodies import Refused
from kd.storage.decoding import BadPicture, TooLarge, decoded, frame, open_picture


def view(data: bytes | np.ndarray, manifest: ExportManifest, max_pixels: int) -> np.ndarray:
    """The view that validation would show of a picture: scaled, its centre cut out.

    Args:
        data: the encoded picture, or its pixels, uint8 ``(H, W, 3)``.
        manifest: of the model.
        max_pixels: bound on the decoded picture.

    Returns:
        uint8 of shape ``manifest.shape``.

    Raises:
        Refused: not a picture or a damaged one (415), or too many pixels (413).
    """
    try:
        with _opened(data, max_pixels) as opened:
            pixels = np.asarray(_scaled(decoded(opened), manifest, max_pixels))
    except TooLarge as error:
        raise Refused(413, str(error).replace("data.", "")) from error
    except BadPicture as error:
        raise Refused(415, str(error)) from error
    return pixels


def _opened(data: bytes | np.ndarray, max_pixels: int) -> Image.Image:
    """A picture, encoded or as pixels uint8 ``(H, W, 3)``; TooLarge where it has more than ``max_pixels``."""
    if isinstance(data, bytes):
        return open_picture(io.BytesIO(data), max_pixels)
    if data[..., 0].size > max_pixels:
        raise TooLarge(
            f"its {data.shape[1]} x {data.shape[0]} pixels are more than max_pixels={max_pixels}"
        )
    return Image.fromarray(data)


def _scaled(picture: Image.Image, manifest: ExportManifest, max_pixels: int) -> Image.Image:
    """The view of a picture, of ``manifest.size``; a mask is of the whole picture, so nothing is cut off for it.

    :func:`kd.storage.decoding.frame` gives the size (width, height) to which the picture is scaled, and the ``corner``
    (x, y) at which the view is cut out of that, in pixels.

    Raises:
        TooLarge: scaling would take more than ``max_pixels``.
    """
    crop_ratio = None
    if manifest.task != "segmentation":
        crop_ratio = manifest.crop_ratio
    scaled_size, corner = frame(picture.size, manifest.size, crop_ratio, max_pixels)
    scaled = picture.resize(scaled_size, Image.Resampling.BILINEAR)

    height, width = manifest.size
    x, y = corner
    return scaled.crop((x, y, x + width, y + height))

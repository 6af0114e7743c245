"""Encoded pictures as tensors: the one file of torch that decodes them (:mod:`kd.storage.decoding` needs none).

A JPEG goes to TorchCodec (0.16 or newer) where it is installed, to torchvision otherwise: both use libjpeg-turbo and
give the same pixels. All other formats go to Pillow: torchvision's PNG decoder ends the whole process on a damaged
file, Pillow raises an error, and takes 1.1 times as long (a photograph of 256 x 256 as PNG: 1.63 ms for 1.47 ms on one
core). The header is read first, by Pillow too (15 microseconds), so that no memory is taken for a picture that only
claims to be huge.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kd.storage.decoding import MAX_PIXELS, decoded, open_picture, orientation

JPEG = b"\xff\xd8\xff"


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Encoded picture -> uint8 ``(3, H, W)``, upright by its EXIF orientation.

    Of an animation this is the first frame; samples of 16 bits keep their upper eight; transparency is dropped.

    Args:
        data: the file's bytes, of any format.
        max_pixels: a picture with more is refused.

    Raises:
        RuntimeError: it can't be read, or is too large; the message is one line.
    """
    with open_picture(BytesIO(data), max_pixels) as image:
        if data.startswith(JPEG):
            # Pillow reads a few kinds more, and names what is wrong in fewer words.
            with suppress(Exception):
                content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                return _jpeg_decoder()(content)
        pixels_HW3 = torch.from_numpy(np.array(decoded(image)))
        return pixels_HW3.permute(2, 0, 1).contiguous()


def size_of_plain_jpeg(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int] | None:
    """Height and width of an upright JPEG in grey or RGB; None for any other picture. Only the header is read.

    Args:
        data: the file's bytes.
        max_pixels: a picture with more is refused.

    Raises:
        RuntimeError: not a picture, or too large.
    """
    with open_picture(BytesIO(data), max_pixels) as image:
        if image.format == "JPEG" and image.mode in ("RGB", "L") and orientation(image) == 1:
            return image.height, image.width
        return None


def encode_jpeg(picture: Tensor, quality: int) -> bytes:
    """uint8 ``(3, H, W)`` -> a JPEG file's bytes; ``quality`` is Pillow's, 0 to 95."""
    return _encoded(picture.permute(1, 2, 0), "JPEG", quality=quality)


def encode_png(picture: Tensor) -> bytes:
    """uint8 ``(3, H, W)`` -> an uncompressed PNG file's bytes."""
    return _encoded(picture.permute(1, 2, 0), "PNG", compress_level=0)


def _encoded(pixels: Tensor, kind: str, **options: int) -> bytes:
    """uint8 ``(H, W, 3)`` -> a file's bytes; ``kind`` and ``options`` as of Pillow's ``save``."""
    stream = BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(stream, kind, **options)
    return stream.getvalue()


@cache
def _jpeg_decoder() -> Callable[[Tensor], Tensor]:
    """TorchCodec's function that decodes a JPEG, else torchvision's: its bytes as uint8 ``(n,)`` -> uint8 ``(3, H, W)``,
    upright.
    """
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, RuntimeError, OSError):  # not installed, too old, or without its libraries
        from torchvision.io import ImageReadMode, decode_image

        return lambda data: decode_image(data, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    return decode_jpeg

"""Packs a split as tar shards for the source ``Shards``."""

import io
import json
import tarfile
import zlib
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as tvf

from kd.data.pictures import decode, encode_grey, encode_jpeg
from kd.data.sources import Source, Split, named
from kd.data.targets import Masks, Targets
from kd.errors import UserError
from kd.progress import bar
from kd.storage.objects import file_system, in_one_line

HEADER = 512  # bytes of a tar member's header in the USTAR format
BLOCK = 512  # a member's content is filled up to a multiple of it
JPEG_QUALITY = 95


def pack(
    split: Split,
    classes: Sequence[str],
    out: str,
    name: str,
    short_side: int | None = None,
    shard_mb: int = 256,
    source: Source | None = None,
) -> int:
    """Writes a split as tar shards and their index, masks as PNG files beside; returns the bytes written.

    Args:
        split: the pictures.
        classes: their classes' names.
        out: folder or URL.
        name: the split's name (``train``, ``val``).
        short_side: pictures whose shorter side is larger are resized to it, in pixels; all others are kept as they are.
        shard_mb: a new shard starts after this many megabytes.
        source: of the split; its kind of target decides how targets are written.

    Returns:
        Bytes written.

    Raises:
        UserError: a picture can't be decoded, or ``out`` can't be written.
    """
    kind = source.kind if source is not None else Targets()
    if type(kind) not in (Targets, Masks):
        raise UserError(
            f"data.source: kd-pack packs pictures with one label each, or with masks, not {kind.name}"
        )
    files, path = file_system(out, "out")
    shards: list[str] = []
    samples: list[list[int]] = []
    sums: list[int] = []  # of the pictures in each shard
    masks: list[list[int]] = []  # offset, size: in the shard of the picture
    dense = kind.cut_with_picture
    written, tar = 0, None
    with in_one_line(f"out: {out} can't be written"):
        files.makedirs(path, exist_ok=True)
        with ExitStack() as shard:
            for i in bar(range(len(split.targets)), label=f"packing {name}"):
                data, suffix, mask = _packed(split, i, short_side, dense)
                if tar is None or tar.offset > shard_mb * 10**6:
                    shard.close()
                    shards.append(f"{name}-{len(shards):05d}.tar")
                    sums.append(0)
                    stream = shard.enter_context(files.open(f"{path}/{shards[-1]}", "wb"))
                    tar = shard.enter_context(
                        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)
                    )
                sums[-1] = zlib.crc32(data, sums[-1])
                samples.append([len(shards) - 1, tar.offset + HEADER, len(data)])
                label = [("cls", str(split.targets[i]).encode())] if classes and not dense else []
                if dense:
                    label = [("mask.png", mask)]
                    masks.append(
                        [samples[-1][1] + -(-len(data) // BLOCK) * BLOCK + HEADER, len(mask)]
                    )
                    sums[-1] = zlib.crc32(mask, sums[-1])
                for ending, content in [(suffix, data), *label]:
                    member = tarfile.TarInfo(f"{i:08d}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                written += len(data)
        index = {
            "classes": list(classes),
            "shards": shards,
            "targets": list(split.targets),
            "samples": samples,
            "checksums": sums,
        }
        if dense and source is not None:
            index |= {"masks": masks, "ignore_index": source.ignore_index}
        files.pipe_file(f"{path}/{name}.json", json.dumps(index).encode())
    return written


def _packed(split: Split, i: int, short_side: int | None, dense: bool) -> tuple[bytes, str, bytes]:
    """A picture as it is packed, the ending of its name, and its mask where it has one."""
    try:
        data = split.read(i)
        picture, mask = decode(data), torch.as_tensor(split.target(i)) if dense else None
    except (RuntimeError, OSError) as error:
        raise UserError(f"data.source: {named(split, i)} can't be read: {error}") from error
    if mask is not None and mask.shape[1:] != picture.shape[1:]:
        raise UserError(f"data.source: {named(split, i)} and its mask differ in size")
    suffix = "png" if data.startswith(b"\x89PNG") else "jpg"
    if short_side is not None and min(picture.shape[-2:]) > short_side:
        picture = tvf.resize(picture, [short_side], antialias=True)
        data, suffix = encode_jpeg(picture, JPEG_QUALITY), "jpg"
        mask = None if mask is None else tvf.resize(tv_tensors.Mask(mask), list(picture.shape[1:]))
    return data, suffix, b"" if mask is None else encode_grey(mask)

"""Packs a split as tar shards for the source ``Shards``."""

import io
import json
import tarfile
import zlib
from collections.abc import Sequence
from typing import IO

import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as tvf

from kd.data.pictures import decode, encode_grey, encode_jpeg
from kd.data.sources import Source, Split, named
from kd.data.targets import Masks, Targets
from kd.errors import UserError, first_line
from kd.progress import bar
from kd.storage.objects import file_system

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
    """Writes a split as tar shards and their index, masks as PNG files beside; returns the bytes written."""
    kind = source.kind if source is not None else Targets()
    if type(kind) not in (Targets, Masks):
        raise UserError(f"data.source: kd-pack packs pictures with one label each, or with masks, not {kind.name}")
    files, path = file_system(out, "out")
    shards: list[str] = []
    samples: list[list[int]] = []
    sums: list[int] = []  # of the pictures in each shard
    masks: list[list[int]] = []  # offset, size: in the shard of the picture
    dense = kind.cut_with_picture
    written, tar, stream = 0, None, None
    try:
        files.makedirs(path, exist_ok=True)
        for i in bar(range(len(split.targets)), label=f"packing {name}"):
            data, suffix = _resized(split, i, short_side)
            mask = _mask(split, i, data) if dense else b""
            if tar is None or tar.offset > shard_mb * 10**6:
                _close(tar, stream)
                shards.append(f"{name}-{len(shards):05d}.tar")
                sums.append(0)
                stream = files.open(f"{path}/{shards[-1]}", "wb")
                tar = tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - _close
            sums[-1] = zlib.crc32(data, sums[-1])
            samples.append([len(shards) - 1, tar.offset + HEADER, len(data)])
            label = [("cls", str(split.targets[i]).encode())] if classes and not dense else []
            if dense:
                label = [("mask.png", mask)]
                masks.append([samples[-1][1] + -(-len(data) // BLOCK) * BLOCK + HEADER, len(mask)])
                sums[-1] = zlib.crc32(mask, sums[-1])
            for ending, content in [(suffix, data), *label]:
                member = tarfile.TarInfo(f"{i:08d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            written += len(data)
        _close(tar, stream)
        index = {"classes": list(classes), "shards": shards, "targets": list(split.targets), "samples": samples,
                 "checksums": sums}  # fmt: skip
        if dense and source is not None:
            index |= {"masks": masks, "ignore_index": source.ignore_index}
        files.pipe_file(f"{path}/{name}.json", json.dumps(index).encode())
    except UserError:
        raise
    except Exception as error:  # the object stores' clients raise many kinds
        raise UserError(f"out: {out} can't be written: {first_line(error)}") from error
    return written


def _close(tar: tarfile.TarFile | None, stream: IO[bytes] | None) -> None:
    if tar is not None and stream is not None:
        tar.close()
        stream.close()


def _mask(split: Split, i: int, packed: bytes) -> bytes:
    try:
        picture, mask = decode(split.read(i)), torch.as_tensor(split.target(i))
    except (RuntimeError, OSError) as error:
        raise UserError(f"data.source: {named(split, i)} can't be read: {error}") from error
    if mask.shape[1:] != picture.shape[1:]:
        raise UserError(f"data.source: {named(split, i)} and its mask differ in size")
    size = list(decode(packed).shape[1:])
    return encode_grey(tvf.resize(tv_tensors.Mask(mask), size) if list(mask.shape[1:]) != size else mask)


def _resized(split: Split, i: int, short_side: int | None) -> tuple[bytes, str]:
    try:
        data = split.read(i)
        picture = decode(data)
    except (RuntimeError, OSError) as error:
        raise UserError(f"data.source: {named(split, i)} can't be read: {error}") from error
    if short_side is None or min(picture.shape[-2:]) <= short_side:
        return data, "png" if data.startswith(b"\x89PNG") else "jpg"
    return encode_jpeg(tvf.resize(picture, [short_side], antialias=True), JPEG_QUALITY), "jpg"

"""Packs a split as tar shards for the source ``Shards``."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from torchvision.transforms.v2 import functional as tvf

from kd.data.pictures import decode, encode_jpeg
from kd.data.sources import Source, Split, named
from kd.data.sources.shards import PICTURE
from kd.data.targets import Targets
from kd.errors import UserError
from kd.progress import bar
from kd.storage.objects import file_system, in_one_line

HEADER = 512  # bytes of a tar member's header in the USTAR format
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
    """Writes a split as tar shards and their index.

    Shard ``n`` is ``NAME-0000n.tar``. Each picture has ``KEY.jpg`` (``.png`` for a PNG) with its number in the split as the
    key, in eight digits, and beside it ``KEY.cls``, the class id as text; nothing without labels. ``NAME.index`` has a row
    for each picture (:data:`kd.data.sources.shards.PICTURE`). ``NAME.json`` is a dict: "classes", "shards" (their names),
    "index" (the SHA-256 of ``NAME.index``). The source ``Shards`` reads both.

    Args:
        split: the pictures.
        classes: names by class id; empty: pictures without labels.
        out: folder or URL.
        name: the split's name (``train``, ``val``).
        short_side: pictures whose shorter side is larger are resized to it, in pixels; all others are kept as they are.
        shard_mb: a new shard starts after this many megabytes (10^6 bytes).
        source: of the split, for its kind of target; None: class ids.

    Returns:
        Bytes of the pictures, as they are packed; labels and the headers of the tar files are not counted.

    Raises:
        UserError: targets are no class ids, a picture can't be decoded, or ``out`` can't be written.
    """
    if source is not None and type(source.kind) is not Targets:
        raise UserError(
            f"data.source: kd-pack packs pictures with one label each, not {source.kind.name}"
        )
    files, path = file_system(out, "out")
    shards: list[str] = []
    table = np.zeros(len(split.targets), PICTURE)
    with in_one_line(f"out: {out} can't be written"), ExitStack() as open_shard:
        files.makedirs(path, exist_ok=True)
        index_file = f"{path}/{name}.json"
        if files.exists(index_file):  # of an older pack, whose shards are overwritten
            files.rm_file(index_file)
        tar = None
        for i in bar(range(len(split.targets)), label=f"packing {name}"):
            picture, ending = _packed(split, i, short_side)
            if tar is None or tar.offset > shard_mb * 10**6:
                open_shard.close()
                shards.append(f"{name}-{len(shards):05d}.tar")
                stream = open_shard.enter_context(files.open(f"{path}/{shards[-1]}", "wb"))
                tar = open_shard.enter_context(
                    tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)
                )
            place = _add(tar, f"{i:08d}.{ending}", picture)
            if classes:
                _add(tar, f"{i:08d}.cls", str(split.targets[i]).encode())
            table[i] = (len(shards) - 1, *place, split.targets[i])
        open_shard.close()

        content = table.tobytes()
        files.pipe_file(f"{path}/{name}.index", content)
        # It is written last: a pack that has one is complete.
        head = {
            "classes": list(classes),
            "shards": shards,
            "index": hashlib.sha256(content).hexdigest(),
        }
        files.pipe_file(index_file, json.dumps(head).encode())
    return int(table["size"].sum(dtype=np.int64))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> list[int]:
    """Adds a member ``name`` with ``content`` to a shard; returns offset and size of the content in bytes."""
    offset = tar.offset + HEADER
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
    return [offset, len(content)]


def _packed(split: Split, i: int, short_side: int | None) -> tuple[bytes, str]:
    """A picture as it is packed: its bytes, and the ending of its name.

    The ending is ``png`` for a PNG, else ``jpg``, also where the bytes of another format stay as they are. A scaled picture
    becomes a JPEG.

    Args:
        split: holds it.
        i: its number in the split.
        short_side: pixels to which a larger shorter side is scaled; None: packed as it is.

    Raises:
        UserError: the picture can't be read or decoded.
    """
    try:
        data = split.read(i)
        picture = decode(data)
    except (RuntimeError, OSError) as error:
        raise UserError(f"data.source: {named(split, i)} can't be read: {error}") from error
    if short_side is not None and min(picture.shape[-2:]) > short_side:
        picture = tvf.resize(picture, [short_side], antialias=True)
        return encode_jpeg(picture, JPEG_QUALITY), "jpg"
    return data, "png" if data.startswith(b"\x89PNG") else "jpg"

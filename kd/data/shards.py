"""Tar shards (WebDataset's layout) on a disk or in an object store: the source ``Shards``, and how they are packed.

A pack is a folder, or any URL that fsspec knows (``s3://bucket/food``), with ``train-00000.tar``, ... and one index a
split, ``train.json``, written last. The index says where in which shard a picture's bytes are, so pictures are read in
any order: order, views and resume are those of every other source. A shard of a remote pack is fetched whole, once,
when its first picture is wanted, and kept in the user's cache folder.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from torchvision.io import encode_jpeg
from torchvision.transforms.v2 import functional as tvf

from kd._bar import bar
from kd.data.sources import Source, Split, cache_dir
from kd.data.transforms import decode
from kd.errors import UserError

HEADER = 512  # bytes of a tar member's header in the USTAR format
JPEG_QUALITY = 95


def _file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of ``url``, and the path in it. Made anew in each process: it does not survive a fork."""
    try:
        import fsspec
    except ImportError as error:
        raise UserError("data.source: Shards needs the extra stream: pip install 'kd-train[stream]'") from error
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"data.source.root: {url}: {error}; pip install 'kd-train[stream]' has s3") from error


class Shards(Source):
    """A pack made by ``kd-pack``, on a disk or in an object store (extra ``stream``).

    Args:
        root: its folder or URL. An S3 endpoint and credentials are taken from the usual ``AWS_*`` variables.
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")

    def load(self, split: str) -> Split:
        """See :meth:`Source.load`."""
        files, path = _file_system(self.root)
        try:
            text = files.cat_file(f"{path}/{split}.json")
            index = json.loads(text)
            self.classes = list(index["classes"])
            found = ShardSplit(self.root, index, hashlib.sha256(text).hexdigest()[:16])
        except FileNotFoundError as error:
            raise UserError(
                f"data.source.root: {self.root} has no {split}.json: no pack, or an unfinished one"
            ) from error
        except (ValueError, KeyError) as error:
            raise UserError(
                f"data.source.root: {self.root}/{split}.json is damaged ({type(error).__name__})"
            ) from error
        except Exception as error:  # the object stores' clients raise many kinds
            raise UserError(f"data.source.root: {self.root}: {str(error).splitlines()[0][:200]}") from error
        for shard, end in found.ends().items() if "://" not in self.root else ():
            size = Path(self.root, shard).stat().st_size if Path(self.root, shard).is_file() else 0
            if size < end:
                raise UserError(f"data.source.root: {self.root}/{shard} has {size} bytes, its index says {end} or more")
        return found

    def describe(self) -> str:
        """One line."""
        return f"Shards {self.root}"


class ShardSplit:
    """One split of a pack.

    Args:
        root: folder or URL of the pack.
        index: the content of the split's index.
        digest: a hash of it.
    """

    checked = True  # kd-pack has decoded every picture

    def __init__(self, root: str, index: dict[str, Any], digest: str) -> None:
        self.root, self.digest = root, digest
        self.shards: list[str] = index["shards"]
        self.samples: list[list[int]] = index["samples"]  # shard, offset, size
        self.targets: list[int] = index["targets"]
        self._open: dict[tuple[int, int], int] = {}  # (process, shard) -> descriptor

    def read(self, i: int) -> bytes:
        """The encoded picture ``i``."""
        shard, offset, size = self.samples[i]
        key = (os.getpid(), shard)
        if key not in self._open:
            self._open[key] = os.open(self._local(self.shards[shard]), os.O_RDONLY)
        data = os.pread(self._open[key], size, offset)
        if len(data) != size:
            raise OSError("the shard is truncated")
        return data

    def target(self, i: int) -> Any:
        """The target of the picture ``i``."""
        return self.targets[i]

    def name(self, i: int) -> str:
        """Shard and place; differs between packs."""
        shard, offset, size = self.samples[i]
        return f"{self.root}/{self.shards[shard]}@{offset}+{size} ({self.digest})"

    def ends(self) -> dict[str, int]:
        """Where the last picture of each shard ends, in bytes."""
        return {self.shards[shard]: offset + size for shard, offset, size in self.samples}

    def _local(self, shard: str) -> Path:
        if "://" not in self.root:
            return Path(self.root, shard)
        folder = cache_dir() / "shards" / f"{Path(self.root).name}-{self.digest}"
        file = folder / shard
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{shard}.lock"):  # one of all processes fetches it
            if not file.is_file():
                files, path = _file_system(self.root)
                part = file.with_suffix(".part")
                try:
                    files.get_file(f"{path}/{shard}", str(part))
                except Exception as error:  # the object stores' clients raise many kinds
                    raise OSError(f"{self.root}/{shard} can't be fetched to {folder}: {error}") from error
                part.replace(file)
        return file


def pack(
    split: Split, classes: Sequence[str], out: str, name: str, short_side: int | None = None, shard_mb: int = 256
) -> int:
    """Writes a split as tar shards and their index.

    Args:
        split: the pictures.
        classes: their classes' names.
        out: folder or URL.
        name: the split's name (``train``, ``val``).
        short_side: pictures whose shorter side is larger are resized to it, in pixels; all others are kept as they are.
        shard_mb: a new shard is begun behind this many megabytes.

    Returns:
        Bytes written.

    Raises:
        UserError: a picture can't be decoded, or ``out`` can't be written.
    """
    files, path = _file_system(out)
    shards: list[str] = []
    samples: list[list[int]] = []
    written, tar, stream = 0, None, None
    try:
        files.makedirs(path, exist_ok=True)
        for i in bar(range(len(split.targets)), label=f"packing {name}"):
            data, suffix = _resized(split, i, short_side)
            if tar is None or tar.offset > shard_mb * 10**6:
                _close(tar, stream)
                shards.append(f"{name}-{len(shards):05d}.tar")
                stream = files.open(f"{path}/{shards[-1]}", "wb")
                tar = tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - _close
            samples.append([len(shards) - 1, tar.offset + HEADER, len(data)])
            for ending, content in ((suffix, data), ("cls", str(split.targets[i]).encode())):
                member = tarfile.TarInfo(f"{i:08d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            written += len(data)
        _close(tar, stream)
        index = {"classes": list(classes), "shards": shards, "targets": list(split.targets), "samples": samples}
        files.pipe_file(f"{path}/{name}.json", json.dumps(index).encode())
    except UserError:
        raise
    except Exception as error:  # the object stores' clients raise many kinds
        raise UserError(f"out: {out} can't be written: {str(error).splitlines()[0][:200]}") from error
    return written


def _close(tar: tarfile.TarFile | None, stream: Any) -> None:
    if tar is not None:
        tar.close()
        stream.close()


def _resized(split: Split, i: int, short_side: int | None) -> tuple[bytes, str]:
    """The encoded picture and its file ending."""
    try:
        data = split.read(i)
        picture = decode(data)
    except (RuntimeError, OSError) as error:
        raise UserError(f"data.source: {split.name(i)} can't be read: {error}") from error
    if short_side is None or min(picture.shape[-2:]) <= short_side:
        return data, "png" if data.startswith(b"\x89PNG") else "jpg"
    smaller = tvf.resize(picture, [short_side], antialias=True)
    return encode_jpeg(smaller, JPEG_QUALITY).numpy().tobytes(), "jpg"

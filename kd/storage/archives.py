"""Tar archives from elsewhere: every reader of one opens it here."""

import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path
from typing import IO

from kd.errors import UserError
from kd.storage.elsewhere import LARGEST_DATA, regular

EXTENSIONS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
              tarfile.GNUTYPE_LONGLINK)  # fmt: skip
MAX_EXTENSION = 2**16  # bytes of a header that names the next member
MOST_EXTENSIONS = 8  # in a row: the library calls itself for each

File = tuple[tarfile.TarInfo, IO[bytes]]


def _bounded() -> type[tarfile.TarInfo]:
    """A class of headers for one archive, which counts those in a row that name the next member."""
    in_a_row = 0

    class Bounded(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "Bounded":
            nonlocal in_a_row
            found = super().frombuf(buf, encoding, errors)
            in_a_row = in_a_row + 1 if found.type in EXTENSIONS else 0
            # ReadError: the library takes a HeaderError after the first member for the end of the archive
            if found.size < 0:
                raise tarfile.ReadError("a member's size is negative")
            if in_a_row and (in_a_row > MOST_EXTENSIONS or found.size > MAX_EXTENSION):
                raise tarfile.ReadError(
                    f"more than {MOST_EXTENSIONS} headers or {MAX_EXTENSION} bytes name one member"
                )
            return found

    return Bounded


@contextmanager
def opened(archive: Path, key: str = "", compressed: bool = True) -> Iterator[Iterator[File]]:
    """The regular files of an archive, each with its content; links, devices and sparse files are left out."""
    try:
        with tarfile.open(
            regular(archive, LARGEST_DATA), "r:*" if compressed else "r:", tarinfo=_bounded()
        ) as tar:
            yield _files(tar)
    except UserError:
        raise
    except (
        tarfile.TarError,
        ValueError,
        OverflowError,
        EOFError,
        zlib.error,
        LZMAError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the archive
            raise
        hint = "" if compressed else "; a compressed one must be unpacked"
        raise UserError(
            f"{key + ': ' if key else ''}{archive} is not a {'' if compressed else 'plain '}tar file "
            f"({error}){hint}"
        ) from error


def _files(tar: tarfile.TarFile) -> Iterator[File]:
    end = 0
    for member in tar:
        if tar.offset <= end or member.size < 0:  # an extension may give a size, too
            raise tarfile.ReadError(f"{member.name[:80]!r} ends before it begins")
        end = tar.offset
        content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
        if content is not None:
            yield member, content


def unpack(archive: Path, into: Path) -> None:
    """Writes the files of a ``.tar`` into a folder; Python has a safe filter for that only from 3.11.4 on.

    Args:
        archive: ``.tar``, compressed or not.
        into: a folder; made where it is missing.

    Raises:
        UserError: a name in it that leads out of the folder.
    """
    root = into.resolve()
    root.mkdir(parents=True, exist_ok=True)
    with opened(archive) as files:
        for member, content in files:
            path = (root / member.name).resolve()
            if not path.is_relative_to(root):
                raise UserError(
                    f"{archive}: '{member.name}' in it leads out of the folder that it is unpacked into"
                )
            if member.size > shutil.disk_usage(root).free:
                raise UserError(
                    f"{archive}: '{member.name}' in it has more bytes than {root} has room for"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(content, file)

"""Tar archives from elsewhere: every reader of one opens it here."""

import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path
from typing import Literal

from kd.errors import UserError
from kd.storage.elsewhere import LARGEST_DATA, regular

EXTENSIONS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
              tarfile.GNUTYPE_LONGLINK)  # fmt: skip
MAX_EXTENSION = 2**16  # bytes of a header that names the next member
MOST_EXTENSIONS = 8  # in a row: the library calls itself for each
OF_AN_ARCHIVE = (tarfile.TarError, ValueError, OverflowError, EOFError, zlib.error, LZMAError)
"""Errors that the library raises for damaged archives."""


def _bounded() -> type[tarfile.TarInfo]:
    """A class of headers for one archive (``tarinfo=`` of ``tarfile.open``). It bounds how many headers in a row, and of
    what size, do no more than name the next member. As it counts them, each archive needs a class of its own.
    """
    in_a_row = 0

    class Bounded(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "Bounded":
            """One header, as ``tarfile`` reads it; too many or too large extensions raise ReadError."""
            nonlocal in_a_row
            header = super().frombuf(buf, encoding, errors)
            in_a_row = in_a_row + 1 if header.type in EXTENSIONS else 0
            # ReadError: the library takes a HeaderError after the first member for the end of the archive
            is_small = 0 <= header.size <= MAX_EXTENSION
            if in_a_row and (in_a_row > MOST_EXTENSIONS or not is_small):
                raise tarfile.ReadError(
                    f"more than {MOST_EXTENSIONS} headers or {MAX_EXTENSION} bytes name one member"
                )
            return header

    return Bounded


@contextmanager
def opened(archive: Path, start: str, compressed: bool = True) -> Iterator[tarfile.TarFile]:
    """An archive, open. Damage is noticed while it is read: errors of :data:`OF_AN_ARCHIVE` in the ``with`` count as the
    archive's, whoever raised them.

    Args:
        archive: ``.tar``.
        start: begins the message: the archive, and the setting that named it.
        compressed: whether it may be compressed; a shard that is read by offsets may not.

    Raises:
        UserError: not such an archive, a damaged one, or one with a member that leads out of its folder.
        OSError: the disk's errors (those with an ``errno``).
    """
    mode: Literal["r:*", "r:"] = "r:*" if compressed else "r:"
    try:
        with tarfile.open(regular(archive, LARGEST_DATA), mode, tarinfo=_bounded()) as tar:
            yield tar
    except UserError:
        raise
    except tarfile.FilterError as error:
        raise UserError(f"{start} is not unpacked: {error}") from error
    except (*OF_AN_ARCHIVE, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the archive
            raise
        kind = "a tar" if compressed else "an uncompressed tar"
        raise UserError(f"{start} is not {kind} file ({error})") from error


def members_of(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The headers of an archive; raises a ReadError at a member that ends before it begins."""
    end = 0
    for member in tar:
        if tar.offset <= end or member.size < 0:  # an extension may give a size, too
            raise tarfile.ReadError(f"{member.name[:80]!r} ends before it begins")
        end = tar.offset
        yield member


def unpack(archive: Path, into: Path) -> None:
    """Writes what a ``.tar`` holds into a folder, by the ``data`` filter of Python: nothing in it leads out of the folder.

    Args:
        archive: ``.tar``, compressed or not.
        into: a folder; made where it is missing. What was unpacked before an error stays in it.

    Raises:
        UserError: no tar file, a name or a link in it that leads out of the folder, a device, or a file that the disk has
            no room for.
        OSError: the disk's errors, also where two names in it can't lie side by side (``a`` and ``a/b``).
    """
    into.mkdir(parents=True, exist_ok=True)
    with opened(archive, str(archive)) as tar:
        for member in members_of(tar):
            if member.size > shutil.disk_usage(into).free:
                raise UserError(
                    f"{archive}: '{member.name}' in it has more bytes than {into} has room for"
                )
            tar.extract(member, into, filter="data")

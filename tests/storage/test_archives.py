"""Archives from elsewhere."""

import io
import signal
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from kd.data.sources import WebDataset
from kd.storage.archives import unpack
from tests._helpers import refuses


def test_an_archive_stays_in_its_folder(tmp_path: Path) -> None:
    def archive(name: str, *members: str, link: str = "file") -> Path:
        with tarfile.open(tmp_path / name, "w:gz") as tar:
            for member in members:
                entry = tarfile.TarInfo(member)
                entry.size = 3
                tar.addfile(entry, io.BytesIO(b"abc"))
            entry = tarfile.TarInfo("run/link")
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            tar.addfile(entry)
        return tmp_path / name

    unpack(archive("good.tar.gz", "run/file", "run/deep/file"), tmp_path / "out")
    assert {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()} == {
        "run/file", "run/deep/file", "run/link",
    }  # fmt: skip
    assert (tmp_path / "out" / "run" / "file").read_bytes() == b"abc"
    bad = archive("bad.tar.gz", "../escaped"), archive("link.tar.gz", link="../../out")
    for file in (*bad, archive("absolute.tar.gz", link="/etc/passwd")):
        with refuses(f"^{file} is not unpacked: .*(outside|absolute)"):
            unpack(file, tmp_path / "other")
    assert not (tmp_path / "escaped").exists()


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type = size, kind
    return entry.tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


PICTURE = header("a.jpg", 3) + padded(b"abc")
NEGATIVE = header("b.jpg", -512 * 3)  # the reader would stand before it again
LONG = header("././@LongLink", 4, tarfile.GNUTYPE_LONGNAME) + padded(b"abc\0")
HOSTILE = {
    "a negative size": PICTURE + NEGATIVE,
    "a negative size in an extension": PICTURE
    + header("pax", 14, tarfile.XHDTYPE) + padded(b"14 size=-1024\n") + header("b.jpg", 3) + padded(b"abc"),
    "a chain of names": PICTURE + 3000 * LONG + PICTURE,
    "a name of a gigabyte": PICTURE + header("pax", 1 << 30, tarfile.XHDTYPE),
    "a map that is no map": PICTURE
    + header("pax", 48, tarfile.XHDTYPE) + padded(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n    ")
    + header("b.jpg", 512) + padded(b"x\n"),
}  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_an_archive_made_to_harm_is_named(content: bytes, tmp_path: Path) -> None:
    """By both who read archives, in seconds and without the memory that it asks for."""
    file = tmp_path / "hostile.tar"
    file.write_bytes(content + bytes(1024))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("reads for ever"))
    signal.alarm(20)
    tracemalloc.start()
    try:
        with refuses(rf"{file} is not a tar file"):
            unpack(file, tmp_path / "out")
        with refuses(rf"data.source.train: {file} is not an uncompressed tar file"):
            WebDataset(str(file)).load("train")
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
        signal.alarm(0)


def test_a_file_larger_than_the_disk_is_not_begun(tmp_path: Path) -> None:
    file = tmp_path / "large.tar"
    file.write_bytes(header("a", 1 << 60) + bytes(1024))
    with refuses("more bytes than .* has room for"):
        unpack(file, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())

"""Archives from elsewhere."""

import io
import tarfile
from pathlib import Path

import pytest

from kd.archives import unpack
from kd.errors import UserError


def test_an_archive_stays_in_its_folder(tmp_path: Path) -> None:
    def archive(name: str, *members: str) -> Path:
        with tarfile.open(tmp_path / name, "w:gz") as tar:
            for member in members:
                entry = tarfile.TarInfo(member)
                entry.size = 3
                tar.addfile(entry, io.BytesIO(b"abc"))
            link = tarfile.TarInfo("run/link")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
        return tmp_path / name

    unpack(archive("good.tar.gz", "run/file", "run/deep/file"), tmp_path / "out")
    assert {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()} == {
        "run/file", "run/deep/file",
    }  # fmt: skip
    assert (tmp_path / "out" / "run" / "file").read_bytes() == b"abc"
    with pytest.raises(UserError, match="leads out of the folder"):
        unpack(archive("bad.tar.gz", "../escaped"), tmp_path / "other")
    assert not (tmp_path / "escaped").exists()

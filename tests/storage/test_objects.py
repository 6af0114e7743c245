"""Names of files in an object store."""

import pytest

from kd.errors import UserError
from kd.storage.objects import fetched, file_system, is_url, size_in


def test_is_url() -> None:
    assert is_url("s3://bucket/food")
    assert not is_url("/data/food")


def test_size_in() -> None:
    assert size_in("1024-0123456789abcdef") == 1024


def test_a_server_that_cannot_be_reached_is_one_line() -> None:
    """Of the protocols whose client connects as soon as it is made."""
    with pytest.raises(
        UserError, match=r"^runs_dir: ftp://127.0.0.1:1/runs can't be opened: .*refused"
    ):
        file_system("ftp://127.0.0.1:1/runs", "runs_dir")


def test_a_file_without_a_reported_size_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a web server that sends in chunks."""

    class Chunked:
        def info(self, path: str) -> dict[str, object]:
            return {"name": path, "size": None, "type": "file"}

    monkeypatch.setattr("kd.storage.objects.file_system", lambda url, key: (Chunked(), url))
    with pytest.raises(UserError, match=r"^weights: http://host/a.pth: the server reports no size"):
        fetched("http://host/a.pth", "weights")

"""Names of files in an object store."""

import pytest

from kd.storage.elsewhere import RefusedFile, refused_file
from kd.storage.objects import fetched, file_system, state_of_object
from tests._helpers import refuses


@pytest.mark.parametrize(
    "name",
    ["ETag", "etag", "LastModified", "last_modified", "Last-Modified", "mtime", "modify", "modificationTime",
     "created", "creation_time", "blob_id"],
)  # fmt: skip
def test_a_file_that_is_replaced_by_one_of_its_size_has_another_state(name: str) -> None:
    """Each store has its own word for what tells them apart."""
    before, after = ({"name": "a.jpg", "size": 7, name: value} for value in ("one", "two"))
    assert (
        state_of_object(before)
        == state_of_object({**before, "type": "file"})
        != state_of_object(after)
    )
    assert state_of_object(after)[0] == 7


def test_a_refused_file_of_a_loader_process_keeps_its_words() -> None:
    """As torch raises it again: of its class, with the text alone."""
    first = refused_file("a.jpg", "is a pipe")
    assert str(RefusedFile(f"Caught it.\n{first}")) == "Caught it.\na.jpg: is a pipe"


def test_a_server_that_cannot_be_reached_is_one_line() -> None:
    """Of the protocols whose client connects as soon as it is made."""
    with refuses(r"^runs_dir: ftp://127.0.0.1:1/runs can't be opened: .*refused"):
        file_system("ftp://127.0.0.1:1/runs", "runs_dir")


def test_a_file_without_a_reported_size_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a web server that sends in chunks."""

    class Chunked:
        def info(self, path: str) -> dict[str, object]:
            return {"name": path, "size": None, "type": "file"}

    monkeypatch.setattr("kd.storage.objects.file_system", lambda url, key: (Chunked(), url))
    with refuses(r"^weights: http://host/a.pth: the server reports no size"):
        fetched("http://host/a.pth", "weights")

"""Folders in object storage, by fsspec (extra ``stream``)."""

from pathlib import Path

from kd.errors import UserError, first_line


def download(url: str, into: Path) -> Path:
    """Copies a folder of a bucket; ``into`` is there whole or not at all.

    Raises:
        UserError: it is not there, or can't be read.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UserError("fetching from a bucket needs fsspec: pip install 'kd-train[stream]'") from error
    part = into.with_name(f".{into.name}.part")
    try:
        files, path = url_to_fs(url)
        files.get(path.rstrip("/") + "/", str(part) + "/", recursive=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{url} can't be fetched: {first_line(error)}") from error
    part.rename(into)
    return into

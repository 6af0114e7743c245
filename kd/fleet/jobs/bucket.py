"""Folders in object storage, by fsspec (extra ``stream``)."""

import re
from pathlib import Path

from kd.errors import UserError, first_line, needs_extra
from kd.fleet.jobs.job import Needs


def bucket_url(job: Needs, schemes: str) -> str:
    first = schemes.split("|")[0]
    url = job.need("bucket", f"{first}://BUCKET/FOLDER").rstrip("/")
    found = re.fullmatch(rf"(?:{schemes})://([^/]+)(/.*)?", url)
    if not found:
        raise UserError(f"bucket: must be a URL ({first}://BUCKET[/FOLDER]), got '{url}'")
    if "bucket" not in job.missing and not re.fullmatch(r"[a-z0-9][\w.-]{1,61}[a-z0-9]", found[1], re.ASCII):
        raise UserError("bucket: a bucket's name has 3 to 63 lower-case letters, digits, dots and dashes, got "
                        f"'{found[1]}'")  # fmt: skip
    return url


def download(url: str, into: Path) -> Path:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UserError(f"fetching from a bucket {needs_extra('stream')}") from error
    part = into.with_name(f".{into.name}.part")
    try:
        files, path = url_to_fs(url)
        files.get(path.rstrip("/") + "/", str(part) + "/", recursive=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{url} can't be fetched: {first_line(error)}") from error
    part.rename(into)
    return into

"""Files in an object store: copied whole to the local disk.

The only file that imports fsspec, when a URL is first used. Whatever fails on the way (an error, a cut connection, an
answer that is too short) is tried again with growing pauses before the run ends. Whether a file has changed is told by one
thing, its state in the store (:func:`state_of_object`): a copy here has its size, and a time that stands for the state.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from kd.errors import UserError, first_line, needs_extra
from kd.machine import cache_dir
from kd.storage.elsewhere import LARGEST, bytes_of, inside, plain_name, too_large
from kd.storage.shown import HIDDEN, without_secrets

TRIES = 6
"""A request that fails is made so often."""
PAUSE_S = 0.2  # before the second try; doubled before each further one
AT_ONCE = 16  # requests of one process to a store: each waits for its answer many times longer than it works
TIMES = 10**9
"""Seconds since 1970 below which the time of a copy lies."""

STORES = (
    *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf"),
    *("http", "https", "ftp", "ftps", "sftp", "ssh", "smb", "hdfs", "webhdfs"),
    *("file", "local", "memory"),
)
"""Protocols that only carry bytes. Others of fsspec run a program's answers (``dask``), fetch more places
(``reference``, ``github``) or open archives, so that a URL in a file could do more than name a place."""

FACTS_OF_CONTENT = (
    *("ETag", "etag", "md5Hash", "checksum", "blob_id", "xet_hash"),
    *("LastModified", "last_modified", "Last-Modified", "mtime", "modify", "modificationTime"),
    *("created", "creation_time", "generation"),
)
"""What the file systems of :data:`STORES` call a digest of a file's content, or the time of its last change: the first
that is there counts."""

ObjectState = tuple[int, int]
"""State of a file in a store: its size in bytes, and a time, in seconds since 1970, that stands for its content."""
Given = TypeVar("Given")


def is_url(place: str) -> bool:
    """Whether ``place`` is a URL, and no path of this machine.

    >>> is_url("s3://bucket/food"), is_url("/data/food")
    (True, False)
    """
    return "://" in place


def file_system(url: str, key: str = "data.source.root") -> tuple[Any, str]:
    """The fsspec file system of ``url``, and the path in it. Made anew in each process: it does not survive a fork.

    Args:
        url: of one place, by a protocol of :data:`STORES`. No request is made, but some protocols (``ftp``, ``sftp``)
            connect.
        key: the configuration key that named it, for messages.

    Raises:
        UserError: another protocol, several places in one URL (``::``), a server that can't be reached, or a package
            that the protocol needs is not installed.
    """
    try:
        import fsspec
        from fsspec.utils import get_protocol
    except ImportError as error:
        raise UserError(f"{key}: {url} {needs_extra('stream')}") from error
    if "::" in url or get_protocol(url) not in STORES:  # of a path: file
        raise UserError(f"{key}: must be a URL of {', '.join(STORES)}, got {url[:200]}")
    try:
        return fsspec.core.url_to_fs(url)
    except Exception as error:  # many kinds, by the stores' clients; ImportError names a package
        raise UserError(f"{key}: {url} can't be opened: {first_line(error)}") from error


def tried(attempt: Callable[[], Given], what: str) -> Given:
    """The result of an attempt, which is made again where it fails.

    Args:
        attempt: called up to :data:`TRIES` times, with pauses that double, six seconds together.
        what: begins the message where all fail: what could not be done.

    Raises:
        FileNotFoundError: no such file: another try would change nothing. Likewise a FileExistsError.
        OSError: all have failed; the message names ``what`` and the last reason.
    """
    for number in range(TRIES):
        try:
            return attempt()
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # the object stores' clients raise many kinds
            if number == TRIES - 1:
                raise OSError(f"{what}, {TRIES} times: {first_line(error)}") from error
            time.sleep(PAUSE_S * 2**number)
    raise AssertionError


def copy_of(url: str, key: str, kind: str = "fetched") -> Path:
    """The path, below the cache folder, of the copy of a file or folder in a store; it holds no password.

    Args:
        url: of a file or folder.
        key: the configuration key that named it, for the message.
        kind: the folder in the cache.

    Raises:
        UserError: it leads out of the cache. Nothing is fetched or made.
    """
    without_user = without_secrets(url.rstrip("/")).replace(f"://{HIDDEN}@", "://")
    return inside(cache_dir() / kind, without_user.replace("://", "/"), key)


def fetched(url: str, key: str) -> Path:
    """The path of a copy of a store's file in the cache folder, which is fetched once for each content.

    Each call reads the file's state from the store by one request. Several processes may call it: the first one fetches,
    the others wait. Different files are fetched at the same time.

    Args:
        url: of the file.
        key: the configuration key that named it, for messages.

    Raises:
        UserError: it is missing, can't be read, or the server reports no size for it, by which a cut copy is noticed.
    """
    files, path = file_system(url, key)
    file = copy_of(url, key)
    with in_one_line(key, url):
        info = tried(lambda: files.info(path), f"{url} can't be read")
        if info["size"] is None:
            raise UserError(
                f"{key}: {url}: the server reports no size for it; download it and give its path"
            )
        folder, _, name = url.rpartition("/")
        fetch(folder, file.parent, {name: state_of_object(info)}, key, f"{name}.lock")
    return file


def fetch(
    url: str, folder: Path, states: Mapping[str, ObjectState], key: str, lock: str = ".fetching"
) -> None:
    """Makes files of a folder on this disk copies of those in a store: what is missing or differs is fetched,
    :data:`AT_ONCE` at a time, each whole or not at all. Of several processes one fetches, the others wait.

    Args:
        url: of the folder in the store.
        folder: on this disk.
        states: of the files in the store, by name relative to the folder.
        key: the configuration key that named the place, for messages.
        lock: the name of the lock's file in the folder; different files may be fetched at once by locks of their own.

    Raises:
        UserError: a name leads out of the folder, or the disk has no room.
        OSError: a file is not there, or all tries to fetch it have failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / lock):
        wanted = {n: state for n, state in states.items() if not is_copy(folder / n, state)}
        needed = sum(size for size, _ in wanted.values())
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"{key}: {url} has {needed / 1e6:,.0f} MB to fetch, {folder} has room for {free / 1e6:,.0f} MB"
            )
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(partial(_fetch_file, url, folder, key), wanted, wanted.values()))


def _fetch_file(url: str, folder: Path, key: str, name: str, state: ObjectState) -> None:
    """Fetches one file to a folder, whole or not at all; arguments and errors as of :func:`fetch`."""
    file = inside(folder, name, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    files, path = file_system(f"{url}/{name}", key)

    def attempt() -> None:
        """One try: fetches the file to ``part``; raises OSError where its size differs."""
        part.unlink(missing_ok=True)  # a link in its place would be followed
        files.get_file(path, str(part))
        size = part.stat().st_size
        if size != state[0]:
            raise OSError(f"received {size} of {state[0]} bytes")

    tried(attempt, f"{url}/{name} can't be fetched to {file.parent}")
    mark_copy(part, state)
    part.replace(file)


def is_copy(file: Path, state: ObjectState) -> bool:
    """Whether a file here is the copy of one in a store that has this state, and has not changed since it was fetched."""
    try:
        status = file.stat()
    except OSError:
        return False
    return (status.st_size, int(status.st_mtime)) == state


def mark_copy(file: Path, state: ObjectState) -> None:
    """Makes a file here, which has the content of one in a store, the copy of its state there (:func:`is_copy`)."""
    os.utime(file, (time.time(), state[1]))


@contextmanager
def in_one_line(start: str, missing: str = "") -> Iterator[None]:
    """Inside, any error becomes a UserError of one line: the object stores' clients raise many kinds.

    A UserError is left as it is, unless it is one of a file.

    Args:
        start: begins the message, such as the setting's key.
        missing: what was looked for; a missing file's message is that it was not found.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) and not isinstance(error, OSError):
            raise
        reason = first_line(error)
        if missing and isinstance(error, FileNotFoundError):
            reason = f"{missing} not found"
        raise UserError(f"{start}: {reason}") from error


def put_whole(file: Path, url: str, key: str) -> ObjectState:
    """Copies a file of this disk to a store, and compares the size there. Returns the file's state in the store.

    Args:
        file: its path here.
        url: its place there; a file that has it is replaced.
        key: the configuration key that named the store, for messages.

    Raises:
        FileNotFoundError: the file, or the bucket, is not there.
        OSError: all tries have failed.
    """

    def attempt() -> ObjectState:
        """One try; an OSError where the size in the store differs."""
        files, path = file_system(url, key)
        size = file.stat().st_size
        files.put_file(str(file), path)
        files.invalidate_cache()
        info = files.info(path)
        if info["size"] != size:
            raise OSError(f"it has {info['size']} bytes there, {size} here")
        return state_of_object(info)

    return tried(attempt, f"{url} can't be written")


def files_below(url: str, key: str, below: bool = True) -> dict[str, ObjectState]:
    """The files of a folder in a store, as the store has them now.

    Args:
        url: of the folder.
        key: the configuration key that named it.
        below: list the files of the folders in it too, at any depth: ``FOLDER/FILE``.

    Returns:
        States (:func:`state_of_object`) by name relative to the folder; {} where there is no such folder.

    Raises:
        UserError: a web server's, which can't be listed.
        OSError: all tries have failed.
    """
    files, path = file_system(url, key)
    if url.startswith(("http://", "https://")):
        raise UserError(
            f"{key}: {url}: a web server does not list its files; copy them to a disk or an object store"
        )
    files.invalidate_cache()  # else a second listing repeats the first
    depth = None if below else 1
    try:
        infos = tried(lambda: files.find(path, depth, detail=True), f"{url} can't be listed")
    except FileNotFoundError:
        return {}
    finally:
        files.invalidate_cache()
    start = len(path.rstrip("/")) + 1
    states = {}
    for full_name, info in infos.items():
        if len(full_name) <= start or full_name.endswith("/"):  # the folder, or one in it
            continue
        states[full_name[start:]] = state_of_object(info)
    return states


def state_of_object(info: Mapping[str, Any]) -> ObjectState:
    """The state of a file in a store, from fsspec's ``info`` about it; where the content has changed the state differs.

    A store that says nothing of :data:`FACTS_OF_CONTENT`, such as a plain ``http`` server, has the size alone to differ.
    """
    fact = next((f"{name}={info[name]}" for name in FACTS_OF_CONTENT if info.get(name)), "")
    digits = hashlib.sha256(fact.encode()).hexdigest()[:16]
    return info["size"], int(digits, 16) % TIMES


def small_file(url: str, largest: int = LARGEST, key: str = "data.source.root") -> bytes:
    """The content of a file at a URL, or of a regular file of this machine; ``key`` is the setting that named it.

    Raises:
        RefusedFile: it has more than ``largest`` bytes; an OSError and a UserError.
        FileNotFoundError: no such file.
        OSError: all tries have failed.
    """
    files, path = file_system(url, key)
    if "file" in files.protocol:  # this machine's, where a pipe may have the name
        return bytes_of(path, largest)
    files.invalidate_cache()
    read = partial(files.cat_file, path, start=0, end=largest + 1)
    content: bytes = tried(read, f"{url} can't be read")
    if len(content) > largest:
        raise too_large(path, len(content), largest)
    return content


def name_in(url: str, key: str) -> str:
    """The name of a run that a file beside the runs holds: ``latest``, or a job's marker.

    Args:
        url: of the file.
        key: by which the user has given it, for messages.

    Raises:
        FileNotFoundError: no such file.
        OSError: it can't be read.
        UserError: what it holds is no name of a folder.
    """
    content = small_file(url, key=key)
    return plain_name(content.decode(errors="replace").strip(), f"{key}: {url}")


def url_of_run(url: str, key: str) -> str:
    """The URL of a run, without a slash at its end. ``latest`` is a file that holds a run's name: it gives that run's URL.

    Args:
        url: of a run, which is not looked for, or of ``latest`` beside the runs.
        key: by which the user has given it, for messages.

    Raises:
        UserError: no such ``latest``, it can't be read, or what it holds is no name of a folder.
    """
    url = url.rstrip("/")
    if not url.endswith("/latest"):
        return url
    with in_one_line(key, f"run {url}"):
        return url.removesuffix("latest") + name_in(url, key)

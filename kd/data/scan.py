"""Finds pictures that can't be decoded, before training reads them; once a machine, on all its cores."""

import hashlib
import pickle
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import NamedTuple

from pydantic import TypeAdapter

from kd.data.once import once
from kd.data.pictures import MAX_PIXELS, decode
from kd.data.sources import FileSplit, MaskSplit, Split, printable
from kd.data.sources.base import SplitFacts, split_facts, whole_of
from kd.errors import first_line
from kd.machine import cache_dir, cores
from kd.progress import bar
from kd.settings import Check
from kd.storage.decoding import open_picture

ALL_UP_TO = 50_000  # pictures: more are checked by their headers unless asked otherwise
WINDOW = 10_000  # pictures that wait for a thread to check them
FACTS_SHARED = 20_000  # pictures: the files of more are read by one process of a machine


def usual(split: Split) -> Check:
    """How pictures are checked where ``data.check`` does not say.

    A pack says so itself (its ``check``). Else all pixels of up to :data:`ALL_UP_TO` pictures, of more the headers.
    """
    of_split: Check | None = getattr(split, "check", None)
    if of_split:
        return of_split
    return "all" if len(split.targets) <= ALL_UP_TO else "headers"


class Scan(NamedTuple):
    """What a search for damaged pictures has found in one split."""

    damaged: dict[int, str]
    """The reason by the picture's number, for those that can't be read or decoded."""
    digests: list[str]
    """With ``check`` all a hash of each picture's bytes, "" for one that can't be read; else no entries."""


def scan(
    split: Split,
    label: str,
    check: Check = "all",
    max_pixels: int = MAX_PIXELS,
    facts: Callable[[Split], SplitFacts] = split_facts,
) -> Scan:
    """Checks every picture of a split once, by one process a machine (:func:`~kd.data.once.once`).

    A later run reads the result, too, while names, labels, sizes and times of the files stay; but it looks at the damaged
    pictures again, as permissions and disks may be mended meanwhile.

    Args:
        split: the pictures.
        label: its name, for the bar.
        check: ``all``: every pixel is decoded; ``headers``: these alone are read; ``off``: nothing is found.
        max_pixels: a picture with more counts as damaged.
        facts: gives those of the split.
    """
    if check in ("off", False):  # YAML 1.1 reads a bare off so
        return Scan({}, [])
    what = f"{check}-{max_pixels}"
    listed, _ = whole_of(split, 0)
    if isinstance(listed, MaskSplit):  # settings decide which values its masks may hold
        what += f"-{listed.classes}-{listed.ignore}"
    memory = cache_dir() / "scans" / f"{facts(split).fingerprint}-{what}.json"
    count = len(split.targets)
    digests_expected = count if check == "all" else 0

    def is_of_split(found: Scan) -> bool:
        """Whether a result has a hash of each picture (``all``), and those that it names as damaged still are."""
        if len(found.digests) != digests_expected:
            return False
        return all(
            0 <= i < count and _check_one(split, check, max_pixels, i)[0] for i in found.damaged
        )

    find = partial(_check_all, split, label, check, max_pixels)
    return once(memory, TypeAdapter(Scan), find, is_of_split)


def _check_all(split: Split, label: str, check: Check, max_pixels: int) -> Scan:
    """Checks the pictures of a split, on all cores; arguments as of :func:`scan`."""
    count = len(split.targets)
    look = partial(_check_one, split, check, max_pixels)
    result = Scan({}, [])
    with ThreadPoolExecutor(cores()) as pool:
        windows = (range(i, min(i + WINDOW, count)) for i in range(0, count, WINDOW))
        looks = (found for window in windows for found in pool.map(look, window))
        for i, (reason, digest) in enumerate(bar(looks, label=f"checking {label}", total=count)):
            if check == "all":
                result.digests.append(digest)
            if reason:
                result.damaged[i] = printable(reason)
    return result


def _check_one(split: Split, check: Check, max_pixels: int, i: int) -> tuple[str, str]:
    """Why a picture can't be used ("" where it can), and a hash of its bytes ("" where these were not read).

    With ``all`` a picture with a mask file needs a mask of its size, which holds class ids and the ignored value alone.
    Runs in a thread of :func:`scan`.

    Args:
        split: holds it.
        check: ``headers`` or ``all``.
        max_pixels: a picture with more can't be used.
        i: its number in the split.
    """
    digest = ""
    try:
        split.name(i).encode()
        split, i = whole_of(split, i)
        if check == "headers":
            with (
                split.open(i) if isinstance(split, FileSplit) else BytesIO(split.read(i)) as stream
            ):
                opened = open_picture(stream, max_pixels)
                if isinstance(split, MaskSplit):
                    split.check_turned(i, opened)
                opened.close()
            return "", ""
        content = split.read(i)
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        picture = decode(content, max_pixels)
        if isinstance(split, MaskSplit):
            split.check_mask(i, *picture.shape[1:])
    except UnicodeEncodeError:
        return "its name is not UTF-8", digest
    except OSError as error:
        return error.strerror or str(error), digest
    except (RuntimeError, ValueError, MemoryError) as error:
        return first_line(error), digest
    return "", digest


def facts_of_machine(split: Split, since: float) -> SplitFacts:
    """The facts of a split, for which one process of a machine reads the size and time of each file.

    Every process calls it; a file of facts that was written before ``since`` is not used. Small splits, and those that
    can't be pickled, are read by each process.

    Args:
        split: listed alike in all processes.
        since: when this process began to list it, in seconds of the Unix clock.
    """
    if len(split.targets) <= FACTS_SHARED:
        return split_facts(split)
    digest = hashlib.sha256()
    try:
        pickle.dump(split, SimpleNamespace(write=digest.update))
    except Exception:  # a split of someone's own raises any kind
        return split_facts(split)
    host = socket.gethostname()
    file = cache_dir() / "scans" / f"facts-{digest.hexdigest()[:16]}.json"
    note = once(
        file,
        TypeAdapter(Note),
        lambda: Note(host, time.time(), split_facts(split)),
        lambda note: note.host == host and note.time >= since,
    )
    return note.facts


class Note(NamedTuple):
    """The facts of a split as a process of a machine has read them."""

    host: str
    """The machine's name."""
    time: float
    """Unix time in seconds."""
    facts: SplitFacts

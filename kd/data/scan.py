"""Finds pictures that can't be decoded, before training meets them."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kd._bar import bar
from kd.data.masks import MaskSplit
from kd.data.sources import Split, cache_dir, fingerprint
from kd.data.transforms import decode
from kd.memory import cores


def damaged(split: Split, label: str) -> dict[int, str]:
    """Decodes every picture of a split once and remembers the answer in the user's cache folder.

    Args:
        split: the pictures.
        label: what the progress bar calls them.

    Returns:
        The reason by the picture's number, for those that can't be read or decoded.
    """
    memory = cache_dir() / "scans" / f"{fingerprint(split)}.json"
    if memory.is_file():
        return {int(i): reason for i, reason in json.loads(memory.read_text()).items()}
    numbers = range(len(split.targets))
    with ThreadPoolExecutor(cores()) as pool:
        checked = bar(pool.map(lambda i: _reason(split, i), numbers), label=f"checking {label}", total=len(numbers))
        reasons = list(checked)
    found = {i: reason for i, reason in enumerate(reasons) if reason}
    _remember(memory, json.dumps(found))
    return found


def _reason(split: Split, i: int) -> str | None:
    try:
        picture = decode(split.read(i))
        if isinstance(split, MaskSplit):
            split.check(i, *picture.shape[1:])
    except (RuntimeError, OSError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0][:160]
    return None


def _remember(file: Path, text: str) -> None:
    """Written under another name first: several processes of a run may scan at once."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}-{hashlib.sha1(os.urandom(8)).hexdigest()[:6]}")
        part.write_text(text)
        part.replace(file)
    except OSError:
        return  # a read-only or full cache folder costs a second scan, nothing more

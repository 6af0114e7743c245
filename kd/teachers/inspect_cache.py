"""What a folder of answers holds, and whether a recipe can use it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.storage.elsewhere import LARGEST_DATA, json_of, open_regular
from kd.storage.objects import is_url
from kd.teachers.answer import Wanted
from kd.teachers.answer_codec import CRC_BYTES
from kd.teachers.answer_store import count_written, fingerprints_in
from kd.teachers.base import RunTeacher
from kd.teachers.cache_layout import Layout
from kd.teachers.fingerprint import FINGERPRINT, Parts, differing_settings, parts_in


@dataclass
class Held:
    """One kind of answers as found on disk."""

    folder: str
    """Path of the folder that holds them, or its URL."""
    parts: Parts
    """What they depend on."""
    filled: str
    """How many views, how much of them is there, and the size of their files in MB."""

    def lines(self) -> Iterator[str]:
        """The lines of ``kd-cache --describe``: folder and what is filled, then a line for each part that is not empty."""
        yield f"{self.folder}: {self.filled}"
        for part, values in self.parts.items():
            named = []
            for name, value in values.items():
                text = json.dumps(value)
                named.append(f"{name} {text}")
            if named:
                listed = ", ".join(named)
                yield f"  {part}: {listed}"


def held_in(place: str) -> list[Held]:
    """All answers (and pixels of views) in a folder or URL, or up to three folders below it, the nearest first.

    Raises:
        UserError: there are none, or a URL can't be read.
    """
    caches = []
    for folder, text in fingerprints_in(place):
        cache = _held(folder, text)
        if cache is not None:
            caches.append(cache)
    if not caches:
        raise UserError(
            f"describe: {place} holds no answers of a teacher ({FINGERPRINT} not found in it)"
        )
    return caches


def _held(folder: str, text: str) -> Held | None:
    """One kind of answers in ``folder`` by the text of its fingerprint; None where that is not a fingerprint.

    Of a cache of this machine all files are read to count the answers that are there; a published one is whole.
    """
    parts = parts_in(text)
    pictures = parts.get("data", {}).get("pictures")
    if not isinstance(pictures, int) or pictures < 1:
        return None
    if is_url(folder):
        return Held(folder, parts, f"{json_of(text).get('views')} view(s), 100% filled")
    files = sorted(Path(folder).glob("view-*.bin"))
    size = 0
    written = 0
    for file in files:
        bytes_of_view = file.stat().st_size
        size += bytes_of_view
        record_bytes = bytes_of_view // pictures
        if record_bytes >= CRC_BYTES:
            with open_regular(file, LARGEST_DATA) as opened:
                written += count_written(opened.fileno(), pictures, record_bytes)
    filled = written / max(1, pictures * len(files))
    return Held(folder, parts, f"{len(files)} view(s), {filled:.0%} filled, {size / 1e6:,.1f} MB")


def compare_with_recipe(
    caches: Sequence[Held], teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted
) -> tuple[bool, str]:
    """Compares what a recipe wants with what is stored.

    Args:
        caches: at least one, of any teacher and data.
        teacher: or several, in the precision of the run.
        data: the training pictures and views.
        wanted: what losses read.

    Returns:
        Whether the recipe finds all its answers among them, filled or not, and a line for each kind that it wants: it
        fits, or what differs from the nearest cache.
    """
    layout = Layout(data)
    lines = []
    fits = True
    for name, member in teacher.members.items():
        if not wanted.of(name):
            continue
        for kind in layout.kinds(member, wanted.of(name), pixels=member.spec.cache_pixels):
            of_caches = [differing_settings(c.parts, kind.parts, member.key) for c in caches]
            fewest = min(of_caches, key=lambda differing: (len(differing), differing))
            result = "fits"
            if fewest:
                fits = False
                result = f"does not fit: {'; '.join(fewest)}"
            lines.append(f"{member.key}: {kind.name}: {result}")
    return fits, "\n".join(lines)

"""What a folder of answers holds, and whether a recipe can use it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.machine import cache_dir
from kd.storage.elsewhere import LARGEST_DATA, json_of, open_regular
from kd.storage.objects import is_url
from kd.teachers.answer import Wanted
from kd.teachers.answer_codec import CRC_BYTES
from kd.teachers.answer_store import are_written, fingerprints_in
from kd.teachers.base import RunTeacher
from kd.teachers.cache_layout import Layout
from kd.teachers.cached import CachedTeacher
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
    found = [_held(folder, text) for folder, text in fingerprints_in(place)]
    caches = [cache for cache in found if cache is not None]
    if not caches:
        raise UserError(
            f"describe: {place} holds no answers of a teacher ({FINGERPRINT} not found in it)"
        )
    return caches


def _held(folder: str, text: str) -> Held | None:
    """One kind of answers in ``folder`` by the text of its fingerprint; None where that is not a fingerprint.

    On this machine the first bytes of each record are read to count those that are there; behind a URL all are there.
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
                numbers = np.arange(pictures)
                written += int(are_written(opened.fileno(), numbers, record_bytes).sum())
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
    places = {cache.folder: cache.parts for cache in caches}
    for name, member in teacher.members.items():
        if not wanted.of(name):
            continue
        for kind in layout.kinds(member, wanted.of(name), pixels=member.spec.cache_pixels):
            place, differing = nearest_cache(places, kind.parts, member.key)
            result = "fits"
            if differing:
                fits = False
                result = f"does not fit: {'; '.join(differing)}"
                answered_by = places[place]["teacher"]
                # answers of kd-cache from= have no precision
                if answered_by and "dtype" not in answered_by and not member.stored:
                    folder = place.rpartition("/")[0]
                    result += f"; {member.key}.answers={folder} uses answers that kd-cache from= has stored"
            lines.append(f"{member.key}: {kind.name}: {result}")
    return fits, "\n".join(lines)


def nearest_cache(caches: Mapping[str, Parts], wanted: Parts, key: str) -> tuple[str, list[str]]:
    """The cache that differs least from what a run wants: its folder, and the settings that differ, as
    :func:`kd.teachers.fingerprint.differing_settings` says them.

    Args:
        caches: fingerprints by folder; at least one.
        wanted: the run's.
        key: the teacher's configuration key.
    """
    differing = {place: differing_settings(parts, wanted, key) for place, parts in caches.items()}
    place = min(differing, key=lambda place: (len(differing[place]), differing[place]))
    return place, differing[place]


def differing_from_others(cache: CachedTeacher) -> str:
    """The settings by which the nearest answers on this machine differ from those that a run lacks, to end a message.

    Only answers of the cache's first kind (logits, or a layer's features) count, and only those below kd's cache folder,
    where they are kept without ``cache_dir``.

    Returns:
        Text that begins with ";"; "" without such answers.
    """
    kind = cache.kinds[0]
    layer = kind.parts["answers"].get("features")
    caches = {}
    for place, text in fingerprints_in(str(cache_dir() / "answers")):
        parts = parts_in(text)
        if (
            place != kind.place
            and parts.get("teacher")
            and parts["answers"].get("features") == layer
        ):
            caches[place] = parts
    if not caches:
        return ""
    place, differing = nearest_cache(caches, kind.parts, cache.live.key)
    return f"; those in {place} are of other settings: {'; '.join(differing)}"

"""What a folder of answers holds, and whether a recipe can use it."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.storage.elsewhere import LARGEST_DATA, json_of, open_regular, text_of
from kd.storage.objects import file_system, in_one_line, is_url, small_file
from kd.teachers.answer import Wanted
from kd.teachers.answer_codec import CRC_BYTES, FEATURES_ALONE
from kd.teachers.answer_store import FINGERPRINT, count_written, differences
from kd.teachers.base import RunTeacher
from kd.teachers.cache_layout import PIXELS, Layout, Parts

DEPTH = 4
"""Folders that are searched: the given one, and those of a pack, a teacher and a kind of answer below it."""
PARTS = ("teacher", "transform", "data", "answers")
"""Parts of a fingerprint, see :mod:`kd.teachers.cache_layout`."""


@dataclass
class Held:
    """One kind of answers as found on disk."""

    folder: str
    """Path of the folder that holds them, or its URL."""
    parts: dict[str, dict[str, Any]]
    """What they depend on, see :class:`kd.teachers.cache_layout.Kind`."""
    measured: dict[str, Any]
    """Numbers measured when it was begun."""
    views: int
    """Views of each picture."""
    size: int
    """Bytes of its files, which have their whole size from the start."""
    filled: float
    """Share of answers that is there, in 0..1."""

    @property
    def pictures(self) -> int:
        """How many pictures the cache is for."""
        return int(self.parts["data"].get("pictures", 0))

    def teacher(self) -> str:
        """One line for ``kd-cache --describe``: whose answers, to which pictures, and how views are made."""
        teacher = self.parts["teacher"]
        views = self.parts["transform"]
        name = "any teacher"  # of the pixels of views
        if teacher:
            weights = teacher.get("weights")
            dtype = teacher.get("dtype")
            name = f"{teacher.get('arch')} (weights {weights}, {_size(teacher)}, {dtype})"
        not_augment = ("img_size", "seed", "engine", "torch", "torchvision")
        augment = []
        for key, value in views.items():
            if value and key not in not_augment:
                augment.append(f"{key} {value}")
        origin = f"seed {views.get('seed')}, engine {views.get('engine')}"
        listed = ", ".join(augment) or "plain"
        return f"{name}; {self.pictures} pictures of {_size(views)}, {origin}; {listed}"

    def answers(self) -> str:
        """One line: which answers, how much is filled, their size in MB, and how far compressed values are off."""
        size = f"{self.views} view(s), {self.filled:.0%} filled, {self.size / 1e6:,.1f} MB"
        answers = self.parts["answers"]
        form = answers["format"]
        if form == PIXELS:
            with_masks = " and masks" if answers.get("masks") else ""
            return f"pixels{with_masks}: {size}"
        kinds = []
        if form != FEATURES_ALONE:
            kinds.append(f"logits ({form}, {answers['classes']} classes)")
        for name, shape in answers.get("features", {}).items():
            sides = "x".join(str(side) for side in shape)
            kinds.append(f"{name} ({sides})")
        names = " and ".join(kinds)
        return f"{names}: {size}{self._errors()}"

    def _errors(self) -> str:
        """The measured errors, as the end of a sentence; "" where none were measured."""
        errors = self.measured.get("error", {})
        worst = self.measured.get("worst", {})
        if not errors:
            return ""
        shares = []
        for name, error in errors.items():
            shares.append(f"{error:.3%} (at worst {worst.get(name, error):.3%})")
        return f", off by {', '.join(shares)} on {self.measured.get('pictures')} pictures"


def held_in(place: str) -> list[Held]:
    """All answers (and pixels of views) in a folder or URL, or up to three folders below it, the nearest first.

    Raises:
        UserError: there are none, or a URL can't be read.
    """
    caches = []
    for folder, text in _fingerprints(place):
        cache = _held(folder, text)
        if cache is not None:
            caches.append(cache)
    if not caches:
        raise UserError(
            f"describe: {place} holds no answers of a teacher ({FINGERPRINT} not found in it)"
        )
    return caches


def _fingerprints(place: str) -> Iterator[tuple[str, str]]:
    """Folder (or URL) and text of each fingerprint at a place and below it, the nearest first."""
    if not is_url(place):
        for depth in range(DEPTH):
            for file in sorted(Path(place).expanduser().glob("*/" * depth + FINGERPRINT)):
                with suppress(OSError, ValueError):
                    yield str(file.parent), text_of(file)
        return
    files, path = file_system(place, "describe")
    with in_one_line(f"describe: {place}"):
        for depth in range(DEPTH):
            for name in sorted(files.glob(f"{path}/{'*/' * depth}{FINGERPRINT}")):
                yield (
                    files.unstrip_protocol(name).rpartition("/")[0],
                    small_file(files, name, f"{name} can't be read").decode(),
                )


def _held(folder: str, text: str) -> Held | None:
    """One kind of answers in ``folder`` by the text of its fingerprint; None where that is not a fingerprint.

    Of a cache that was not published, all files are read to count the answers that are there.
    """
    try:
        stored = json_of(text)
        parts = {name: dict(stored[name]) for name in PARTS}
        pictures = int(parts["data"]["pictures"])
        measured = dict(stored.get("measured") or {})
        if "shards" in stored:  # published: whole before it had a fingerprint
            views = int(stored["views"])
            size = views * pictures * int(stored["record_bytes"])
            return Held(folder, parts, measured, views, size, filled=1.0)
    except (ValueError, KeyError, TypeError):
        return None

    files = sorted(Path(folder).glob("view-*.bin"))
    size = 0
    written = 0
    for file in files:
        bytes_of_view = file.stat().st_size
        size += bytes_of_view
        if bytes_of_view >= CRC_BYTES * max(pictures, 1):
            record_bytes = bytes_of_view // max(pictures, 1)
            with open_regular(file, LARGEST_DATA) as opened:
                written += count_written(opened.fileno(), pictures, record_bytes)
    filled = written / max(1, pictures * len(files))
    return Held(folder, parts, measured, len(files), size, filled)


def describe(caches: Iterable[Held]) -> str:
    """The text of ``kd-cache --describe``: a line for each teacher and its views, its answers indented below."""
    answers_by_teacher: dict[str, list[str]] = {}
    for cache in caches:
        answers = f"  {cache.answers()}; {cache.folder}"
        answers_by_teacher.setdefault(cache.teacher(), []).append(answers)
    lines = []
    for teacher, answers_of_teacher in answers_by_teacher.items():
        lines.append(teacher)
        lines.extend(answers_of_teacher)
    return "\n".join(lines)


def fit(
    caches: list[Held], teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted
) -> tuple[bool, str]:
    """Compares what a recipe wants with what is stored.

    Args:
        caches: at least one, of any teacher and data.
        teacher: or several, in the precision of the run.
        data: the training pictures and views.
        wanted: what losses read.

    Returns:
        Whether the recipe finds all its answers among them, filled or not, and a line for each kind that it wants: it
        fits, or what differs from the nearest cache. Pixels that ``cache_pixels=auto`` would store are not missed.
    """
    layout = Layout(data)
    lines = []
    fits = True
    for name, member in teacher.members.items():
        if not wanted.of(name):
            continue
        kinds: dict[str, Parts] = {}
        for kind in layout.kinds(member, wanted.of(name)):
            features = kind.codec.describe().get("features", {"logits": None})
            kinds[", ".join(features)] = kind.parts
        if member.spec.cache_pixels:
            kinds[PIXELS] = layout.pixels(member)[1]
        for title, parts in kinds.items():
            of_caches = [_differences(cache, parts, member.key) for cache in caches]
            fewest = min(of_caches, key=lambda differing: (len(differing), differing))
            result = "fits"
            if fewest and title == PIXELS and member.spec.cache_pixels == "auto":
                result = "not stored (auto stores them where they pay)"
            elif fewest:
                fits = False
                result = f"does not fit: {'; '.join(fewest)}"
            lines.append(f"{member.key}: {title}: {result}")
    return fits, "\n".join(lines)


def _differences(cache: Held, parts: Parts, key: str) -> list[str]:
    """What differs between a cache and a recipe, a sentence each with the key that sets it; [] where nothing does.

    Args:
        cache: on disk.
        parts: the fingerprint that the recipe would write.
        key: of the teacher's settings.
    """
    sentences = []
    for part in PARTS:
        wanted = json_of(json.dumps(parts[part]))  # with lists for tuples, as in the file
        for name, difference in differences(cache.parts[part], wanted).items():
            sentences.append(f"{_key(part, name, key)}: {difference}")
    return sentences


def _key(part: str, name: str, teacher: str) -> str:
    """The setting, or the version, that decides a value of a fingerprint.

    Args:
        part: of the fingerprint, one of :data:`PARTS`.
        name: of the value in it.
        teacher: the teacher's configuration key.
    """
    keys = {
        "teacher": {"dtype": "trainer.precision", "weights": f"{teacher}.checkpoint"},
        "transform": {
            "seed": "seed",
            "torch": "torch's version",
            "torchvision": "torchvision's version",
            "img_size": "data.img_size",
            "engine": "data.engine",
            "unlabeled_ratio": "data.unlabeled_ratio",
        },
        "answers": {
            "features": "model.taps",
            "format": f"{teacher}.cache_topk",
            "temperatures": f"{teacher}.cache_topk",
            "masks": f"{teacher}.cache_pixels",
        },
    }
    if name in keys.get(part, {}):
        return keys[part][name]
    other_names = {"teacher": f"{teacher}.{name}", "transform": f"data.augment.{name}"}
    return other_names.get(part, "data.source")


def _size(part: dict[str, Any]) -> str:
    """Width and height in a part of a fingerprint, in pixels."""
    height, width = part.get("img_size", (0, 0))
    return f"{width}x{height} px"

"""What a folder of answers holds, and whether a recipe can use it."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
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

DEPTH = 4  # below the folder that is asked about: a pack, all caches, one of them, a kind of answer in it
PARTS = ("teacher", "transform", "data", "answers")


@dataclass
class Held:
    """One kind of answers as found on disk."""

    folder: str
    """Folder or URL."""
    parts: dict[str, dict[str, Any]]
    """What they depend on, see :class:`kd.teachers.cache_layout.Kind`."""
    measured: dict[str, Any]
    """Numbers measured when it was begun."""
    views: int
    """Views of each picture."""
    size: int
    """Bytes."""
    filled: float
    """Share of answers that is there, in 0..1."""

    @property
    def pictures(self) -> int:
        """How many pictures the cache is for."""
        return int(self.parts["data"].get("pictures", 0))

    def teacher(self) -> str:
        """Whose answers, to which pictures and views."""
        who, views = self.parts["teacher"], self.parts["transform"]
        known = ("img_size", "seed", "engine", "torch", "torchvision")
        augment = ", ".join(
            f"{key} {value}" for key, value in views.items() if key not in known and value
        )
        of = "any teacher"  # of the pixels of views
        if who:
            of = f"{who.get('arch')} (weights {who.get('weights')}, {_size(who)}, {who.get('dtype')})"
        made = f"seed {views.get('seed')}, engine {views.get('engine')}; {augment or 'plain'}"
        return f"{of}; {self.pictures} pictures of {_size(views)}, {made}"

    def answers(self) -> str:
        """Which answers, how many, how large and how far off."""
        kept = self.parts["answers"]
        if kept["format"] == PIXELS:
            with_masks = " and masks" if kept.get("masks") else ""
            return f"pixels{with_masks}: {self.views} view(s), {self.filled:.0%} filled, {self.size / 1e6:,.1f} MB"
        what = (
            [f"logits ({kept['format']}, {kept['classes']} classes)"]
            if kept["format"] != FEATURES_ALONE
            else []
        )
        for name, shape in kept.get("features", {}).items():
            what.append(f"{name} ({'x'.join(map(str, shape))}, {kept.get('precision', 'half')})")
        errors, worst = self.measured.get("error", {}), self.measured.get("worst", {})
        said = ", ".join(
            f"{error:.3%} (at worst {worst.get(name, error):.3%})" for name, error in errors.items()
        )
        off = f", off by {said} on {self.measured.get('pictures')} pictures" if errors else ""
        return f"{' and '.join(what)}: {self.views} view(s), {self.filled:.0%} filled, {self.size / 1e6:,.1f} MB{off}"


def held_in(place: str) -> list[Held]:
    """All answers in a folder or URL, or below it.

    Raises:
        UserError: there are none.
    """
    found = [one for one in starmap(_held, _fingerprints(place)) if one is not None]
    if not found:
        raise UserError(
            f"describe: {place} holds no answers of a teacher (there is no {FINGERPRINT} in it)"
        )
    return found


def _fingerprints(place: str) -> Iterator[tuple[str, str]]:
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
    try:
        noted = json_of(text)
        parts = {name: dict(noted[name]) for name in PARTS}
        pictures, measured = int(parts["data"]["pictures"]), dict(noted.get("measured") or {})
        if "shards" in noted:  # published: whole before it had a fingerprint
            views = int(noted["views"])
            return Held(
                folder, parts, measured, views, views * pictures * int(noted["record_bytes"]), 1.0
            )
    except (ValueError, KeyError, TypeError):
        return None
    files = sorted(Path(folder).glob("view-*.bin"))
    begun, sizes = 0, [view.stat().st_size for view in files]
    for view, size in zip(files, sizes, strict=True):
        if size >= CRC_BYTES * max(pictures, 1):
            with open_regular(view, LARGEST_DATA) as opened:
                begun += count_written(opened.fileno(), pictures, size // max(pictures, 1))
    return Held(
        folder, parts, measured, len(files), sum(sizes), begun / max(1, pictures * len(files))
    )


def describe(found: Iterable[Held]) -> str:
    """Lines about all of them, each teacher and its views once."""
    lines: dict[str, list[str]] = {}
    for one in found:
        lines.setdefault(one.teacher(), []).append(f"  {one.answers()}; {one.folder}")
    return "\n".join(line for teacher, kinds in lines.items() for line in [teacher, *kinds])


def fit(
    found: list[Held], teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted
) -> tuple[bool, str]:
    """Whether a recipe finds all its answers there, and a line for each kind that it wants."""
    layout, lines, fits = Layout(data), [], True
    for name, member in teacher.members.items():
        if not wanted.of(name):
            continue
        kinds = {
            ", ".join(kind.codec.describe().get("features", {"logits": None})): kind.parts
            for kind in layout.kinds(member, wanted.of(name))
        }
        if member.spec.cache_pixels:
            kinds[PIXELS] = layout.pixels(member)[1]
        for what, parts in kinds.items():
            nearest = min(
                (_differences(one, parts, member.key) for one in found),
                key=lambda said: (len(said), said),
            )
            fits &= not nearest
            lines.append(
                f"{member.key}: {what}: {'fits' if not nearest else 'does not fit: ' + '; '.join(nearest)}"
            )
    return fits, "\n".join(lines)


def _differences(one: Held, parts: Parts, key: str) -> list[str]:
    """What differs, each with the key that sets it; other kinds of answers last."""
    return [
        f"{_key(part, name, key)}: {differing}"
        for part in PARTS
        for name, differing in differences(
            one.parts[part], json_of(json.dumps(parts[part]))
        ).items()
    ]


def _key(part: str, name: str, teacher: str) -> str:
    caches = {"precision": "precision", "format": "topk", "temperatures": "topk", "masks": "pixels"}
    known = {
        "teacher": {"dtype": "trainer.precision", "weights": f"{teacher}.checkpoint"},
        "transform": {
            "seed": "seed",
            "torch": "torch's version",
            "torchvision": "torchvision's version",
        }
        | {plain: f"data.{plain}" for plain in ("img_size", "engine", "unlabeled_ratio")},
        "answers": {"features": "model.taps"}
        | {n: f"{teacher}.cache_{setting}" for n, setting in caches.items()},
    }
    others = {"teacher": f"{teacher}.{name}", "transform": f"data.augment.{name}"}
    return known.get(part, {}).get(name) or others.get(part, "data.source")


def _size(part: dict[str, Any]) -> str:
    height, width = part.get("img_size", (0, 0))
    return f"{width}x{height} px"

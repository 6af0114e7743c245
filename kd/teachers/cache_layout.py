"""What a teacher's answers depend on, and where each kind of them is kept.

A cache is a folder named after its teacher, pictures and views, with a folder and fingerprint for each kind of answer
(logits, or one layer's features in one precision). Recipes with the same teacher, data and views share it; students
and losses play no part.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision

from kd.data.datamodule import DistillationDataModule
from kd.data.sources import FileSplit, Split, cache_dir, fingerprint
from kd.data.sources.base import content, stamp_of
from kd.errors import UserError
from kd.losses import LogitLoss
from kd.storage.elsewhere import json_of, text_of
from kd.storage.objects import is_url
from kd.teachers.answer import Wanted
from kd.teachers.answer_codec import CRC_BYTES, AnswerCodec, Codec, DenseCodec, MapCodec, TopKCodec
from kd.teachers.answer_store import BEGUN, FINGERPRINT, refuse_strangers
from kd.teachers.base import RunTeacher

PUBLISHED = "answers"
"""The folder of answers beside a pack's shards."""

PIXELS = "pixels"
"""In the name of the folder of views' pixels, and the format that its fingerprint names."""

Parts = dict[str, dict[str, Any]]


@dataclass
class Kind:
    """One kind of a teacher's answers, with its place on disk."""

    codec: AnswerCodec
    """How a record is written."""
    parts: Parts
    """What the answers depend on: ``teacher``, ``transform``, ``data``, ``answers``."""
    folder: Path
    """Where they are."""
    url: str = ""
    """Where they are published (:mod:`kd.teachers.published`), instead."""

    @property
    def place(self) -> str:
        """Folder or URL, for messages."""
        return self.url or str(self.folder)


class Layout:
    """Where the answers to some training pictures are.

    Args:
        data: the pictures, and how they are augmented.
    """

    def __init__(self, data: DistillationDataModule) -> None:
        self.data = data
        self.samples, self.classes = data.info.train, data.info.classes
        self.split = data.split("train")
        pairs_follow_it = data.augment.mixes and data.unlabeled_ratio is not None  # beside the seed
        self.views: dict[str, Any] = {
            "img_size": list(data.size),
            "seed": data.seed,
            "engine": "torch"
            if data.engine == "ray"
            else data.engine,  # the same views, made elsewhere
            **asdict(data.augment),
            **({"unlabeled_ratio": data.unlabeled_ratio} if pairs_follow_it else {}),
            "torch": torch.__version__.split("+")[0],
            "torchvision": torchvision.__version__.split("+")[0],
        }
        self.masks = data.source.kind.cut_with_picture
        self.pictures = {"pictures": self.samples, "content": content(self.split)}

    def kinds(self, teacher: RunTeacher, wanted: Wanted) -> list[Kind]:
        """What a cache keeps of a teacher: the logits and each wanted feature.

        Args:
            teacher: on its device, in its precision.
            wanted: of this teacher.

        Raises:
            UserError: the cache's folder is a file, or holds something else.
        """
        beside = self.beside(teacher)
        whole = None if beside else self._in_one(teacher, wanted)
        if whole is not None:
            return [whole]
        shared: Parts = {
            "teacher": teacher.fingerprint(),
            "transform": self.views,
            "data": self.pictures,
        }
        base = self.base(teacher)
        if base.exists() and not base.is_dir():
            raise UserError(f"{teacher.key}.cache_dir: {base} can't be used: it is a file")
        if not beside:
            refuse_strangers(base, _is_ours, teacher.key)
        found = []
        for label, codec in self._codecs(teacher, wanted):
            own: Parts = {"answers": codec.describe()}
            if codec.logits:
                own["teacher"] = {
                    "classes": teacher.spec.classes,
                    "class_map": teacher.spec.class_map,
                }
                own["data"] = {"classes": _hash("\0".join(self.classes))}
            name = re.sub(r"[^\w.]+", "_", label) + "-" + _digest(own)[:8]
            parts = {
                part: {**shared.get(part, {}), **own.get(part, {})} for part in (*shared, "answers")
            }
            found.append(Kind(codec, parts, base / name, f"{beside}/{name}" if beside else ""))
        return found

    def beside(self, teacher: RunTeacher) -> str:
        """Where its answers are published beside a pack; nothing where ``cache_dir`` is a cache of this machine."""
        place = (teacher.spec.cache_dir or "").rstrip("/")
        if is_url(place) or (place and Path(place, PUBLISHED).is_dir()):
            return f"{place}/{PUBLISHED}/{self.name(teacher)}"
        return ""

    def base(self, teacher: RunTeacher) -> Path:
        """The folder of all answers of one teacher to these views."""
        if teacher.spec.cache_dir:
            return Path(teacher.spec.cache_dir).expanduser()
        return cache_dir() / "answers" / self.name(teacher)

    def name(self, teacher: RunTeacher) -> str:
        """Name of a cache's folder: the architecture, and a digest of teacher, views and pictures."""
        shared = {"teacher": teacher.fingerprint(), "transform": self.views, "data": self.pictures}
        return f"{teacher.spec.arch.replace('/', '_')}-{_digest(shared)}"

    def pixels(self, teacher: RunTeacher) -> tuple[Path, Parts]:
        """Where the pixels of these views are kept, the same for all teachers, and what they depend on."""
        form = {"format": PIXELS, "masks": self.masks}
        parts: Parts = {
            "teacher": {},
            "transform": self.views,
            "data": self.pictures,
            "answers": form,
        }
        if teacher.spec.cache_dir and not self.beside(teacher):
            return self.base(teacher) / f"{PIXELS}-{_digest(parts)[:8]}", parts
        return cache_dir() / "answers" / PIXELS / _digest(parts), parts

    @property
    def pixel_bytes(self) -> int:
        """Size of a view's record: a checksum, uint8 ``(3, H, W)``, and its mask ``(1, H, W)`` where it has one."""
        return CRC_BYTES + (3 + self.masks) * self.data.size[0] * self.data.size[1]

    def _codecs(self, teacher: RunTeacher, wanted: Wanted) -> list[tuple[str, AnswerCodec]]:
        precision = teacher.spec.cache_precision
        found = [("logits", AnswerCodec(codec))] if (codec := self._logits(teacher, wanted)) else []
        for (_, path, tokens), shape in wanted.features.items():
            found.append(
                (f"{path}.{tokens}", AnswerCodec(None, {(path, tokens): shape[1:]}, precision))
            )
        return found

    def _logits(self, teacher: RunTeacher, wanted: Wanted) -> Codec | None:
        if not wanted.logits:
            return None
        topk, count = teacher.spec.cache_topk, len(self.classes)
        if wanted.maps:
            _, classes, height, width = teacher(
                torch.zeros(1, 3, *self.data.size, dtype=torch.uint8)
            ).shape
            return MapCodec((classes, height, width), topk, teacher.spec.cache_precision)
        return (
            TopKCodec(count, topk, temperatures(logit_losses(wanted)))
            if topk
            else DenseCodec(count)
        )

    # -- caches from before each kind of answer had a folder ---------------------------------------------------------
    def _in_one(self, teacher: RunTeacher, wanted: Wanted) -> Kind | None:
        """A cache that holds all kinds in one record, where there is one."""
        folder = self.base(teacher)
        old = any(folder.parent.glob(f"*/{FINGERPRINT}"))
        if not (teacher.spec.cache_dir and (folder / FINGERPRINT).exists()) and not old:
            return None
        shapes = {(path, form): shape[1:] for (_, path, form), shape in wanted.features.items()}
        codec = AnswerCodec(self._logits(teacher, wanted), shapes, teacher.spec.cache_precision)
        parts: Parts = {
            "teacher": {
                **teacher.fingerprint(),
                "classes": teacher.spec.classes,
                "class_map": teacher.spec.class_map,
            },
            "transform": self.views,
            "data": {"pictures": self.samples, "classes": _hash("\0".join(self.classes))},
            "answers": codec.describe(),
        }
        for stamps in (False, True):
            found = {**parts, "data": {**parts["data"], "content": fingerprint(self.split, stamps)}}
            file = _file_of_old(teacher, found)
            if (
                file.exists()
                if stamps
                else _still_right(file, found["data"]["content"], self.split)
            ):
                return Kind(codec, found, file.parent)
        return None


def logit_losses(wanted: Wanted) -> list[LogitLoss]:
    """All losses that read logits, of whichever teacher."""
    return [loss for losses in wanted.logits.values() for loss in losses]


def temperatures(losses: Iterable[LogitLoss]) -> tuple[float, ...]:
    """The temperatures at which losses can do with the largest logits."""
    return tuple(sorted({t for t in map(topk_temperature, losses) if t is not None}))


def topk_temperature(loss: LogitLoss) -> float | None:
    """The temperature at which a loss can do with the largest logits; None where it needs all."""
    return getattr(loss, "topk_temperature", None)


def _is_ours(folder: Path) -> bool:
    names = (
        {p.name for p in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else {""}
    )
    return FINGERPRINT in names or names <= {*BEGUN}


def _file_of_old(teacher: RunTeacher, parts: Mapping[str, Any]) -> Path:
    if teacher.spec.cache_dir:
        return Path(teacher.spec.cache_dir).expanduser() / FINGERPRINT
    return cache_dir() / "answers" / f"{teacher.spec.arch}-{_digest(parts)}" / FINGERPRINT


def _still_right(file: Path, wanted: str, split: Split) -> bool:
    """Whether a cache from before pictures had stamps was begun after the last of them was changed."""
    try:
        if isinstance(split, FileSplit) or json_of(text_of(file))["data"]["content"] != wanted:
            return False
        stamps = filter(None, (stamp_of(split, i).rstrip("\0") for i in range(len(split.targets))))
        fields = "\0".join(stamps).split("\0")  # size and time of change of each file
        times = [int(time) for _, time in zip(fields[::2], fields[1::2], strict=fields != [""])]
        return max(times, default=0) <= file.stat().st_mtime_ns
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(parts: Mapping[str, Any]) -> str:
    return _hash(json.dumps(parts, sort_keys=True))

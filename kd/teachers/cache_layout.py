"""What a teacher's answers depend on, and where each kind of them is kept.

A cache is a folder, below the user's cache folder named after its teacher, pictures and views, with a folder and
fingerprint for each kind of answer (logits, or one layer's features). Recipes with the same teacher,
data and views share it; of students and losses only what they read decides which kinds it holds.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torchvision

from kd.data.datamodule import DistillationDataModule
from kd.data.own_transform import code_of, described
from kd.data.sources import cache_dir
from kd.errors import UserError
from kd.losses import LogitLoss
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
"""What answers depend on, as the fingerprint of a cache has it: ``teacher``, ``transform``, ``data``, ``answers``."""


@dataclass
class Kind:
    """One kind of a teacher's answers, with its place on disk."""

    codec: AnswerCodec
    """How a record is written."""
    parts: Parts
    """What the answers depend on."""
    folder: Path
    """Where they are on this machine."""
    url: str = ""
    """Where they are published (:mod:`kd.teachers.published`), in place of the folder."""

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
        """Describes the data's pictures and views, as they go into fingerprints: a change here makes caches
        unreadable.
        """
        self.data = data
        self.samples = data.info.train
        self.classes = data.info.classes
        self.masks = data.source.kind.cut_with_picture
        self.pictures = {"pictures": self.samples, "content": data.splits.content("train")}
        # ray makes the same views as torch, on other machines
        engine = "torch"
        if data.engine != "ray":
            engine = data.engine
        self.views: dict[str, Any] = {
            "img_size": list(data.size),
            "seed": data.seed,
            "engine": engine,
            **asdict(replace(data.augment, transform=None)),
            "torch": torch.__version__.split("+")[0],
            "torchvision": torchvision.__version__.split("+")[0],
        }
        if data.augment.transform is None:
            del self.views["transform"]
        else:
            self.views["transform"] = described(data.augment.transform)
            self.views["transform_code"] = code_of(data.augment.transform)
        if data.augment.mixes and data.unlabeled_ratio is not None:  # which decides the mixed pairs
            self.views["unlabeled_ratio"] = data.unlabeled_ratio

    def kinds(self, teacher: RunTeacher, wanted: Wanted) -> list[Kind]:
        """What a cache keeps of a teacher: the logits, where they are wanted, and each wanted feature.

        Nothing is written. Dense logits take one forward of the teacher, for their size.

        Args:
            teacher: in its precision, which is part of the fingerprint.
            wanted: of this teacher (:meth:`kd.teachers.answer.Wanted.of`).

        Raises:
            UserError: the cache's folder is a file, or holds something else.
        """
        published = self.published(teacher)
        base = self.base(teacher)
        if base.exists() and not base.is_dir():
            raise UserError(f"{teacher.key}.cache_dir: {base} can't be used: it is a file")
        if not published:
            refuse_strangers(base, _is_ours, teacher.key)
        kinds = []
        for label, codec in self._codecs(teacher, wanted):
            # what this kind depends on beside what all kinds do
            of_kind: Parts = {"teacher": {}, "data": {}, "answers": codec.describe()}
            if codec.logits:
                spec = teacher.spec
                of_kind["teacher"] = {"classes": spec.classes, "class_map": spec.class_map}
                of_kind["data"] = {"classes": _hash("\0".join(self.classes))}
            digest = _digest({part: content for part, content in of_kind.items() if content})
            name = re.sub(r"[^\w.]+", "_", label) + "-" + digest[:8]
            parts: Parts = {
                "teacher": {**teacher.fingerprint(), **of_kind["teacher"]},
                "transform": dict(self.views),
                "data": {**self.pictures, **of_kind["data"]},
                "answers": of_kind["answers"],
            }
            url = ""
            if published:
                url = f"{published}/{name}"
            kinds.append(Kind(codec, parts, base / name, url))
        return kinds

    def published(self, teacher: RunTeacher) -> str:
        """Folder or URL where its answers are published beside a pack; "" where ``cache_dir`` is a cache of this
        machine, or not set.

        ``cache_dir`` counts as a pack where it is a URL, or has a folder :data:`PUBLISHED`.
        """
        place = (teacher.spec.cache_dir or "").rstrip("/")
        if not place:
            return ""
        answers = f"{place}/{PUBLISHED}"
        if is_url(place) or Path(answers).is_dir():
            return f"{answers}/{self.name(teacher)}"
        return ""

    def base(self, teacher: RunTeacher) -> Path:
        """The folder of all answers of one teacher to these views: ``cache_dir`` itself, or one that names them."""
        if teacher.spec.cache_dir:
            return Path(teacher.spec.cache_dir).expanduser()
        return cache_dir() / "answers" / self.name(teacher)

    def name(self, teacher: RunTeacher) -> str:
        """Name of a cache's folder: the architecture, and a digest of teacher, views and pictures."""
        shared = {"teacher": teacher.fingerprint(), "transform": self.views, "data": self.pictures}
        return f"{teacher.spec.arch.replace('/', '_')}-{_digest(shared)}"

    def pixels(self, teacher: RunTeacher) -> tuple[Path, Parts]:
        """Where the pixels of these views are kept, and what they depend on, which is the same for all teachers.

        In the ``cache_dir`` of ``teacher`` where that is a cache of this machine, else in a folder that all teachers
        share.
        """
        parts: Parts = {
            "teacher": {},
            "transform": self.views,
            "data": self.pictures,
            "answers": {"format": PIXELS, "masks": self.masks},
        }
        if teacher.spec.cache_dir and not self.published(teacher):
            return self.base(teacher) / f"{PIXELS}-{_digest(parts)[:8]}", parts
        return cache_dir() / "answers" / PIXELS / _digest(parts), parts

    @property
    def pixel_bytes(self) -> int:
        """Size of a view's record: a checksum, uint8 ``(3, H, W)``, and its mask ``(1, H, W)`` where it has one."""
        planes = 4 if self.masks else 3
        height, width = self.data.size
        return CRC_BYTES + planes * height * width

    def _codecs(self, teacher: RunTeacher, wanted: Wanted) -> list[tuple[str, AnswerCodec]]:
        """The codec of each kind of answer with its label: the logits, then each layer's features."""
        codecs = []
        if wanted.logits:
            of_logits = self._logits_codec(teacher, wanted)
            codecs.append(("logits", AnswerCodec(of_logits)))
        for (_, path, tokens), shape in wanted.features.items():
            of_picture = {(path, tokens): shape[1:]}
            codec = AnswerCodec(None, of_picture)
            codecs.append((f"{path}.{tokens}", codec))
        return codecs

    def _logits_codec(self, teacher: RunTeacher, wanted: Wanted) -> Codec:
        """How logits are written: as maps, as the ``cache_topk`` largest, or whole, by the teacher's settings.

        Maps are wanted where a loss reads logits of every pixel; their shape is found by one forward on a black picture.
        """
        spec = teacher.spec
        if wanted.maps:
            black = torch.zeros(1, 3, *self.data.size, dtype=torch.uint8)
            _, classes, height, width = teacher(black).shape
            shape = classes, height, width
            return MapCodec(shape, spec.cache_topk)
        count = len(self.classes)
        if spec.cache_topk:
            of_losses = temperatures(logit_losses(wanted))
            return TopKCodec(count, spec.cache_topk, of_losses)
        return DenseCodec(count)


def logit_losses(wanted: Wanted) -> list[LogitLoss]:
    """All losses that read logits, of whichever teacher."""
    return [loss for losses in wanted.logits.values() for loss in losses]


def temperatures(losses: Iterable[LogitLoss]) -> tuple[float, ...]:
    """The temperatures at which losses can do with the largest logits, each once, ascending; () where all need all."""
    of_losses = [topk_temperature(loss) for loss in losses]
    return tuple(sorted({temperature for temperature in of_losses if temperature is not None}))


def topk_temperature(loss: LogitLoss) -> float | None:
    """The temperature at which a loss can do with the largest logits; None where it needs all."""
    return getattr(loss, "topk_temperature", None)


def _is_ours(folder: Path) -> bool:
    """Whether a path in a cache's folder is the folder of one kind of answers, begun or just made."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return FINGERPRINT in names or names <= {*BEGUN}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(parts: Mapping[str, Any]) -> str:
    return _hash(json.dumps(parts, sort_keys=True))

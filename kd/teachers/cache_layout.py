"""Where each kind of a teacher's answers is kept.

A cache is a folder, below the user's cache folder named after its teacher, pictures and views, with a folder and
fingerprint for each kind of answer (logits, or one layer's features). Recipes with the same teacher,
data and views share it; of students and losses only what they read decides which kinds it holds.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from kd.data.datamodule import DistillationDataModule
from kd.data.sources import cache_dir
from kd.errors import UserError
from kd.losses import LogitLoss
from kd.storage.objects import is_url
from kd.teachers.answer import Wanted
from kd.teachers.answer_codec import CRC_BYTES, Codec, Feature, Half, TopK
from kd.teachers.answer_store import BEGUN, Kind, refuse_strangers
from kd.teachers.base import RunTeacher
from kd.teachers.fingerprint import (
    FINGERPRINT,
    PIXELS,
    RECORDS,
    Parts,
    digest,
    pictures_of,
    views_of,
)
from kd.teachers.stored import StoredAnswers, codec_for

PUBLISHED = "answers"
"""The folder of answers beside a pack's shards."""


class Layout:
    """Where the answers to some training pictures are.

    Args:
        data: the pictures, and how they are augmented.
    """

    def __init__(self, data: DistillationDataModule) -> None:
        """Describes the data's pictures and views, as they go into fingerprints; the pictures are checked once."""
        self.data = data
        self.samples = data.info.train
        self.classes = data.info.classes
        self.pictures = pictures_of(data)
        self.views = views_of(data)

    def kinds(self, teacher: RunTeacher, wanted: Wanted, pixels: bool = False) -> list[Kind]:
        """What a cache keeps of a teacher: the logits, where they are wanted, and each wanted feature.

        Nothing is written. Maps of logits take one forward of the teacher, for their size. Stored answers
        (:class:`StoredAnswers`) have their own kinds, whatever is wanted.

        Args:
            teacher: in its precision, which is part of the fingerprint.
            wanted: of this teacher (:meth:`kd.teachers.answer.Wanted.of`).
            pixels: add the views' pixels.

        Raises:
            UserError: the cache's folder is a file, or holds something else.
        """
        if isinstance(teacher, StoredAnswers):
            return [*teacher.kinds(), *([self.pixels(teacher)] if pixels else [])]
        published = self.published(teacher)
        base = self.base(teacher)
        if base.exists() and not base.is_dir():
            raise UserError(f"{teacher.key}.cache_dir: {base} can't be used: it is a file")
        if not published:
            refuse_strangers(base, _is_ours, teacher.key)
        kinds = []
        if wanted.logits:
            codec = self._logits_codec(teacher, wanted)
            classes = {"classes": teacher.spec.classes, "class_map": teacher.spec.class_map}
            of_data = {"classes": digest("\0".join(self.classes))}
            parts: Parts = {"teacher": classes, "data": of_data, "answers": codec.describe()}
            kinds.append(self._kind(teacher, "logits", parts, codec, None))
        for (_, path, tokens), shape in wanted.features.items():
            feature = (path, tokens)
            half = Half(shape[1:])
            form = {"features": {f"{path}:{tokens}": list(shape[1:])}, **half.describe()}
            kinds.append(self._kind(teacher, f"{path}.{tokens}", {"answers": form}, half, feature))
        if pixels:
            kinds.append(self.pixels(teacher))
        return kinds

    def _kind(
        self, teacher: RunTeacher, label: str, own: Parts, codec: Codec, feature: Feature | None
    ) -> Kind:
        """One kind of answers. Its folder is named by ``label`` and by a digest of ``own``.

        Args:
            teacher: gives the answers.
            label: names the kind for people.
            own: what this kind depends on, beside what all kinds of this teacher do; "records" is added to its "answers" in
                place.
            codec: how an answer is written.
            feature: the layer; None: logits.
        """
        own["answers"]["records"] = RECORDS
        plain = re.sub(r"[^\w.]+", "_", label)
        name = f"{plain}-{digest(own)[:8]}"
        parts: Parts = {
            "teacher": {**teacher.fingerprint(), **own.get("teacher", {})},
            "transform": dict(self.views),
            "data": {**self.pictures, **own.get("data", {})},
            "answers": own["answers"],
        }
        published = self.published(teacher)
        place = f"{published or self.base(teacher)}/{name}"
        return Kind(parts, place, codec.record_bytes, codec, feature, bool(published))

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
        return f"{teacher.spec.arch.replace('/', '_')}-{digest(shared)}"

    def pixels(self, teacher: RunTeacher) -> Kind:
        """The pixels of these views, which are the same for all teachers.

        They are in the ``cache_dir`` of ``teacher`` where that is a cache of this machine, else in a folder that all
        teachers share. A record is uint8 ``(3, H, W)``, and its mask ``(1, H, W)`` where it has one.
        """
        masks = self.data.source.kind.cut_with_picture
        ignored = self.data.source.ignore_index  # decides the mask of a picture without one
        parts: Parts = {
            "teacher": {},
            "transform": self.views,
            "data": self.pictures,
            "answers": {"format": PIXELS, "masks": masks and [ignored], "records": RECORDS},
        }
        folder = cache_dir() / "answers" / PIXELS / digest(parts)
        if teacher.spec.cache_dir and not self.published(teacher):
            folder = self.base(teacher) / f"{PIXELS}-{digest(parts)[:8]}"
        height, width = self.data.size
        planes = 4 if masks else 3
        return Kind(parts, str(folder), CRC_BYTES + planes * height * width)

    def _logits_codec(self, teacher: RunTeacher, wanted: Wanted) -> Codec:
        """How logits are written: whole, or the ``cache_topk`` largest of each row, by the teacher's settings.

        Maps are wanted where a loss reads logits of every pixel; their shape is found by one forward on a black picture.
        """
        topk = teacher.spec.cache_topk
        whole: Codec = codec_for(self.data)
        if wanted.maps:
            black = torch.zeros(1, 3, *self.data.size, dtype=torch.uint8)
            whole = Half(tuple(teacher(black).shape[1:]))
        if topk:
            return TopK(whole.shape, topk, temperatures(wanted.losses))
        return whole


def temperatures(losses: Iterable[LogitLoss]) -> tuple[float, ...]:
    """The temperatures at which losses can do with the largest logits, each once, ascending; losses that need all logits
    have none.
    """
    return tuple(sorted(set(filter(None, map(topk_temperature, losses)))))


def topk_temperature(loss: LogitLoss) -> float | None:
    """The temperature at which a loss can do with the largest logits; None where it needs all."""
    return getattr(loss, "topk_temperature", None)


def _is_ours(folder: Path) -> bool:
    """Whether a path in a cache's folder is the folder of one kind of answers.

    Such a folder has a fingerprint, or as yet only files that come before it (:data:`BEGUN`).
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return FINGERPRINT in names or names <= {*BEGUN}

"""A teacher that answers from a cache where it can, and fills it where it can't."""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor

from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import FileSplit, Split, cache_dir, changed, fingerprint
from kd.errors import UserError
from kd.losses import DistillLoss, LogitLoss
from kd.models import Images, Preprocess
from kd.models.taps import TRIAL
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.answer_codec import AnswerCodec, DenseCodec, TopKCodec
from kd.teachers.answer_store import FINGERPRINT, AnswerStore
from kd.teachers.base import Teacher
from kd.teachers.frozen import FrozenTeacher


class CachedTeacher:
    """Answers by (sample, view): read from a store, or computed and stored. See :class:`kd.teachers.base.Teacher`.

    What it computes goes through the store's rounding before it is used, so a run that fills its cache and one that
    reads it learn from the same numbers. A batch that names no view (validation) is answered live.

    Args:
        live: the model behind it.
        store: the answers.
        codec: how a record is read and written.
        only: never run the model in training; a missing answer is an error.
    """

    def __init__(self, live: FrozenTeacher, store: AnswerStore, codec: AnswerCodec, only: bool = False) -> None:
        self.live, self.store, self.codec, self.only = live, store, codec, only
        self.arch, self.model, self.has_head = live.arch, live.model, live.has_head
        self.read = self.computed = 0
        self._full = False

    @property
    def members(self) -> dict[str, FrozenTeacher]:
        """The model behind it."""
        return self.live.members

    @property
    def is_shared_out(self) -> bool:
        """Whether it answers only where all processes ask."""
        return self.live.is_shared_out

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False) -> "CachedTeacher":
        """Moves the model behind it."""
        self.live.to(device, dtype, keep)
        return self

    def forget_original(self) -> None:
        """Of the model behind it."""
        self.live.forget_original()

    def identity(self) -> dict[str, Any]:
        """Of the model behind it."""
        return self.live.identity()

    def __call__(self, images: Images) -> Tensor:
        """Always live: pictures alone name no view."""
        return self.live(images)

    def fetch(self, batch: Batch, name: str = ALL) -> Batch:
        """On the host, where a look-up does not stop the device: adds the records, where all are there."""
        if "view" not in batch:
            return batch
        records, there = self.store.read(batch["view"], batch["index"].numpy())
        if not there.all():
            return batch
        return {**batch, "records": {**batch.get("records", {}), name: torch.from_numpy(records)}}

    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        """What the records say, or what the model says now.

        Raises:
            UserError: an answer is missing that must be there (``cache=only``), or is not finite.
        """
        if "view" not in batch:
            return self.live.answer(batch, wanted, name)
        logits, features = self.codec.decode(self._records(batch, name))
        return Answer({} if logits is None else {name: logits}, {(name, *key): x for key, x in features.items()})

    def _records(self, batch: Batch, name: str) -> Tensor:
        if name in batch.get("records", {}):
            self.read += len(batch["index"])
            return batch["records"][name]
        images, view, numbers = batch["image"], batch["view"], batch["index"].cpu().numpy()
        stored, there = self.store.read(view, numbers)
        missing = ~there
        if self.only:
            raise UserError(
                f"model.teacher.cache: only, but {missing.sum()} of {len(numbers)} answers of a batch are missing in "
                f"{self.store.folder}; kd-cache fills it"
            )
        self.computed += int(missing.sum())
        self.read += int((~missing).sum())
        places = torch.from_numpy(np.flatnonzero(missing)).to(images.device)
        encoded = self._ask(images if missing.all() else images[places], numbers[missing])
        whole = torch.from_numpy(stored).to(images.device)
        whole[places] = self._kept(view, numbers[missing], encoded)
        return whole

    def _ask(self, images: Images, numbers: np.ndarray) -> Tensor:
        """The model's answers as records."""
        logits, found = self.live.look(images, [(ALL, *feature) for feature in self.codec.features])
        if logits.ndim != 2:
            raise UserError(f"model.teacher.cache: holds one answer a picture, the teacher gives {tuple(logits.shape)}")
        features = {(path, tokens): x for (_, path, tokens), x in found.items()}
        finite = torch.stack([x.flatten(1).isfinite().all(1) for x in (logits, *features.values())]).all(0).cpu()
        if not finite.all():
            raise UserError(
                f"model.teacher: its answer to training picture {numbers[~finite.numpy()][0]} is not finite"
            )
        return self.codec.encode(logits, features)

    def _kept(self, view: int, numbers: np.ndarray, encoded: Tensor) -> Tensor:
        """Stores; gives what is stored now, which for some samples may be another process's answer."""
        if self._full:
            return encoded
        try:
            self.store.put(view, numbers, encoded.cpu().numpy())
        except OSError as error:
            self._full = True
            print(
                f"model.teacher.cache: {self.store.folder}: {error.strerror}; the teacher answers live", file=sys.stderr
            )
            return encoded
        kept, there = self.store.read(view, numbers)
        found = torch.from_numpy(there).to(encoded.device)[:, None]
        return torch.where(found, torch.from_numpy(kept).to(encoded.device), encoded)

    def report(self) -> dict[str, Any]:
        """What the summary says of it."""
        return {
            "folder": str(self.store.folder),
            **self.codec.describe(),
            "views": self.store.views,
            "disk_mb": round(self.store.disk_bytes / 1e6, 1),
            "answers_read": self.read,
            "answers_computed": self.computed,
        }


def open_cache(
    teacher: Teacher,
    losses: Mapping[str, Any],
    data: DistillationDataModule,
    wanted: Wanted,
    announce: bool = False,
) -> CachedTeacher:
    """Opens (or makes) the cache that ``teacher.spec`` asks for.

    Args:
        teacher: on its device, in its precision.
        losses: the distillation losses that will use the answers.
        data: the training pictures and how they are augmented.
        wanted: what the losses look at.
        announce: say, before anything is written, what it will take.

    Raises:
        UserError: losses or data that a cache can't serve, a cache of something else, no room on the disk.
    """
    check_cacheable(teacher, losses, data, wanted)
    assert isinstance(teacher, FrozenTeacher)
    codec, parts, folder = _layout(teacher, losses, data, wanted)
    samples, views = data.info.train, teacher.spec.cache_views
    if announce:
        kept = ", ".join(f"{name} {value}" for name, value in codec.describe().items())
        size = codec.record_bytes * samples * views
        print(f"cache: {codec.record_bytes:,} bytes an answer ({kept}), {size / 1e6:,.1f} MB for {views} view(s) of "
              f"{samples} pictures in {folder}", flush=True)  # fmt: skip
    store = AnswerStore(folder, parts, samples, views, codec.record_bytes, codec.usable)
    return CachedTeacher(teacher, store, codec, teacher.spec.cache == "only")


def check_cacheable(teacher: Teacher, losses: Mapping[str, Any], data: DistillationDataModule, wanted: Wanted) -> None:
    """Raises a UserError where the losses or the data need more than a cache can give."""
    if not isinstance(teacher, FrozenTeacher):
        raise UserError("model.teachers: a cache serves one model.teacher, not several")
    if not isinstance(teacher.prepare, Preprocess):
        raise UserError("model.teacher.cache: needs to know how the teacher wants its pictures (a kd.Preprocess)")
    if data.source.masks:
        raise UserError("model.teacher.cache: keeps one answer a picture, not one a pixel (data.source has masks)")
    for (_, layer, _), shape in wanted.features.items():
        if shape[0] != TRIAL:
            raise UserError(f"model.teacher.cache: keeps features by picture, but the layer '{layer}' of model.taps "
                            f"gives {shape[0]} rows for {TRIAL} pictures")  # fmt: skip
    if teacher.spec.cache_topk is not None:
        _check_topk(teacher.spec.cache_topk, len(data.info.classes), losses)
    if data.augment.mixes and data.balance_classes:
        raise UserError(
            "model.teacher.cache: keeps one mixture of a picture and view, and data.balance_classes shows a picture in "
            "several; data.augment.mixup=0 data.augment.cutmix=0, or cache=off"
        )
    if data.augment.mixes and data.batch_size % 2:
        raise UserError(
            f"data.batch_size: must be even where mixed pairs are cached (model.teacher.cache), got {data.batch_size}"
        )


def _check_topk(topk: int, classes: int, losses: Mapping[str, Any]) -> None:
    logits = _logit_losses(losses)
    dense = [name for name, loss in logits.items() if _topk_temperature(loss) is None]
    if topk >= classes:
        raise UserError(f"model.teacher.cache_topk: must be less than the {classes} classes, got {topk}")
    if not logits:
        looking = ", ".join(losses)
        raise UserError(f"model.teacher.cache_topk: {looking} looks at no logits, none are kept; leave it out")
    if dense:
        raise UserError(
            f"model.teacher.cache_topk: {', '.join(dense)} ({type(losses[dense[0]]).__name__}) needs all logits; "
            "without cache_topk all are kept"
        )


def _logit_losses(losses: Mapping[str, Any]) -> dict[str, LogitLoss]:
    return {name: loss for name, loss in losses.items() if isinstance(loss, LogitLoss)}


def _topk_temperature(loss: DistillLoss) -> float | None:
    """The temperature at which a loss can do with the largest logits."""
    return getattr(loss, "topk_temperature", None)


def cached_share(
    teacher: FrozenTeacher, losses: Mapping[str, Any], data: DistillationDataModule, wanted: Wanted
) -> tuple[float, int]:
    """What is in the cache already, 0 to 1, and the size in bytes of all of it; makes nothing.

    Raises:
        UserError: the folder holds a cache of something else.
    """
    codec, parts, folder = _layout(teacher, losses, data, wanted)
    size = codec.record_bytes * data.info.train * teacher.spec.cache_views
    if not (folder / FINGERPRINT).is_file():
        return 0.0, size
    store = AnswerStore(folder, parts, data.info.train, teacher.spec.cache_views, codec.record_bytes)
    share = store.filled()
    store.close()
    return share, size


def _layout(
    teacher: FrozenTeacher, losses: Mapping[str, Any], data: DistillationDataModule, wanted: Wanted
) -> tuple[AnswerCodec, dict[str, dict[str, Any]], Path]:
    assert isinstance(teacher.prepare, Preprocess)
    codec = _codec(len(data.info.classes), teacher.spec.cache_topk, losses, wanted)
    parts = {
        "teacher": {
            **teacher.identity(),
            "kwargs": teacher.spec.kwargs,
            "classes": teacher.spec.classes,
            "class_map": teacher.spec.class_map,
            "img_size": list(teacher.prepare.size),
            "mean": list(teacher.prepare.mean),
            "std": list(teacher.prepare.std),
            "dtype": str(teacher.dtype).removeprefix("torch."),
        },
        "transform": {
            "img_size": list(data.size),
            "seed": data.seed,
            "engine": "torch" if data.engine == "ray" else data.engine,  # the same views, made elsewhere
            **asdict(data.augment),
            **_pairs(data),
            "torch": torch.__version__.split("+")[0],
            "torchvision": torchvision.__version__.split("+")[0],
        },
        "data": {
            "pictures": data.info.train,
            "classes": hashlib.sha256("\0".join(data.info.classes).encode()).hexdigest()[:16],
            "content": fingerprint(data.split("train")),
        },
        "answers": codec.describe(),
    }
    split = data.split("train")
    if not isinstance(split, FileSplit):
        older = {**parts, "data": {**parts["data"], "content": fingerprint(split, stamps=False)}}
        if _still_right(_folder(teacher, older), older["data"]["content"], split):
            return codec, older, _folder(teacher, older)
    return codec, parts, _folder(teacher, parts)


def _pairs(data: DistillationDataModule) -> dict[str, Any]:
    """What decides, beside the seed, who is mixed with whom."""
    drawn = data.augment.mixes and data.unlabeled_ratio is not None
    return {"unlabeled_ratio": data.unlabeled_ratio} if drawn else {}


def _still_right(folder: Path, content: str, split: Split) -> bool:
    """Whether a cache from before pictures had stamps was begun after the last of them was changed."""
    file = folder / FINGERPRINT
    try:
        return json.loads(file.read_text())["data"]["content"] == content and changed(split) <= file.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _folder(teacher: FrozenTeacher, parts: dict[str, dict[str, Any]]) -> Path:
    if teacher.spec.cache_dir:
        return Path(teacher.spec.cache_dir).expanduser()
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "answers" / f"{teacher.spec.arch}-{digest}"


def _codec(classes: int, topk: int | None, losses: Mapping[str, Any], wanted: Wanted) -> AnswerCodec:
    shapes = {(path, tokens): shape[1:] for (_, path, tokens), shape in wanted.features.items()}
    logits = _logit_losses(losses)
    if not logits:
        return AnswerCodec(None, shapes)
    temperatures = tuple(sorted({t for t in map(_topk_temperature, logits.values()) if t is not None}))
    return AnswerCodec(TopKCodec(classes, topk, temperatures) if topk else DenseCodec(classes), shapes)

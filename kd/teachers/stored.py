"""A teacher that is stored answers alone: ``kd-cache from=PLACE`` has filled them, and no model is here."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.models import TeacherSpec
from kd.models.weights import say
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.answer_codec import Codec, Half
from kd.teachers.answer_store import AnswerStore, Kind, fingerprints_in
from kd.teachers.base import RunTeacher
from kd.teachers.fingerprint import (
    RECORDS,
    Parts,
    compare_fingerprints,
    digest,
    eval_view_of,
    parts_in,
    pictures_of,
    views_of,
)

A_START = "model.student.pretrained=true or model.student.checkpoint=FILE of a backbone"
"""Settings that give a student a start where its teacher has no layers."""


def parts_of(data: DistillationDataModule, split: str, every_view: bool) -> Parts:
    """What stored answers to a split depend on, beside the teacher.

    Args:
        data: the pictures and views.
        split: ``train``, whose views are random, or one whose pictures have one view.
        every_view: an answer is the picture's, whichever view is shown.
    """
    views = views_of(data) if split == "train" else eval_view_of(data)
    classes = data.info.classes
    return {
        "transform": {} if every_view else views,
        "data": {**pictures_of(data, split), "classes": digest("\0".join(classes))},
        "answers": {**codec_for(data).describe(), "records": RECORDS},
    }


def codec_for(data: DistillationDataModule) -> Codec:
    """How answers ``(N, C)`` are written: the logits of all of the data's classes, or a regression's numbers."""
    shape = (len(data.info.classes),)
    if data.info.scales is not None:
        return Codec(shape)
    return Half(shape, relative=True)


class StoredAnswers(RunTeacher):
    """Answers that ``kd-cache from=PLACE`` has stored: logits alone, of the pictures that it names.

    Used as ``model.teacher.answers=FOLDER``, or a URL. All stored views are used, whatever ``cache_views`` is.

    Args:
        folder: that ``kd-cache`` has filled, with a folder for each split.
    """

    closed = f"is stored answers alone, without layers; {A_START} gives the student a start"

    def __init__(self, folder: str) -> None:
        """Nothing is read before :meth:`named`."""
        self.folder = folder.rstrip("/")
        self.model: nn.Module = nn.Module()
        self.spec = TeacherSpec(arch="")
        self.arch = ""
        self._teacher: dict[str, object] = {}
        self._split = ""
        self._store: AnswerStore | None = None
        self._train: Kind | None = None

    @property
    def cache_views(self) -> int | None:
        """Those that are stored; None: the answers are of whole pictures."""
        of_pictures = self._train is not None and self._train.every_view
        return None if of_pictures else self.spec.cache_views

    @property
    def stored(self) -> bool:
        """Always: there is no model."""
        return True

    def named(self, spec: TeacherSpec, key: str) -> "StoredAnswers":
        """Takes over its settings (``cache`` becomes ``only``) and its key; returns itself.

        Raises:
            UserError: a setting that stored answers can't follow.
        """
        self.key = key
        for name in ("cache_topk", "cache_dir", "class_map"):
            if getattr(spec, name):
                raise UserError(f"{key}.{name}: has no effect on stored answers; leave it out")
        self.spec = replace(spec, arch=self.arch, cache="only")
        return self

    def attach(self, data: DistillationDataModule, split: str = "val") -> None:
        """Opens the stored answers to a split, which :meth:`answer` reads from then on.

        For ``val`` it first finds those to the training pictures (:meth:`kinds`), and takes over the name of what has
        answered and how many views are stored. Answers for whole pictures, the same for all views, are reported in a line.

        Args:
            data: of the run.
            split: its batches name no view.

        Raises:
            UserError: answers to other pictures, views or classes, or answers that are not all there.
        """
        if split == "val":
            kind = self._kind(data, "train")
            self.arch = str(self._teacher.get("arch"))
            every_view = kind.every_view
            if every_view and data.augment.mixes:
                raise UserError(
                    f"{self.key}.answers: {self.folder} has no answer to mixed pictures; give data.augment.mixup=0 "
                    "data.augment.cutmix=0"
                )
            if every_view and self.spec.cache_pixels:
                raise UserError(
                    f"{self.key}.cache_pixels: needs views that come again, and these answers are for whole pictures"
                )
            store = AnswerStore(kind, data.info.train, 0, self.key)
            self.spec = replace(self.spec, arch=self.arch, cache_views=store.views)
            store.close()
            self._train = kind
            if every_view:
                say(
                    f"{self.key}.answers: {self.arch} answers for whole pictures: each view of a picture is taught the "
                    "same answer, whatever its crop shows (data.augment.scale near 1 keeps views alike)"
                )
        self._codec = codec_for(data)
        of_split = self._kind(data, split)
        if split == "train" and not of_split.every_view:
            raise UserError(
                f"{self.key}.answers: {self.folder} answers the views of a training, not the pictures as kd-eval shows them"
            )
        pictures = int(of_split.parts["data"]["pictures"])
        self._store = AnswerStore(of_split, pictures, 1, self.key)
        self._split = split

    def _kind(self, data: DistillationDataModule, split: str) -> Kind:
        """The stored answers to a split of the data; also keeps the identity of what has answered.

        Raises:
            UserError: no answers to this split, or only answers to other pictures, views or classes: the first difference.
        """
        differing: UserError | None = None
        for place, text in fingerprints_in(self.folder, f"{self.key}.answers"):
            if not place.rpartition("/")[2].startswith(f"{split}-"):
                continue
            stored = parts_in(text)
            every_view = not stored.get("transform")
            parts = {"teacher": stored.get("teacher", {}), **parts_of(data, split, every_view)}
            try:
                compare_fingerprints(text, parts, place, self.key, "answers")
            except UserError as error:
                differing = differing or error
                continue
            self._teacher = parts["teacher"]
            codec = codec_for(data)
            return Kind(parts, place, codec.record_bytes, codec, None, True, every_view)
        fills = "kd-cache from=PLACE fills it"
        if split not in ("train", "val", "test"):
            fills = "stored answers are of the run's own pictures"
        raise differing or UserError(
            f"{self.key}.answers: {self.folder} holds no answers to {split}; {fills}"
        )

    def kinds(self) -> list[Kind]:
        """What training reads: the answers to the views of the training pictures. :meth:`attach` comes first."""
        assert self._train is not None
        return [self._train]

    def to(
        self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False
    ) -> "StoredAnswers":
        """Only takes the device's name: answers follow their batch."""
        self.device = device
        return self

    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        """Logits, float32 ``(N, C)``, for a batch that names no ``view``, of the split last attached (:meth:`attach`);
        padding gets picture 0's.

        Raises:
            UserError: the batch has no pictures' numbers (a loader of one's own), nothing is attached, or an answer is
                damaged.
        """
        if "index" not in batch or self._store is None:
            raise UserError(
                f"{self.key}.answers: {self.arch} is stored answers, which kd's own loaders alone can name"
            )
        numbers = batch["index"].clamp_min(0).cpu().numpy()
        records, is_whole = self._store.read(0, numbers)
        if not is_whole.all():
            raise UserError(
                f"{self.key}.answers: {int((~is_whole).sum())} answers to {self._split} are damaged in {self.folder}; "
                "kd-cache from= fills them"
            )
        logits: Any = self._codec.decode(torch.from_numpy(records))
        return Answer({name: logits.to(batch["image"].device)})

    def identity(self) -> dict[str, object]:
        """Of the model or file that has answered."""
        return self._teacher

    def fingerprint(self) -> dict[str, object]:
        """Its identity: nothing is computed here."""
        return self._teacher


def attach_answers(
    teacher: RunTeacher | None, data: DistillationDataModule, split: str = "val"
) -> None:
    """Opens the answers to a run's pictures for each teacher that is a :class:`StoredAnswers`; others are left as they are.

    Each process of a run calls it when the run is built; ``kd-eval`` calls it for the split that it measures.

    Args:
        teacher: of a run, or several; None: nothing is done.
        data: of the run.
        split: its batches name no view. ``val``: the answers to the training pictures are found as well.

    Raises:
        UserError: as of :meth:`StoredAnswers.attach`.
    """
    for member in teacher.members.values() if teacher is not None else ():
        if isinstance(member, StoredAnswers):
            member.attach(data, split)

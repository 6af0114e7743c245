"""Fills a cache with answers from a file or an address: what ``kd-cache from=PLACE`` does."""

import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.machine import cache_dir
from kd.progress import bar
from kd.run.certify import usual_split
from kd.settings import AskSettings
from kd.storage.writing import file_for, write_text
from kd.tasks import Task
from kd.teachers.answer_store import AnswerStore, Kind, publish, whole_fingerprint
from kd.teachers.answers_file import AnswersFile
from kd.teachers.cache_layout import PUBLISHED
from kd.teachers.chat import Chat
from kd.teachers.fingerprint import FINGERPRINT, Parts, digest
from kd.teachers.open_cache import check_mixing
from kd.teachers.probabilities import are_probabilities, logits_of_probabilities
from kd.teachers.server import CHAT, AnswerServer
from kd.teachers.stored import A_START, codec_for, parts_of


def fill_from(
    place: str,
    settings: AskSettings | None,
    data: DistillationDataModule,
    task: Task,
    out: str | None = None,
) -> None:
    """Fills a folder with the answers of a file or an address to all pictures of a recipe, and prints how to use it.

    A server is asked for some views of each training picture, and for the validation and test pictures as they are
    measured; what is stored already is not asked for again. A file has one answer a picture, for all views.

    Args:
        place: file or address.
        settings: how an address is asked; None: ``place`` is a file.
        data: the recipe's pictures and views.
        task: of the recipe.
        out: folder or URL below which the answers are copied as well.

    Raises:
        UserError: ``place`` can't be read, its answers do not fit the data, or a server refuses or can't be reached; or the
            recipe is not one with a row of numbers a picture.
    """
    data.prepare_data()
    classes = list(data.info.classes)
    if data.source.kind.cut_with_picture or not classes:
        raise UserError("from: needs a recipe with one row of numbers a picture (a classifier)")
    if settings is None:
        _from_file(AnswersFile(place, classes, task.link == "softmax"), data, out)
        return
    check_mixing(data)
    is_chat = urllib.parse.urlsplit(place).path.endswith(CHAT)
    if is_chat and task.no_class_id:
        raise UserError(
            f"from: {place} is asked for the class of a picture, the data {task.no_class_id}"
        )
    kind = Chat if is_chat else AnswerServer
    _from_server(kind(place, settings), data, task, out)


def _splits(data: DistillationDataModule) -> list[str]:
    """The splits that a run trains on and is measured by: ``train``, ``val``, and ``test`` where it has other pictures."""
    return [*dict.fromkeys(("train", "val", usual_split(data.splits)))]


class Filled:
    """The folder that is filled, with a store for each split.

    Args:
        identity: of the model or file that answers.
        data: the pictures.
        every_view: an answer is the picture's, whichever view is shown.
        views: of a training picture.
    """

    def __init__(
        self, identity: dict[str, Any], data: DistillationDataModule, every_view: bool, views: int
    ) -> None:
        """Opens the stores, which are made where they are missing; the arguments are the class's."""
        self.codec = codec_for(data)
        plain = re.sub(r"[^\w.-]+", "_", str(identity["arch"]))
        self.folder = cache_dir() / "stored" / f"{plain}-{digest(identity)}"
        self.stores: dict[str, AnswerStore] = {}
        for split in _splits(data):
            parts: Parts = {"teacher": identity, **parts_of(data, split, every_view)}
            name = f"{split}-{digest(parts)[:8]}"
            place = str(self.folder / name)
            kind = Kind(parts, place, self.codec.record_bytes, self.codec)
            count = 1
            if split == "train" and not every_view:
                count = views
            pictures = int(parts["data"]["pictures"])
            self.stores[split] = AnswerStore(kind, pictures, count)

    def put(self, split: str, view: int, numbers: np.ndarray, logits: Tensor) -> None:
        """Stores logits ``(N, C)`` of a split's pictures ``(N,)``."""
        self.stores[split].put(view, numbers, self.codec.encode(logits).numpy())

    def finish(self, out: str | None) -> None:
        """Marks each store that has all its answers as whole, copies it below ``out``, and prints how to use them. A store
        that lacks an answer is neither marked nor copied.
        """
        place = str(self.folder)
        if out:
            place = f"{out}/{PUBLISHED}/{self.folder.name}"
        for store in self.stores.values():
            if store.filled() < 1:
                continue
            write_text(store.kind.folder / FINGERPRINT, whole_fingerprint(store))
            if out:
                publish(store, f"{place}/{store.kind.folder.name}", range(store.views))
        size = sum(store.disk_bytes for store in self.stores.values())
        print(f"cache: {size / 1e6:,.1f} MB in {place}")
        print(f"       use them with model.teacher.answers={place}")
        print(f"       they have no layers to start a student from: {A_START} gives it a start")


def _from_file(file: AnswersFile, data: DistillationDataModule, out: str | None) -> None:
    """Stores a file's answers to the pictures of each split.

    Raises:
        UserError: a training or validation picture has no answer; test pictures without one are reported and left out.
    """
    answers = {}
    for split in _splits(data):
        pictures = data.split(split)
        names = [pictures.name(i) for i in range(len(pictures.targets))]
        logits, missing = file.logits_of(names)
        if missing:
            text = (
                f"{file.file} has no answer to {len(missing):,} of {len(names):,} pictures of {split}, such as "
                f"{missing[0]}"
            )
            if split != "test":
                raise UserError(f"from: {text}")
            print(f"cache: {text}")
        answers[split] = logits
    read_as = "probabilities" if file.are_probabilities else "logits"
    print(f"cache: {file.file}: {len(file.pictures):,} pictures, {read_as}")
    filled = Filled(file.identity(), data, True, 1)
    for split, logits in answers.items():
        numbers = np.flatnonzero(~np.isnan(logits).any(1))
        filled.put(split, 0, numbers, torch.from_numpy(logits[numbers]))
    filled.finish(out)


def _from_server(
    server: AnswerServer, data: DistillationDataModule, task: Task, out: str | None
) -> None:
    """Asks a server for all answers that are missing; a second command for the same answers waits for the first.

    The first answers decide whether the server gives probabilities, which are stored as logits. What was asked is printed
    at the end, also after an error.
    """
    filled = Filled(server.connect(list(data.info.classes)), data, False, server.settings.views)
    total = sum(store.views * store.samples for store in filled.stores.values())
    lengths = ", ".join(
        f"{store.samples:,} of {split}{f' x {store.views} views' if store.views > 1 else ''}"
        for split, store in filled.stores.items()
    )
    print(f"cache: {total:,} answers of {server.url} ({lengths}) to {filled.folder}", flush=True)
    gives_probabilities: bool | None = None
    with FileLock(file_for(filled.folder / ".asking")):
        try:
            for split, store in filled.stores.items():
                for view in range(store.views):
                    for images, numbers in _missing(data, store, split, view, server.batch):
                        answers = torch.from_numpy(server.logits_of(images))
                        if gives_probabilities is None:
                            gives_probabilities = bool(task.link) and are_probabilities(
                                answers, task.link
                            )
                        if gives_probabilities:
                            answers = logits_of_probabilities(answers, task.link)
                        filled.put(split, view, numbers, answers)
        finally:
            print(f"cache: {server.spent()}", flush=True)
    filled.finish(out)


def _missing(
    data: DistillationDataModule, store: AnswerStore, split: str, view: int, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pictures of a split that lack their answer, as they are shown, at most ``count`` at once.

    Args:
        data: the pictures.
        store: of the answers.
        split: of the pictures.
        view: of training pictures; 0 of others.
        count: pictures.

    Yields:
        Views uint8 ``(N, H, W, 3)``, and the pictures' numbers ``(N,)``.
    """
    missing = sum(int((~store.present(view, part)).sum()) for part in store.parts())
    if not missing:
        return
    if split == "train":
        batches = data.fill_batches(view, store.present, 0, 1)
        loader = data.fill_dataloader(batches)
    else:
        loader = data.eval_dataloader(split)
    with bar(label=f"{split}, view {view + 1}/{store.views}", total=missing) as progress:
        for loaded in loader:
            batch = data.on_after_batch_transfer(loaded, 0) if split == "train" else loaded
            numbers = batch["index"].cpu().numpy()
            rows = np.flatnonzero(~store.present(view, numbers))
            for first in range(0, len(rows), count):
                part = rows[first : first + count]
                images = batch["image"][part].permute(0, 2, 3, 1)
                yield images.contiguous().cpu().numpy(), numbers[part]
                progress.update(len(part))

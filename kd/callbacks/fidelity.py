"""Keeps how faithful the best epoch's student is: ``fidelity.json``, with a few pictures for the report."""

import base64
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor

from kd.callbacks.best import Best
from kd.callbacks.context import RunContext, is_trial_validation, validation_logits
from kd.callbacks.host_copies import HostCopies
from kd.callbacks.preemption import RunStopped
from kd.callbacks.preflight import Preflight
from kd.data.datamodule import DistillationDataModule
from kd.data.pictures import decode
from kd.data.transforms import EvalView
from kd.processes import from_first, merged_at_first
from kd.report.tables import JPEG
from kd.storage.writing import remove, write_text
from kd.tasks.fidelity import Fidelity
from kd.tasks.fidelity_numbers import NumbersFidelity
from kd.tasks.segmentation import colours, side_by_side

FILE = "fidelity.json"
Compared = Fidelity | NumbersFidelity
SIDE = 112  # pixels of a thumbnail's longer side: two dozen of them take some 100 kB of the page


class FidelityRecord(Callback):
    """Writes how faithful the student is at each best validation, from passes that the run makes anyway.

    Each process compares its share of the pictures. Must follow ``best``, whose decision it reads.
    """

    def __init__(self, preflight: Preflight, best: Best) -> None:
        """Stores the arguments.

        Args:
            preflight: holds the teacher's logits of the validation pictures.
            best: decides which epoch is the best.
        """
        self.preflight = preflight
        self.best = best
        self._comparison: Compared | None = None
        """Of the present validation; None before its first batch, and of a task that has none."""
        self._seen: HostCopies[Compared] = HostCopies()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets what the last validation has counted."""
        self._comparison = None
        self._seen.clear()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, *_: object
    ) -> None:
        """Takes in the student's logits that the validation step returns.

        Logits ``(N, C)`` are compared on the host once they have come there, without a wait; maps, too large to copy, at
        once where they are. The preflight keeps the teacher's logits before, where it has not run
        (:meth:`~kd.callbacks.preflight.Preflight.keep_as_it_comes`).
        """
        run = RunContext.of(trainer)
        classes = len(run.student.data.classes)
        self.preflight.keep_as_it_comes(run)
        self._add(wait=False)
        seen = validation_logits(outputs)
        if seen is None:
            return
        logits, target, index = seen["logits"], seen["target"], seen["index"]
        assert index is not None, "our loaders give every picture its number"
        if self._comparison is None:
            self._comparison = run.module.task.fidelity(classes)
        comparison = self._comparison
        if comparison is not None and logits.ndim == 2:
            self._seen.add(comparison, logits, target, index)
        elif comparison is not None:
            self._compare(comparison, logits, target, index)

    def _add(self, wait: bool) -> None:
        """Adds the batches that have come to the host to their comparison; with ``wait`` all, once they have come."""
        for comparison, tensors in self._seen.take(wait):
            self._compare(comparison, *tensors)

    def _compare(self, comparison: Compared, logits: Tensor, target: Tensor, index: Tensor) -> None:
        """Adds a batch to a comparison, with the teacher's logits where the preflight has kept them for all its pictures.

        Args:
            comparison: takes the batch.
            logits: the student's, ``(N, C, ...)``, on whichever device the comparison is to run.
            target: the batch's labels, likewise.
            index: numbers of its pictures, ``(N,)``.
        """
        taught = None
        if self.preflight.kept:
            taught = self.preflight.kept.get(index)
        if taught is not None:
            taught = taught.to(logits.device)
        comparison.update(logits, taught, target, index)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merges the ranks' counts on rank 0, and logs ``val/kl`` (nats) where a teacher was compared by its classes.

        Nothing is logged of a regression. All ranks must call this.
        """
        self._add(wait=True)
        if not is_trial_validation(trainer):
            self.preflight.all_came(trainer)
        self._comparison = merged_at_first(trainer.strategy, self._comparison, _merged)
        kl = from_first(trainer.strategy, _kl(self._comparison))
        if kl is not None:  # NaN too: Lightning keeps the last value logged
            pl_module.log("val/kl", kl)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes ``fidelity.json`` where the validation was the best, on rank 0."""
        run = RunContext.of(trainer)
        if self.best.improved and self._comparison is not None and trainer.is_global_zero:
            write_fidelity(run.folder, self._comparison, run.data, "val", run.student.data.classes)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes ``fidelity.json`` where no epoch was validated: it is then about the start, and the last
        weights, which were not compared, are exported.
        """
        self._forget_start(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """As :meth:`on_train_end` where a rule or a limit has stopped the run, which then exports as well."""
        if isinstance(exception, RunStopped):
            self._forget_start(trainer)

    def _forget_start(self, trainer: Trainer) -> None:
        """Removes ``fidelity.json`` where no epoch was validated, on rank 0."""
        if trainer.is_global_zero and not self.best.best:
            remove(RunContext.of(trainer).folder / "fidelity.json")


def _merged(first: Compared | None, second: Compared | None) -> Compared | None:
    """The comparisons of two shares of the pictures as one, added into the first, in place; None where neither has one."""
    if first is None:
        return second
    if second is not None:
        first.add(second)  # type: ignore[arg-type]
    return first


def _kl(comparison: Compared | None) -> float | None:
    """A comparison's mean divergence, nats; None where no teacher was compared by its classes."""
    if isinstance(comparison, Fidelity) and comparison.compared:
        return comparison.kl
    return None


def write_fidelity(
    folder: Path,
    comparison: Compared,
    data: DistillationDataModule,
    split: str,
    classes: Sequence[str],
) -> None:
    """Writes ``fidelity.json``, which the report reads: the comparison's ``result``, and :func:`examples`.

    Of a segmentation also ``colours``: ``#rrggbb`` by class name.

    Args:
        folder: of the run or student.
        comparison: over all pictures.
        data: reads the pictures that are shown as examples.
        split: that was validated, ``val`` in a run.
        classes: names, in the order of the logits.
    """
    content = comparison.result(classes)
    content["examples"] = examples(comparison, data, split, classes)
    if comparison.kind == "segmentation":
        palette = colours(len(classes))
        content["colours"] = {}
        for name, colour in zip(classes, palette, strict=False):
            digits = bytes(colour).hex()
            content["colours"][name] = f"#{digits}"
    write_text(folder / FILE, json.dumps(content) + "\n")


def examples(
    comparison: Compared, data: DistillationDataModule, split: str, classes: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """The kept mistakes by kind (``lost``, ``both_wrong``), worst first: ``name``, ``image`` (a data URL), and the answers.

    ``name`` is the file's with its folder's. The answers are as of :func:`_named`; of a segmentation they are drawn in the
    ``image``, and ``panels`` names its parts from left to right.

    Args:
        comparison: over all pictures.
        data: reads the pictures.
        split: that was validated.
        classes: names by id.
    """
    pictures = data.split(split)
    shown: dict[str, list[dict[str, Any]]] = {}
    for kind, mistakes in comparison.mistakes.items():
        shown[kind] = []
        worst_first = sorted(
            mistakes, key=lambda mistake: (mistake.score, mistake.negative_index), reverse=True
        )
        numbers = [-mistake.negative_index for mistake in worst_first]
        seen = as_validated(data, split, numbers)
        for mistake, number, picture in zip(worst_first, numbers, seen, strict=True):
            folder_and_name = Path(pictures.name(number)).parts[-2:]
            example: dict[str, Any] = {"name": "/".join(folder_and_name)}
            if comparison.kind == "segmentation":
                example |= _panels(picture, mistake.entry, len(classes))
            else:
                example["image"] = thumbnail(picture)
                example |= _named(mistake.entry, classes)
            shown[kind].append(example)
    return shown


def as_validated(
    data: DistillationDataModule, split: str, numbers: Iterable[int]
) -> Iterator[np.ndarray]:
    """Pictures as validation sees them, uint8 ``(H, W, 3)``, one after the other.

    Args:
        data: holds the split.
        split: its name.
        numbers: of the pictures in it.
    """
    pictures = data.split(split)
    view = EvalView(data.size, data.given.crop_ratio)
    for number in numbers:
        picture = decode(pictures.read(number))
        seen_3HW = view(picture)
        yield seen_3HW.permute(1, 2, 0).numpy()


def _named(entry: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """The truth and each model's answers of a mistake, by class name, as ``fidelity.json`` has them.

    Args:
        entry: ``truth``, a list of class ids, of which those of no class (-1: unknown) are left out; by model, pairs of a
            class id and its probability in [0, 1].
        classes: names by id.
    """
    named: dict[str, Any] = {"truth": []}
    for class_id in entry["truth"]:
        if 0 <= class_id < len(classes):
            named["truth"].append(classes[class_id])
    for model, answers in entry.items():
        if model == "truth":
            continue
        answers_of_model = []
        for class_id, share in answers:
            answers_of_model.append([classes[class_id], round(share, 4)])
        named[model] = answers_of_model
    return named


def _panels(picture: np.ndarray, maps: dict[str, Any], classes: int) -> dict[str, Any]:
    """Picture, truth, student and teacher side by side; pixels that don't count are black.

    Args:
        picture: uint8 ``(H, W, 3)``.
        maps: class ids ``(H, W)`` by name, ``truth`` among them.
        classes: how many there are; other ids don't count.

    Returns:
        ``image``, a data URL of all in one picture, and ``panels``, their names from left to right.
    """
    truth = maps["truth"]
    is_class = (truth >= 0) & (truth < classes)
    sheet = side_by_side(picture, maps, is_class, classes)
    panels = ["picture", *maps]
    image = thumbnail(sheet, SIDE * len(panels))
    return {"image": image, "panels": panels}


def thumbnail(picture: np.ndarray, side: int = SIDE) -> str:
    """uint8 ``(H, W, 3)`` -> a JPEG as a data URL, made smaller where its longer side has more than ``side`` pixels."""
    small = Image.fromarray(picture)
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return f"{JPEG}{base64.b64encode(buffer.getvalue()).decode()}"

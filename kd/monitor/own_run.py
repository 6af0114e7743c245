"""What a monitor reads of a run of kd's own: student, teacher, cache, losses, data."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
from pytorch_lightning import Callback, Trainer
from torch import Tensor, nn

from kd.callbacks.context import RunContext, output_of
from kd.callbacks.preflight import Preflight
from kd.data.batch import Batch
from kd.data.info import Target
from kd.fit_to_machine.memory import available_bytes
from kd.fit_to_machine.precision import bfloat16_time
from kd.models import count_parameters
from kd.models.taps import TRIAL
from kd.monitor.tier import TierRecord
from kd.monitor.watched import Watched, device_of, float_logits
from kd.storage.elsewhere import Json
from kd.teachers.answer import ALL


class OwnRun(Watched):
    """A run of ``kd-train``: what the monitor reads of it beyond a :class:`Watched` training."""

    step_phase = "loss"  # what training_step takes without the teacher and the student
    program = "kd-train"
    resume = "kd-train resume=RUN with more of it"
    keys = "monitor."

    def __init__(self) -> None:
        super().__init__(Path())

    def folder(self, trainer: Trainer) -> Path:
        """The folder that :class:`kd.callbacks.run_folder.RunFolder` has claimed."""
        return RunContext.of(trainer).folder

    def parts(self) -> list[Callback]:
        """The callback that records the data tier."""
        return [TierRecord()]

    def header(self, trainer: Trainer) -> Json:
        """Batch, loaders, cache, validation set, models, and how many more pictures fit on a GPU; for each rank's file.

        ``batch_size`` is of one process, ``feature_bytes`` of a picture (:func:`cacheable_features`), ``val`` a number of
        pictures. ``more_fit`` is known on rank 0 alone, and ``bfloat16_time``, the time of a matrix product in bfloat16 over
        that in float32, on a CPU.
        """
        run = RunContext.of(trainer)
        data: Any = run.data
        features = cacheable_features(run)
        caches = run.module.caches
        facts = {
            "batch_size": data.batch_size,
            "num_workers": data.num_workers,
            "primary": run.module.task.primary,
            "cacheable": features is not None,
            "feature_bytes": features or 0,
            "stored_teacher": run.module.teacher is not None and run.module.teacher.stored,
            "cached": bool(caches),
            "pixels": any(cache.pixels for cache in caches.values()),
            "val": run.student.data.val,
            "student": {
                "arch": run.student.arch,
                "params": count_parameters(run.student.model),
            },
        }
        if run.module.teacher is not None:
            for callback in cast(Any, trainer).callbacks:
                if isinstance(callback, Preflight):
                    facts["teacher"] = callback.about_teacher(run.module.teacher)
        device, memory = device_of(trainer), run.module.memory
        if device.type == "cpu":
            facts["bfloat16_time"] = round(bfloat16_time(), 3)
        if device.type == "cuda" and memory is not None:
            available = available_bytes(device, trainer.num_devices)
            facts["more_fit"] = max(0, memory.fits(available) - data.batch_size)
        return facts

    def model(self, trainer: Trainer) -> nn.Module | None:
        """The student."""
        return RunContext.of(trainer).student.model

    def trained(self, trainer: Trainer) -> Sequence[Tensor]:
        """The student's parameters, those of its losses included."""
        return list(RunContext.of(trainer).student.parameters())

    def pictures(self, batch: object) -> Tensor | None:
        """The batch's pictures ``(N, 3, H, W)``."""
        return cast(Batch, batch)["image"]

    def class_counts(self, trainer: Trainer) -> dict[str, list[int]]:
        """Pictures of each class, by class id, of ``train`` and ``val``; a split without class ids is left out."""
        run = RunContext.of(trainer)
        classes = len(run.student.data.classes)
        counts = {}
        for split in ("train", "val"):
            counts[split] = _class_counts(run.data.split(split).targets, classes)
        return {split: counted for split, counted in counts.items() if counted}

    def answers(self, trainer: Trainer, outputs: object, answer: Tensor | None) -> Json:
        """Entropy of the (first) teacher's answers, the student's agreement with them, the terms of the loss.

        Args:
            trainer: of the run.
            outputs: what the training step returned.
            answer: the student's logits of this batch, ``(N, C, ...)``; None: not known.

        Returns:
            ``terms``, unweighted by name; ``teacher_entropy``, at the loss's temperature, as a share of its maximum, and
            ``agreement``, both in [0, 1]; on the device; what is unknown is left out.
        """
        student = RunContext.of(trainer).student
        output = output_of(cast(Any, outputs))
        values: Json = {"terms": dict(output["terms"])}
        teacher = _first_teacher(output["answer"].logits)
        if teacher is None:
            return values
        softened = student.objective.softened(teacher)
        entropy = student.task.entropy(softened)
        if entropy is not None:
            values["teacher_entropy"] = entropy
        if answer is not None and answer.shape == teacher.shape:
            same_N = student.task.same(answer, teacher.to(answer.device))
            values["agreement"] = same_N.float().mean()
        return values

    def loss_shares(self, trainer: Trainer, terms: Mapping[str, float]) -> dict[str, float]:
        """Each weighted term's share, in [0, 1], of the sum of their sizes, by the loss's name (``kd``, ``task``); {} where
        the sum is 0, NaN or infinite.

        Args:
            trainer: of the run.
            terms: unweighted, by name (``kd_loss``); others than weighted terms are passed over.
        """
        student = RunContext.of(trainer).student
        objective = student.objective
        weights: dict[str, Any] = {name: loss.weight for name, loss in objective.losses.items()}
        weights["task"] = objective.task_loss_weight
        weighted: dict[str, float] = {}
        for loss, weight in weights.items():
            term = terms.get(f"{loss}_loss")
            if term is not None:
                weighted[loss] = float(weight) * abs(term)
        total = sum(weighted.values())
        if not total or not math.isfinite(total):
            return {}
        return {loss: round(value / total, 4) for loss, value in weighted.items()}


def _first_teacher(logits: Mapping[str, object]) -> Tensor | None:
    """The logits of the first of several teachers, else those of all together; None where neither is a tensor.

    ``logits``: answers by the teacher's name, all together under "".
    """
    members = [answer for member, answer in logits.items() if member]
    first = float_logits(members[0]) if members else None
    return float_logits(logits.get(ALL)) if first is None else first


def _class_counts(targets: Sequence[Target], classes: int) -> list[int]:
    """Pictures of each of so many classes, by class id, of one without any 0; [] where targets are no class ids, or one of
    them is negative (no label).
    """
    with suppress(TypeError, ValueError):
        ids = np.asarray(targets)
        is_list = ids.ndim == 1 and len(ids) > 0
        are_whole = np.issubdtype(ids.dtype, np.integer)
        if is_list and are_whole and ids.min() >= 0:
            return np.bincount(ids, minlength=classes).tolist()
    return []


def cacheable_features(run: RunContext) -> int | None:
    """Bytes of features that a cache would store for a picture, beside its logits; None where no cache is advised.

    That is without a teacher, and for features without a row for each picture, of which no cache is possible; and with
    several teachers or losses that read logits of every pixel, whose caches' sizes are not counted here.
    """
    teacher, wanted = run.module.teacher, run.student.objective.wanted
    if teacher is None or len(teacher.members) > 1 or wanted.maps:
        return None
    size = 0
    for rows, *shape in wanted.features.values():
        if rows != TRIAL:
            return None
        size += 2 * math.prod(shape)  # half precision
    return size

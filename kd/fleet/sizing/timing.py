"""How long candidates take in the runtime that ships: with drawn weights, since architectures alone matter."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from kd.data.datamodule import DistillationDataModule
from kd.distill.student import Student
from kd.fleet.sizing.candidates import Candidate, model_drawer
from kd.fleet.sizing.plan import Conditions
from kd.models import StudentSpec, preprocess_for
from kd.progress import bar
from kd.ship.export.base import ExportJob, find_format, in_torch
from kd.ship.export.gate import size_mb
from kd.ship.export.manifest import ExportManifest
from kd.ship.export.prepared import Prepared
from kd.ship.export.stopwatch import Stopwatch, open_export
from kd.ship.latency import in_turns, medians, random_pictures

CALIBRATE = 8
"""Pictures: int8's kernels, and so their time, do not depend on the scales."""
SECONDS = 1.0
"""Seconds for which each model is timed, in all rounds together."""
Call = Callable[[Any], object]


@dataclass(frozen=True)
class Drawn:
    """A candidate with its preprocessing; opens it in torch, in the process that times it."""

    build: Callable[[], nn.Module]
    """Makes the model."""
    spec: StudentSpec
    """Its settings."""
    size: tuple[int, int]
    """Height and width of the pictures, which the preprocessing resizes."""
    threads: int
    """CPU threads."""

    def prepared(self) -> Prepared:
        """The model with drawn weights and its preprocessing, as an export would have it: uint8 ``(N, H, W, 3)`` in."""
        model = _as_if_trained(self.build().eval())
        spec = self.spec
        preprocess = preprocess_for(
            model, img_size=spec.img_size, channels_last=False, mean=spec.mean, std=spec.std
        )
        return Prepared(model, preprocess, self.size)

    def __call__(self) -> Call:
        """Opens the model in the process that calls this, whose number of threads is set; uint8 ``(N, H, W, 3)`` in."""
        torch.set_num_threads(self.threads)
        return in_torch(self.prepared())


def _as_if_trained(model: nn.Module) -> nn.Module:
    """Adds noise to each weight or buffer whose numbers are all the same, in place; returns the model.

    Exporters leave out scales of ones and biases of zeros, which no trained model has: it would be timed as too fast.
    """
    for values in model.state_dict().values():
        if not values.is_floating_point():
            continue
        first = values.flatten()[:1]
        is_constant = bool((values == first).all())
        if is_constant:
            values.add_(torch.rand_like(values), alpha=0.1)
    return model


def several(loads: Sequence[Callable[[], Call]]) -> Call:
    """Opens models in one process, and returns what runs one of them: ``(number of the model, pictures)``.

    :class:`kd.ship.export.stopwatch.Stopwatch` calls it in the process that times.

    Args:
        loads: each opens a model; called once, here.

    >>> call = several([lambda: str, lambda: float])
    >>> call((0, 3)), call((1, 3))
    ('3', 3.0)
    """
    calls = [load() for load in loads]

    def call(which_and_pictures: tuple[int, Any]) -> object:
        which, pictures = which_and_pictures
        return calls[which](pictures)

    return call


def latencies(
    candidates: Sequence[Candidate],
    student: Student,
    data: DistillationDataModule,
    conditions: Conditions,
) -> dict[str, dict[str, float]]:
    """Exports all candidates (not for torch), and times them in one process, in turns.

    Args:
        candidates: to be timed.
        student: the recipe's, whose task and classes they have.
        data: the size of their pictures, and pictures to calibrate int8 with.
        conditions: of the latency.

    Returns:
        By candidate's name: ``latency_ms`` (the median of all its runs), ``fastest_round_ms`` and ``slowest_round_ms``
        (the least and the largest median of a round), and ``mb``, the size of the exported file, or of the weights in
        float32 where the runtime is torch. A call has ``conditions.batch`` pictures.
    """
    with TemporaryDirectory(prefix="kd-size-") as folder:
        label = f"making candidates for {conditions.runtime}"
        exports = []
        for candidate in bar(candidates, label=label, unit=" candidates"):
            place = Path(folder) / candidate.name
            exports.append(_export(candidate, student, data, conditions, place))
        watch = Stopwatch(partial(several, [load for load, _ in exports]), conditions.threads)
        try:
            pictures = random_pictures(conditions.batch, data.size)
            measures = {i: partial(watch.measure, (i, pictures)) for i in range(len(exports))}
            timed = in_turns(measures, SECONDS, f"timing {conditions}")
        finally:
            watch.close()
    numbers = {}
    for i, candidate in enumerate(candidates):
        rounds, _ = timed[i]
        _, mb = exports[i]
        of_rounds = medians(rounds)
        latency_ms = of_rounds.pop("median_ms")
        numbers[candidate.name] = {"latency_ms": latency_ms, **of_rounds, "mb": round(mb, 3)}
    return numbers


def _export(
    candidate: Candidate,
    student: Student,
    data: DistillationDataModule,
    conditions: Conditions,
    folder: Path,
) -> tuple[Callable[[], Call], float]:
    """Exports a candidate with drawn weights into ``folder``, which is made here; torch writes no file.

    Returns:
        A function that opens the model (called in the process that times it), and MB of the file; for torch of the
        weights in float32.

    Raises:
        UserError: as of :meth:`kd.ship.export.base.Format.write`.
    """
    drawn = Drawn(
        model_drawer(candidate.spec, student), candidate.spec, data.size, conditions.threads
    )
    if conditions.runtime == "torch":
        return drawn, 4e-6 * candidate.params
    prepared = drawn.prepared()
    manifest = ExportManifest(
        student.task.answers,
        candidate.spec.arch,
        student.classes,
        data.size,
        data.given.crop_ratio,
        prepared.mean.flatten().div(255).tolist(),
        prepared.std.flatten().div(255).tolist(),
        conditions.runtime,
        conditions.int8,
    )

    def calibration() -> Iterator[np.ndarray]:
        for picture_3HW in data.sample_pictures(CALIBRATE):
            yield picture_3HW.permute(1, 2, 0)[None].contiguous().numpy()

    folder.mkdir()
    job = ExportJob(prepared, prepared.model, manifest, folder, calibration)
    file = find_format(conditions.runtime).write(job, folder)
    return partial(open_export, conditions.runtime, file, conditions.threads), size_mb(folder)

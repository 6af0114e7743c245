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
from kd.fleet.sizing.candidates import Candidate, drawing
from kd.fleet.sizing.plan import Conditions
from kd.models import StudentSpec, preprocess_for
from kd.progress import bar
from kd.ship.export.base import ExportJob, find_format, in_torch
from kd.ship.export.gate import size_mb
from kd.ship.export.manifest import ExportManifest
from kd.ship.export.prepared import Prepared
from kd.ship.export.stopwatch import Stopwatch, open_export
from kd.ship.latency import ROUNDS, in_turns, medians

CALIBRATE = 8  # pictures: int8's kernels, and so their time, do not depend on the scales
SECONDS = 1.0  # for which each model is timed
Call = Callable[[Any], object]


@dataclass(frozen=True)
class Drawn:
    """A candidate with its preprocessing; opens it in torch, in the process that times it."""

    build: Callable[[], nn.Module]
    """Makes the model."""
    spec: StudentSpec
    """Its settings."""
    size: tuple[int, int]
    """Height and width of the pictures."""
    threads: int
    """CPU threads."""

    def prepared(self) -> Prepared:
        """The model with drawn weights and its preprocessing, as an export would have it: uint8 ``(N, H, W, 3)`` in."""
        model, spec = _as_if_trained(self.build().eval()), self.spec
        return Prepared(
            model,
            preprocess_for(model, spec.img_size, False, spec.mean, spec.std),
            self.size,
            "nhwc",
        )

    def __call__(self) -> Call:
        torch.set_num_threads(self.threads)
        return in_torch(self.prepared())


def _as_if_trained(model: nn.Module) -> nn.Module:
    """Exporters leave out scales of ones and biases of zeros, which no trained model has."""
    for values in model.state_dict().values():
        if values.is_floating_point() and bool((values == values.flatten()[:1]).all()):
            values.add_(torch.rand_like(values), alpha=0.1)
    return model


def several(loads: Sequence[Callable[[], Call]]) -> Call:
    """Opens models in one process, which then runs one of them: ``(which, pictures)``."""
    calls = [load() for load in loads]
    return lambda given: calls[given[0]](given[1])


def latencies(
    candidates: Sequence[Candidate],
    student: Student,
    data: DistillationDataModule,
    given: Conditions,
) -> dict[str, dict[str, float]]:
    """By candidate ``latency_ms``, medians of the fastest and the slowest round, and ``mb`` of the exported file."""
    with TemporaryDirectory(prefix="kd-size-") as folder:
        shown = bar(candidates, label=f"making candidates for {given.runtime}", unit=" candidates")
        made = [_export(one, student, data, given, Path(folder) / one.name) for one in shown]
        watch = Stopwatch(partial(several, [load for load, _ in made]), given.threads)
        try:
            pictures = np.random.RandomState(0).randint(
                0, 256, (given.batch, *data.size, 3), dtype=np.uint8
            )
            measures = {i: partial(watch.measure, (i, pictures)) for i in range(len(made))}
            with bar(label=f"timing {given}", unit=" turns", total=ROUNDS * len(made)) as turns:
                timed = in_turns(measures, SECONDS, turns)
        finally:
            watch.close()
    found = {}
    for one, (_, mb), (rounds, _) in zip(candidates, made, timed.values(), strict=True):
        took = medians(rounds)
        found[one.name] = {"latency_ms": took.pop("median_ms"), **took, "mb": round(mb, 3)}
    return found


def _export(
    one: Candidate, student: Student, data: DistillationDataModule, given: Conditions, folder: Path
) -> tuple[Callable[[], Call], float]:
    made = Drawn(drawing(one.spec, student), one.spec, data.size, given.threads)
    if given.runtime == "torch":
        return made, 4e-6 * one.params
    model = made.prepared()
    mean, std = (value.flatten().div(255).tolist() for value in (model.mean, model.std))
    manifest = ExportManifest(
        student.task.answers,
        one.spec.arch,
        student.classes,
        data.size,
        data.crop_ratio,
        "nhwc",
        mean,
        std,
        given.runtime,
        given.int8,
    )

    def calibration() -> Iterator[np.ndarray]:
        for picture in data.sample_pictures(CALIBRATE):
            yield picture.permute(1, 2, 0)[None].contiguous().numpy()

    folder.mkdir()
    file = find_format(given.runtime).write(
        ExportJob(model, model.model, manifest, folder, calibration), folder
    )
    return partial(open_export, given.runtime, file, given.threads), size_mb(folder)

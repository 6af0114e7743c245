"""Every export against the student in torch, on real validation pictures: nothing ships unseen."""

import copy
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from kd.data.batch import Batch
from kd.progress import bar, uncounted
from kd.report.evaluated import exports_parts
from kd.report.metric import format_metric
from kd.report.tables import write_parts
from kd.ship.export.base import ExportJob, Format, Runtime
from kd.ship.export.fp16 import HalfPrecision, shortened
from kd.ship.export.manifest import FILE, ExportManifest
from kd.ship.export.settings import ExportSettings
from kd.ship.finished import FinishedRun
from kd.storage.elsewhere import LARGEST_STUDENT, bytes_of
from kd.storage.of_weights import EXPORTS, on_stderr, read_of_weights, write_of_weights
from kd.storage.writing import make_folder, move, remove, write_json
from kd.tasks import Features, Task

LAYERS = "fp16.json"
"""In the folder of an FP16 export: what each layer's numbers reach."""


@torch.inference_mode()
def compare_answers(
    student: Runtime,
    runtime: Runtime,
    manifest: ExportManifest,
    batches: Iterable[Batch],
    task: Task,
) -> dict[str, Any]:
    """Runs the student and its export on the same pictures on the CPU.

    Args:
        student: runs the student in torch.
        runtime: runs the export.
        manifest: of the export.
        batches: with targets; padding (index -1) is left out.
        task: compares the answers; copies of it count the metrics, so its own are left alone. For features
            :class:`kd.tasks.Features` is used in its place.

    Returns:
        ``pictures`` (how many), ``max_difference`` of the numbers (NaN where one is), ``agreement`` in 0..1; and
            ``metric``, the task's by name, with its values of ``student`` and ``export`` (shares in 0..1; ``r2`` may be
            below 0), which features do not have.
    """
    judges: dict[str, Task] = {}
    if manifest.task == "features":
        task = Features()
    else:
        judges = {"student": copy.deepcopy(task), "export": copy.deepcopy(task)}
    for judge in judges.values():
        judge.reset()
    max_difference = 0.0
    pictures = 0
    same: list[torch.Tensor] = []
    for batch in bar(batches, label="comparing with the student", unit=" batches"):
        real = batch["index"] >= 0
        target = batch["target"][real]
        images = _images(batch)
        expected = torch.from_numpy(student(images))
        exported = torch.from_numpy(np.array(runtime(images)))
        difference = (expected - exported).abs().max()
        max_difference = float(np.maximum(max_difference, difference.item()))  # NaN stays
        pictures += len(images)

        answers = {"student": task.fit(expected, target), "export": task.fit(exported, target)}
        same.append(task.same(answers["student"], answers["export"]).flatten())
        for name, judge in judges.items():
            judge.update(answers[name], target, None)

    measured: dict[str, Any] = {
        "pictures": pictures,
        "max_difference": max_difference,
        "agreement": torch.cat(same).double().mean().item(),
    }
    if judges:
        measured["metric"] = task.primary
    for name, judge in judges.items():
        measured[name] = float(judge.compute()[task.primary])
    return measured


def _images(batch: Batch) -> np.ndarray:
    """The pictures of a batch without its padding, uint8 ``(N, H, W, 3)``."""
    images = batch["image"][batch["index"] >= 0]
    return images.permute(0, 2, 3, 1).contiguous().numpy()


def _pictures(batches: Iterable[Batch]) -> Iterator[np.ndarray]:
    """The pictures of each batch as NumPy, without padding; shows a bar."""
    for batch in bar(batches, label="measuring each layer", unit=" batches"):
        yield _images(batch)


def failure(measured: dict[str, Any], wanted: ExportSettings) -> str:
    """Why an export must not ship.

    Args:
        measured: the numbers of :func:`compare_answers` (shares in 0..1).
        wanted: its bounds; of a quantised export the task's main metric decides where there is one, else the
            agreement.

    Returns:
        The reason in words, with the bound's key; "" where the export may ship. No bound allows NaN or infinite answers.
    """
    if not math.isfinite(measured["max_difference"]):
        return "an answer of it or of the student is NaN or infinite"
    if wanted.int8 and "metric" in measured:
        before, after = measured["student"], measured["export"]
        if before - after <= wanted.max_drop / 100:
            return ""
        metric = measured["metric"]
        return (
            f"{metric} falls from {format_metric(metric, before)} to {format_metric(metric, after)}, by more than "
            f"{wanted.max_drop:g} points (max_drop)"
        )
    if measured["agreement"] < wanted.min_agreement / 100:
        return (
            f"it agrees with the student on {measured['agreement']:.3%} of {measured['pictures']} pictures, "
            f"fewer than {wanted.min_agreement:.3f}% (min_agreement)"
        )
    return ""


def size_mb(folder: Path) -> float:
    """The size of all files in a folder, in MB of 10**6 bytes."""
    files = filter(Path.is_file, folder.rglob("*"))
    return round(sum(file.stat().st_size for file in files) / 1e6, 3)


def export(
    run: FinishedRun,
    wanted: ExportSettings,
    kind: Format,
    out: Path,
    vouch: Callable[[bytes], None],
) -> tuple[str, dict[str, Any]]:
    """Writes an export beside its place, compares it with the student, and moves it there if it may ship.

    The record, kept or not, goes to ``export/export.json`` in the run's folder, the kept ones also to its page.

    Args:
        run: the run whose student is exported.
        wanted: the export.
        kind: its format.
        out: its folder, which is replaced.
        vouch: called with the content of a ``torch_export``, so that later commands of this machine trust it.

    Returns:
        Why the export is not kept ("": it is in ``out``), and its record: what was requested (``to``, ``int8``, ``fp16``),
            ``file`` (its path, from the run's folder where it lies in it), ``size_mb``, the numbers of
            :func:`compare_answers`, ``kept``; and where they apply ``note``, ``float32_layers`` and ``simulated``
            (:func:`compare_answers` in simulated FP16).

    Raises:
        UserError: no pictures to compare it on, or as of :meth:`Format.write`.
    """
    to = str(wanted.to)
    manifest = replace(run.manifest(to, wanted.int8), fp16=wanted.fp16)
    if kind.features:
        manifest = replace(manifest, task="features", classes=[])
    # before the work: missing pictures are reported at once
    batches = run.data.eval_dataloader("val")
    half = HalfPrecision(partial(_pictures, batches))
    job = ExportJob(
        run.prepared(),
        run.model,
        manifest,
        run.folder / "student.safetensors",
        partial(run.calibration, wanted.calibrate),
        run.teacher,
        half.convert if wanted.fp16 else None,
    )

    make_folder(out.parent)
    part = Path(mkdtemp(prefix=".export-", dir=out.parent))
    try:
        with uncounted(f"converting the student to {wanted.name}"):
            file = kind.write(job, part)
        if not (part / FILE).exists():
            manifest.write(part)
        compared = partial(
            compare_answers,
            kind.reference(job),
            manifest=manifest,
            batches=batches,
            task=run.task,
        )
        measured = compared(runtime=kind.open(file))
        if kind.note:
            measured["note"] = kind.note
        problem = failure(measured, wanted)
        if wanted.fp16:
            write_json(part / LAYERS, [asdict(tensor) for tensor in half.ranges])
            layers = measured["float32_layers"] = half.float32_layers
            if layers and not kind.mixes:
                problem = problem or _unmixed(to, layers)
        if wanted.fp16 and not problem:
            simulated = compared(runtime=half.simulation())
            reason = failure(simulated, wanted)
            problem = f"simulated in FP16, {reason}" if reason else ""
            measured["simulated"] = simulated
        written = out / file.relative_to(part)
        record = {
            "to": to,
            "int8": wanted.int8,
            "fp16": wanted.fp16,
            "file": _from_run(run.folder, written),
            "size_mb": size_mb(part),
            **measured,
            "kept": not problem,
        }
        if not problem:
            part.chmod(0o755)
            remove(out)
            move(part, out)
            if to == "torch_export":
                vouch(bytes_of(written, LARGEST_STUDENT))
    finally:
        shutil.rmtree(part, ignore_errors=True)
    records = {**read_of_weights(run.folder, EXPORTS, on_stderr), wanted.name: record}
    write_of_weights(run.folder, EXPORTS, records)
    kept = {name: one for name, one in records.items() if one.get("kept")}
    write_parts(run.folder, "exports", exports_parts(kept))
    return problem, record


def _from_run(run: Path, file: Path) -> str:
    """A file's path from a run's folder where it lies in it, so that the run may be moved; else its whole path."""
    if file.is_relative_to(run):
        return str(file.relative_to(run))
    return str(file.absolute())


def _unmixed(to: str, float32_layers: list[str]) -> str:
    """Why a format that computes all layers in FP16 can't take a student whose layers of these names need float32."""
    return (
        f"to={to} keeps no layer in float32, and FP16 is too small for {shortened(float32_layers)}"
    )

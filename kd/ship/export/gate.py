"""Every export against the student in torch, on real validation pictures: nothing ships unseen."""

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from kd.data.batch import Batch
from kd.errors import UserError
from kd.module.outcomes import PictureOutcomes
from kd.progress import bar, uncounted
from kd.proof.certificate import ProofMargin, certify
from kd.report.evaluated import exports_parts
from kd.report.tables import write_parts
from kd.ship.export.base import ExportJob, ExportLimits, Format, Runtime
from kd.ship.export.fp16 import HalfPrecision, shortened
from kd.ship.export.manifest import FILE, ExportManifest, Layout
from kd.ship.export.stopwatch import timed
from kd.ship.finished import FinishedRun
from kd.ship.latency import TURNS, Measure, in_turns, medians
from kd.storage.elsewhere import LARGEST_STUDENT, bytes_of
from kd.storage.of_weights import EXPORTS, on_stderr, read_of_weights, write_of_weights
from kd.storage.writing import make_folder, move, remove, write_json
from kd.tasks import Features, Task

Fp16 = Literal["", "mixed", "all"]

SECONDS = 0.2
"""Seconds for which the student, and its export, are timed on one picture."""

LAYERS = "fp16.json"
"""In the folder of an FP16 export: what each layer's numbers reach."""

SIMULATED = ("agreement", "max_difference", "metric", "student", "export")
"""Measured by :func:`compare` and recorded of the simulation too."""


@torch.inference_mode()
def compare(
    student: nn.Module,
    runtime: Runtime,
    manifest: ExportManifest,
    batches: Iterable[Batch],
    task: Task,
    wanted: ProofMargin | None = None,
) -> dict[str, Any]:
    """Runs the student and its export on the same pictures on the CPU.

    Args:
        student: uint8 pictures in the manifest's layout -> answers, in torch.
        runtime: runs the export.
        manifest: of the export.
        batches: with targets; padding (index -1) is left out.
        task: compares the answers; its own metrics are left alone. Of features the task is :class:`kd.tasks.Features`.
        wanted: of a certificate that the export is not worse than the student; None: without one.

    Returns:
        ``pictures`` (how many), ``max_difference`` and ``mean_difference`` of the numbers, ``agreement`` in 0..1;
            ``metric``, the task's by name, and its values of ``student`` and ``export`` (shares in 0..1; ``r2`` may be below
            0), which features do not have; ``student_ms`` and ``export_ms`` of one picture; the ``certificate``, where one
            is wanted.

    Raises:
        UserError: too few pictures for a certificate.
    """
    judges: dict[str, Task] = {}
    if manifest.task == "features":
        task = Features()
    else:
        judges = {"student": copy.deepcopy(task), "export": copy.deepcopy(task)}
    for judge in judges.values():
        judge.reset()
    max_difference = 0.0
    sum_of_differences = 0.0
    pictures = 0
    numbers = 0
    agreed = 0
    answered = 0
    first: torch.Tensor | None = None
    outcomes = PictureOutcomes(task)
    for batch in bar(batches, label="comparing with the student", unit=" batches"):
        real = batch["index"] >= 0
        target = batch["target"][real]
        images = _images(batch, manifest.layout)
        if first is None:
            first = images[:1]

        expected = student(images)
        exported = torch.from_numpy(np.array(runtime(images.numpy())))
        difference = (expected - exported).abs()
        max_difference = max(max_difference, difference.max().item())
        sum_of_differences += difference.sum().item()
        pictures += len(images)
        numbers += difference.numel()

        answers = {"student": task.fit(expected, target), "export": task.fit(exported, target)}
        same = task.same(answers["student"], answers["export"])
        agreed += int(same.sum())
        answered += same.numel()
        for name, judge in judges.items():
            judge.update(answers[name], target, None)
        if wanted is not None:
            outcomes.update(answers["export"], answers["student"], target, batch["index"][real])

    assert first is not None
    measured: dict[str, Any] = {
        "pictures": pictures,
        "max_difference": max_difference,
        "mean_difference": sum_of_differences / numbers,
        "agreement": agreed / answered,
    }
    if judges:
        measured["metric"] = task.primary
    for name, judge in judges.items():
        measured[name] = float(judge.compute()[task.primary])
    if wanted is not None:
        measured["certificate"] = _certificate(outcomes, wanted)
    return measured | _latency(student, runtime, first)


def _certificate(outcomes: PictureOutcomes, wanted: ProofMargin) -> dict[str, Any]:
    """A certificate, or its refusal, that the export is not worse than the student.

    Args:
        outcomes: the student's under ``teacher``, the export's under ``student``.
        wanted: margin and confidence.

    Raises:
        UserError: too few pictures.
    """
    student, exported = outcomes.of("teacher"), outcomes.of("student")
    assert student is not None
    assert exported is not None
    try:
        return certify(student, exported, wanted, ("the student", "the export"))
    except ValueError as error:
        raise UserError(f"margin: {error}") from error


def _images(batch: Batch, layout: Layout) -> torch.Tensor:
    """The pictures of a batch without its padding, uint8 in an export's layout."""
    images = batch["image"][batch["index"] >= 0]
    if layout == "nhwc":
        images = images.permute(0, 2, 3, 1)
    return images.contiguous()


def _pictures(batches: Iterable[Batch], layout: Layout) -> Iterator[np.ndarray]:
    """The pictures of each batch as NumPy, uint8 in the layout, without padding; shows a bar."""
    for batch in bar(batches, label="measuring each layer", unit=" batches"):
        yield _images(batch, layout).numpy()


def _latency(student: nn.Module, runtime: Runtime, picture: torch.Tensor) -> dict[str, float]:
    """Milliseconds of one picture, ``student_ms`` and ``export_ms``, in turns: what else the machine does hits both
    alike.

    Args:
        student: in torch.
        runtime: runs the export.
        picture: uint8, a batch of one.
    """
    pixels = picture.numpy()
    measures: dict[str, Measure] = {
        "student_ms": lambda runs: (timed(student, picture, runs), 0.0),
        "export_ms": lambda runs: (timed(runtime, pixels, runs), 0.0),
    }
    with bar(label="timing one picture", unit=" turns", total=2 * TURNS) as shown:
        turns = in_turns(measures, SECONDS, shown)
    times = {}
    for name, (rounds, _) in turns.items():
        of_all = medians(rounds)
        times[name] = of_all["median_ms"]
    return times


def failure(measured: dict[str, Any], int8: bool, limits: ExportLimits) -> str:
    """Why an export must not ship.

    Args:
        measured: the numbers of :func:`compare` (shares in 0..1).
        int8: whether the export is quantised: then the task's main metric decides where there is one, else the
            agreement. A certificate that was asked for decides alone.
        limits: the bounds.

    Returns:
        The reason in words, with the bound's key; "" where the export may ship.
    """
    if "certificate" in measured:
        certificate = measured["certificate"]
        return "" if certificate["shown"] else f"{certificate['text'][0]} (margin)"
    if int8 and "metric" in measured:
        if measured["student"] - measured["export"] > limits.drop:
            before, after = _score(measured, "student"), _score(measured, "export")
            return (
                f"{measured['metric']} falls from {before} to {after}, by more than "
                f"{100 * limits.drop:g} points (max_drop)"
            )
        return ""
    if measured["agreement"] < limits.agreement:
        return (
            f"it agrees with the student on {measured['agreement']:.3%} of {measured['pictures']} pictures, "
            f"fewer than {limits.agreement:.3%} (min_agreement)"
        )
    return ""


def size_mb(path: Path) -> float:
    """The size of a file, or of all files in a folder, in MB of 10**6 bytes."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return round(sum(file.stat().st_size for file in files) / 1e6, 3)


@dataclass(frozen=True)
class ExportRequest:
    """One export that was requested: ``to=`` and the settings that shape it."""

    to: str
    """The format's name or class path, as it was given."""
    kind: Format
    """The format."""
    int8: bool
    """Whether it is quantised."""
    layout: Layout
    """Layout of the pictures."""
    calibrate: int
    """How many training pictures calibrate int8."""
    limits: ExportLimits
    """How far it may be from the student."""
    fp16: Fp16 = ""
    """FP16 for ``all`` layers, or (``mixed``) all but those that need float32; "" for none."""
    max_batch: int = 8
    """Largest batch of a format that plans its memory ahead."""

    @property
    def name(self) -> str:
        """Name of the export's folder and of its record: the format's name, of a class path the class, with ``_int8`` or
        ``_fp16``.
        """
        suffix = ""
        if self.int8:
            suffix = "_int8"
        elif self.fp16:
            suffix = "_fp16"
        return self.to.rpartition(".")[2] + suffix


def export(
    run: FinishedRun, wanted: ExportRequest, out: Path, vouch: Callable[[bytes], None]
) -> tuple[str, dict[str, Any]]:
    """Writes an export beside its place, compares it with the student, and moves it there if it may ship.

    Args:
        run: the run whose student is exported.
        wanted: the export.
        out: its folder, which is replaced.
        vouch: called with the content of a ``torch_export``, so that later commands of this machine trust it.

    Returns:
        Why the export is not kept ("": it is in ``out``), and the record that is added to ``export/export.json``, also
            of one that is not kept: what was requested (``to``, ``int8``, ``fp16``, ``layout``), ``file`` (its path, from
            the run's folder where it lies in it), ``size_mb``, ``compared`` (with what), the numbers of :func:`compare`,
            ``kept``; and where they apply ``note``, ``float32_layers`` and ``simulated`` (:data:`SIMULATED` of
            :func:`compare` in simulated FP16).

    Raises:
        UserError: no pictures to compare it on, a certificate of answers that have none (features), or as of
            :meth:`Format.write`.
    """
    kind, layout = wanted.kind, wanted.layout
    manifest = replace(run.manifest(wanted.to, layout, wanted.int8), fp16=bool(wanted.fp16))
    if kind.features:
        manifest = replace(manifest, task="features", classes=[])
    needs_outcomes = wanted.limits.certificate is not None
    if needs_outcomes and (manifest.task == "features" or run.task.certified is None):
        raise UserError("margin: needs a student that answers in classes, masks or numbers")
    weights = run.folder / "student.safetensors"
    calibration = partial(run.calibration, layout, wanted.calibrate)
    job = ExportJob(
        run.prepared(layout),
        run.model,
        manifest,
        weights,
        calibration,
        run.teacher,
        max_batch=wanted.max_batch,
    )
    # before the work: missing pictures are reported at once
    batches = run.data.eval_dataloader("val")
    half = None
    if wanted.fp16:
        half = HalfPrecision(wanted.fp16 == "all", partial(_pictures, batches, layout))
        job = replace(job, halve=half.convert)

    make_folder(out.parent)
    part = Path(mkdtemp(prefix=".export-", dir=out.parent))
    try:
        with uncounted(f"converting the student to {wanted.name}"):
            file = kind.write(job, part)
        if not (part / FILE).exists():
            manifest.write(part)
        certificate = wanted.limits.certificate
        reference, exported = kind.reference(job), kind.open_written(job, file)
        measured = compare(reference, exported, manifest, batches, run.task, certificate)
        if kind.note():
            measured["note"] = kind.note()
        problem = failure(measured, wanted.int8, wanted.limits)
        if half:
            write_json(part / LAYERS, half.records())
            problem = problem or half.overflow()
            measured["float32_layers"] = half.float32_layers()
            if not kind.mixes and not problem:
                problem = _unmixed(wanted.to, half.float32_layers())
        if half and not problem:
            exported = kind.simulate(file)
            simulated = compare(reference, exported, manifest, batches, run.task, certificate)
            reason = failure(simulated, False, wanted.limits)
            problem = f"simulated in FP16, {reason}" if reason else ""
            measured["simulated"] = {key: simulated[key] for key in SIMULATED if key in simulated}
        written = out / file.relative_to(part)
        record = {
            "to": wanted.to,
            "int8": wanted.int8,
            "fp16": wanted.fp16,
            "layout": layout,
            "file": _from_run(run.folder, written),
            "size_mb": size_mb(part),
            "compared": kind.compared,
            **measured,
            "kept": not problem,
        }
        if not problem:
            part.chmod(0o755)
            remove(out)
            move(part, out)
            if wanted.to == "torch_export":
                vouch(bytes_of(written, LARGEST_STUDENT))
    finally:
        shutil.rmtree(part, ignore_errors=True)
    records = {**read_of_weights(run.folder, EXPORTS, on_stderr), wanted.name: record}
    write_of_weights(run.folder, EXPORTS, records)
    write_parts(run.folder, "exports", exports_parts(records))
    return problem, record


def _from_run(run: Path, file: Path) -> str:
    """A file's path from a run's folder where it lies in it, so that the run may be moved; else its whole path."""
    if file.is_relative_to(run):
        return str(file.relative_to(run))
    return str(file.absolute())


def _unmixed(to: str, float32_layers: list[str]) -> str:
    """Why a format that computes all layers in FP16 can't take a student; "" where no layer needs float32.

    Args:
        to: name of the format.
        float32_layers: names of the layers that FP16 can't hold.
    """
    if not float32_layers:
        return ""
    return (
        f"to={to} keeps no layer in float32, and FP16 is too small for {shortened(float32_layers)}; "
        "fp16=all leaves it to the comparison alone, unless a layer overflows"
    )


def lines(record: dict[str, Any]) -> list[str]:
    """The measured numbers of an export as aligned lines for the terminal.

    Args:
        record: of :func:`export`: shares in [0, 1], times in ms, size in MB.
    """
    rows = {
        "largest difference": f"{record['max_difference']:.3g}",
        "mean difference": f"{record['mean_difference']:.3g}",
        "agreement": f"{record['agreement']:.2%} of {record['pictures']} pictures",
    }
    if "metric" in record:
        rows[f"{record['metric']} of {record['compared']}"] = _score(record, "student")
        rows["of the export"] = _score(record, "export")
    if "simulated" in record:
        simulated = record["simulated"]
        text = f"agreement {simulated['agreement']:.2%}"
        if "metric" in record:
            text += f", {record['metric']} {_score(simulated, 'export')}"
        rows["simulated in FP16"] = text
    if record.get("float32_layers"):
        rows["kept in float32"] = shortened(record["float32_layers"])
    note = record.get("note")
    if note is None:
        student_ms = record["student_ms"]
        export_ms = record["export_ms"]
        rows["one picture"] = f"student {student_ms:.2f} ms, export {export_ms:.2f} ms"
    rows["size"] = f"{record['size_mb']:.1f} MB"
    texts = [f"{name:<22} {value}" for name, value in rows.items()]
    if note is not None:
        texts.append(note)
    certificate = record.get("certificate", {})
    return [*texts, *certificate.get("text", [])]


def _score(record: dict[str, Any], name: str) -> str:
    """The metric of the ``student`` or the ``export``, in percent where it is a share."""
    value = record[name]
    return f"{value:.4f}" if record["metric"] == "r2" else f"{value:.2%}"

"""Every export against the student in torch, on real validation pictures: nothing ships unseen."""

import copy
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from torch import nn

from kd.data.batch import Batch
from kd.progress import bar
from kd.ship.export.base import ExportJob, ExportLimits, Format, Runtime
from kd.ship.export.manifest import FILE, ExportManifest, Layout
from kd.ship.finished import FinishedRun
from kd.storage.elsewhere import LARGEST_STUDENT, bytes_of, mapping_of
from kd.storage.writing import make_folder, move, remove, write_json
from kd.tasks import Features, Task

REPEATS = 15  # Batches of one picture that the two latencies are medians of


@torch.inference_mode()
def compare(
    student: nn.Module,
    runtime: Runtime,
    manifest: ExportManifest,
    batches: Iterable[Batch],
    task: Task,
) -> dict[str, Any]:
    """Runs both on the same pictures on the CPU: differences, agreement in 0..1, metric, milliseconds."""
    features = manifest.task == "features"
    task = Features() if features else task
    tasks = {} if features else {"student": task, "export": copy.deepcopy(task)}
    worst, total, numbers, same, answered, pictures = 0.0, 0.0, 0, 0, 0, 0
    one: torch.Tensor | None = None
    for batch in bar(batches, label="comparing with the student", unit=" batches"):
        real = batch["index"] >= 0
        images, target = batch["image"][real], batch["target"][real]
        given = (
            images.permute(0, 2, 3, 1).contiguous()
            if manifest.layout == "nhwc"
            else images.contiguous()
        )
        one = given[:1] if one is None else one
        expected, exported = student(given), torch.from_numpy(np.array(runtime(given.numpy())))
        difference = (expected - exported).abs()
        worst, total = max(worst, difference.max().item()), total + difference.sum().item()
        numbers, pictures = numbers + difference.numel(), pictures + len(given)
        answers = {"student": task.fit(expected, target), "export": task.fit(exported, target)}
        agreed = task.same(*answers.values())
        same, answered = same + int(agreed.sum()), answered + agreed.numel()
        for name, judge in tasks.items():
            judge.update(answers[name], target, None)
    assert one is not None
    found: dict[str, Any] = {
        "pictures": pictures,
        "max_difference": worst,
        "mean_difference": total / numbers,
        "agreement": same / answered,
    }
    if tasks:
        found["metric"] = task.primary
        found |= {name: float(judge.compute()[task.primary]) for name, judge in tasks.items()}
    return found | _latency(student, runtime, one)


def _latency(student: nn.Module, runtime: Runtime, one: torch.Tensor) -> dict[str, float]:
    """Interleaved: what else the machine does hits both alike."""
    took: dict[str, list[float]] = {"student_ms": [], "export_ms": []}
    for _ in range(REPEATS):
        for name, call in (
            ("student_ms", lambda: student(one)),
            ("export_ms", lambda: runtime(one.numpy())),
        ):
            start = time.perf_counter()
            call()
            took[name].append(1000 * (time.perf_counter() - start))
    return {name: round(median(values[1:]), 3) for name, values in took.items()}


def failure(found: dict[str, Any], int8: bool, limits: ExportLimits) -> str:
    """Why an export must not ship.

    Args:
        found: the measured numbers of :func:`compare` (shares in 0..1).
        int8: whether the export is quantised: then the task's main metric decides where there is one, else the
            agreement.
        limits: the bounds.

    Returns:
        The reason in words, with the bound's key; "" where the export may ship.
    """
    if int8 and "metric" in found:
        falls = (
            f"{found['metric']} falls from {_score(found, 'student')} to {_score(found, 'export')}"
        )
        lost = found["student"] - found["export"]
        return (
            f"{falls}, by more than {100 * limits.drop:g} points (max_drop)"
            if lost > limits.drop
            else ""
        )
    agrees = (
        f"it agrees with the student on {found['agreement']:.3%} of {found['pictures']} pictures"
    )
    few = found["agreement"] < limits.agreement
    return f"{agrees}, fewer than {limits.agreement:.3%} (min_agreement)" if few else ""


def size_mb(path: Path) -> float:
    """Of a file, or of all files in a folder."""
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

    @property
    def name(self) -> str:
        """The export's folder: the format's name, with ``_int8`` where it is quantised."""
        return self.to.rpartition(".")[2] + ("_int8" if self.int8 else "")


def export(
    run: FinishedRun, wanted: ExportRequest, out: Path, vouch: Callable[[bytes], None]
) -> tuple[str, dict[str, Any]]:
    """Why an export is not kept (empty: it is in ``out``), and the comparison, also in ``export/export.json``."""
    kind, layout, int8 = wanted.kind, wanted.layout, wanted.int8
    manifest = run.manifest(wanted.to, layout, int8)
    if kind.features:
        manifest = replace(manifest, task="features", classes=[])
    job = ExportJob(
        run.prepared(layout),
        run.model,
        manifest,
        run.folder / "student.safetensors",
        partial(run.calibration, layout, wanted.calibrate),
    )
    batches = run.data.eval_dataloader(
        "val"
    )  # before the work: missing pictures are reported at once
    make_folder(out.parent)
    part = Path(mkdtemp(prefix=".export-", dir=out.parent))
    try:
        file = kind.write(job, part)
        if not (part / FILE).exists():
            manifest.write(part)
        measured = compare(kind.reference(job), kind.open(file), manifest, batches, run.task)
        where = str(out / file.relative_to(part))
        found = {
            "to": wanted.to,
            "int8": int8,
            "layout": layout,
            "file": where,
            "size_mb": size_mb(part),
            **measured,
        }
        problem = failure(found, int8, wanted.limits)
        if not problem:
            part.chmod(0o755)
            remove(out)
            move(part, out)
            if wanted.to == "torch_export":
                vouch(bytes_of(where, LARGEST_STUDENT))
    finally:
        shutil.rmtree(part, ignore_errors=True)
    found["kept"] = not problem
    record = run.folder / "export" / "export.json"
    write_json(record, {**mapping_of(record), wanted.name: found})
    return problem, found


def lines(found: dict[str, Any]) -> list[str]:
    """The measured numbers as aligned lines for the terminal."""
    rows = [
        ("largest difference", f"{found['max_difference']:.3g}"),
        ("mean difference", f"{found['mean_difference']:.3g}"),
        ("agreement", f"{found['agreement']:.2%} of {found['pictures']} pictures"),
    ]
    if "metric" in found:
        rows.append((f"{found['metric']} of the student", _score(found, "student")))
        rows.append(("of the export", _score(found, "export")))
    rows.append(
        ("one picture", f"student {found['student_ms']:.2f} ms, export {found['export_ms']:.2f} ms")
    )
    rows.append(("size", f"{found['size_mb']:.1f} MB"))
    return [f"{name:<22} {value}" for name, value in rows]


def _score(found: dict[str, Any], of: str) -> str:
    return f"{found[of]:.4f}" if found["metric"] == "r2" else f"{found[of]:.2%}"

"""What ``kd-eval`` measures of a student without a classifier: its features, and its teachers'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kd.commands._finished import FinishedRun, feature_teachers, open_run
from kd.commands._measure import Asked, is_run
from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.models import count_parameters
from kd.module.evaluation import bank_of, look_at
from kd.progress import bar
from kd.run.request import Request
from kd.ship.export.student import read_metadata
from kd.storage.run_urls import run_at
from kd.tasks.features import rank_of_gram


@dataclass
class _Model:
    """One of the models that are measured: its call on uint8 pictures, and its parameters."""

    call: Callable[[Tensor], Tensor]
    params: int


def gives_features(word: str) -> bool:
    """Whether a word of the command line names a run whose student has no classifier, or one that nothing trained."""
    if not is_run(word):
        return False
    file = run_at(word) / "student.safetensors"
    return file.is_file() and read_metadata(file).get("classifies") == "false"


def measured(request: Request, asked: Asked, out: Path | None) -> list[dict[str, Any]]:
    """The figures of each run.

    Raises:
        UserError: a key that needs labels, or a model with a classifier beside one without.
    """
    other = next((word for word in request.rest if not gives_features(word)), None)
    without = request.rest[0] if other is None else next(word for word in request.rest if gives_features(word))
    if other is not None:
        raise UserError(f"{without} has no classifier and {other} has one: they can't be compared by one measure")
    for key, given in (("folder", asked.folder), ("robust", asked.robust), ("out", out and out.suffix == ".csv")):
        if given:
            raise UserError(f"{key}: needs a classifier, and {without} has none; data.probe.root=DIR measures features "
                            "by labelled pictures")  # fmt: skip
    return [_of_run(word, request, asked) for word in request.rest]


def _of_run(word: str, request: Request, asked: Asked) -> dict[str, Any]:
    opened = open_run(Request(rest=[word], overrides=list(request.overrides), trust=request.trust, flags=request.flags))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, models = opened.data, _models(opened, device)
    found = {name: {"params": model.params, "rankme": 0.0} for name, model in models.items()}
    for name, rank in _ranks(models, data, asked.split, device).items():
        found[name]["rankme"] = rank
    if data.probe is not None:
        batches = bar(data.eval_dataloader("probe"), label="labelled pictures", unit=" batches")
        seen = look_at({name: model.call for name, model in models.items()}, batches, bank_of(data), device)
        for name in models:
            found[name] |= seen.accuracy(name)
    return {
        "run": str(opened.folder),
        "data": f"{data.source.describe()} ({asked.split})",
        "pictures": len(data.split(asked.split).targets),
        **({"probe": data.probe.root} if data.probe else {}),
        **found,
    }


def _models(opened: FinishedRun, device: torch.device) -> dict[str, _Model]:
    student, prepare = opened.model.to(device), opened.preprocess
    models = {"student": _Model(lambda images: student(prepare(images)), count_parameters(student))}
    for name, teacher in feature_teachers(opened.config["model"]).items():
        teacher.to(device)
        models[f"teacher {name}".strip()] = _Model(teacher, count_parameters(teacher.model))
    return models


@torch.inference_mode()
def _ranks(
    models: dict[str, _Model], data: DistillationDataModule, split: str, device: torch.device
) -> dict[str, float]:
    grams: dict[str, Tensor] = {}
    for batch in bar(data.eval_dataloader(split), label="evaluating", unit=" batches"):
        images = batch["image"][batch["index"] >= 0].to(device)
        for name, model in models.items():
            x = model.call(images).double()
            grams[name] = grams.get(name, torch.zeros((), device=device)) + x.T @ x
    return {name: round(rank_of_gram(gram), 4) for name, gram in grams.items()}


def columns(results: Sequence[dict[str, Any]]) -> list[str]:
    """The names of the figures."""
    return [name for name in results[0]["student"] if name != "params"]


def rows(results: Sequence[dict[str, Any]], names: Sequence[str]) -> list[tuple[str, dict[str, float]]]:
    """Each teacher once, then each student, with its figures."""
    teachers: list[tuple[str, dict[str, float]]] = []
    students = []
    for name, result in zip(names, results, strict=True):
        of = f" of {name}" if len(results) > 1 else ""
        own = [(key, value) for key, value in result.items() if key.startswith("teacher")]
        teachers += [(f"{key}{of}", value) for key, value in own if value not in [known for _, known in teachers]]
        students.append((name if len(results) > 1 else "student", result["student"]))
    return teachers + students

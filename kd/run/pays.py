"""``kd-eval RUN pays=DIR``: what a distilled backbone is worth, by a linear probe on its frozen features.

Each start has the same layers: those that the run's losses have taught. Each seed fits a ridge classifier
(:func:`kd.tasks.features.ridge_classifier`) to another half of the labelled training pictures, the same half for all
starts, and all are judged by the same validation pictures.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from kd.data.datamodule import DistillationDataModule
from kd.data.sources import Joined
from kd.data.splits import PROBE, files_of
from kd.errors import UserError
from kd.models import ModelSpec, Preprocess, build_model
from kd.models.segmenter import DenseModel
from kd.models.taps import PRELOGITS, Taps
from kd.module.evaluation import Labelled, look_at
from kd.progress import bar
from kd.proof.seeds import Gain, gain_in_accuracy
from kd.report.pays import DISTILLED, FILE, gain_line
from kd.run.build import untrained_student_in
from kd.run.pays_wish import PaysWish
from kd.run.request import Request
from kd.run.run import Run
from kd.settings import Probe
from kd.ship.export.student import read_metadata
from kd.ship.finished import FinishedRun
from kd.storage.elsewhere import json_of, mapping_of
from kd.storage.writing import write_json
from kd.tasks.features import half_of_each_class, ridge_outcomes

RANDOM = "random"
PRETRAINED = "pretrained"
OF_NORMS = 1024
"""Pictures that the norms of random starts are measured on, at most."""


class TaughtFeatures:
    """What some layers of a model give for pictures, as vectors.

    Args:
        model: in eval mode.
        layers: paths or kinds of layers (:class:`kd.settings.TapSpec`).
        prepare: the model's input.
    """

    def __init__(self, model: nn.Module, layers: list[str], prepare: Preprocess) -> None:
        self.model = model
        self.layers = layers
        self.prepare = prepare
        self.taps = Taps(model, [layers], prepare)

    def __call__(self, images: Tensor) -> Tensor:
        """The mean of each layer over its positions, one layer after the other: ``(N, D)`` of uint8 ``(N, 3, H, W)``."""
        with self.taps as caught:
            self.model(self.prepare(images))
        vectors = []
        for output in self.taps.read(caught, self.layers, "patch"):
            of_pictures = output.unflatten(0, (len(images), -1)).mean(
                dim=1
            )  # windows: several rows a picture
            if of_pictures.ndim == 4:
                of_pictures = of_pictures.mean(dim=(2, 3))
            vectors.append(of_pictures.float())
        return torch.cat(vectors, dim=1)


class _Side(nn.Module):
    """Several models that see the same pictures; their outputs are dropped."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, images: Tensor) -> None:
        for model in self.models:
            model(images)


@dataclass
class Starts:
    """The backbones that are compared."""

    run: FinishedRun
    """The distilled one."""
    layers: list[str]
    """Whose outputs are its features."""
    models: dict[str, list[nn.Module]]
    """By name of the start: a model for each seed, or one for all seeds."""

    def features(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """What gives features of pictures, by the start's name and the model's number."""
        by_name: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, models in self.models.items():
            for number, model in enumerate(models):
                taught = TaughtFeatures(model, self.layers, self.run.preprocess)
                by_name[f"{name} {number}"] = taught
        return by_name

    def features_of(self, labelled: Labelled, name: str, seed: int) -> Tensor:
        """The features of a start in one repetition, ``(N, D)``."""
        number = seed % len(self.models[name])
        return labelled.features[f"{name} {number}"]


def measure_pays(request: Request, wish: PaysWish) -> tuple[dict[str, Any], Path]:
    """Measures a run's backbone beside its other starts; writes ``pays.json`` and the answer into ``summary.json``.

    Args:
        request: the command line; it names one run.
        wish: its own keys.

    Returns:
        The content of ``pays.json``, and the file.

    Raises:
        UserError: not one finished run, no labelled pictures, or pre-trained weights that do not fit.
    """
    if len(request.rest) != 1:
        raise UserError(f"pays: takes one run, got {len(request.rest)}")
    run = Run.open(request.rest[0], request)
    if not hasattr(run.preprocess, "mean"):
        raise UserError("pays: needs a model whose input kd prepares")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = run.load_data()
    data.splits.probe = Probe(wish.folder)
    try:
        data.split("probe")
    except UserError as error:
        raise UserError(str(error).replace(PROBE, "pays")) from error
    starts = _starts(run, wish, request, device)
    _settle_norms(starts.models[RANDOM], run.preprocess, data, device)
    batches = bar(data.eval_dataloader("probe"), label="labelled pictures", unit=" batches")
    labelled = look_at(starts.features(), data, batches, device)
    probe = _probed(starts, labelled, wish)
    probe["notes"] = _notes(data, probe["judged"])
    return _written(run.folder, probe)


def _starts(run: FinishedRun, wish: PaysWish, request: Request, device: torch.device) -> Starts:
    """A random start for each seed, pre-trained weights where there are any, and the student."""
    file = run.folder / "student.safetensors"
    _, trusted = Run.settings(run.folder / "config.yaml", request)
    models = {RANDOM: [untrained_student_in(file, trusted, seed) for seed in range(wish.seeds)]}
    pretrained = _pretrained(run, wish)
    if pretrained is not None:
        models[PRETRAINED] = [pretrained]
    models[DISTILLED] = [run.model]
    for of_start in models.values():
        for model in of_start:
            model.to(device).eval()
    return Starts(run, _taught_layers(run.config), models)


def _taught_layers(config: Mapping[str, Any]) -> list[str]:
    """The student's layers that the run's losses read; without such losses the classifier's input."""
    layers: list[str] = []
    for tap in (config["model"].get("taps") or {}).values():
        of_student = tap["student"]
        layers += [of_student] if isinstance(of_student, str) else of_student
    return list(dict.fromkeys(layers)) or [PRELOGITS]


def _pretrained(run: FinishedRun, wish: PaysWish) -> nn.Module | None:
    """The student's architecture with the weights of ``pretrained=``, or with those that the run began with.

    Raises:
        UserError: they can't be had, or do not fit.
    """
    settings = run.config["model"]["student"]
    checkpoint = settings.get("checkpoint")
    of_timm = bool(settings.get("pretrained")) and not checkpoint
    if wish.pretrained:
        of_timm = wish.pretrained.lower() == "true"
        checkpoint = None if of_timm else wish.pretrained
    if not (checkpoint or of_timm):
        return None
    meta = read_metadata(run.folder / "student.safetensors")
    if "builder" in meta:
        raise UserError("pretrained: is for models of timm's; the student has a builder of its own")
    kwargs = json_of(meta["kwargs"])
    classes = kwargs.pop("num_classes")
    size = kwargs.pop("img_size", json_of(meta["img_size"]))
    dense = isinstance(run.model, DenseModel)
    spec = ModelSpec(
        arch=meta["arch"],
        img_size=size,
        kwargs=kwargs,
        pretrained=of_timm,
        checkpoint=checkpoint,
        checkpoint_key=settings.get("checkpoint_key") if not wish.pretrained else None,
    )
    key = "pretrained" if wish.pretrained else "model.student"
    try:
        return build_model(spec, classes, key, dense=dense)
    except UserError as error:
        raise UserError(_in_own_words(str(error))) from error


def _in_own_words(message: str) -> str:
    """A message about ``pretrained.checkpoint`` and its like names the command's one key."""
    for name in ("checkpoint", "pretrained", "arch", "builder"):
        message = message.replace(f"pretrained.{name}", "pretrained")
    return message


def _settle_norms(
    models: Sequence[nn.Module],
    prepare: Preprocess,
    data: DistillationDataModule,
    device: torch.device,
) -> None:
    """Gives the batch norms of random starts the statistics of the labelled training pictures.

    As drawn they hold mean 0 and variance 1, which would make a random start worse than a training's first step does.
    Models without batch norms are left as they are.
    """
    labelled = data.split("probe")
    assert isinstance(labelled, Joined)
    every = math.ceil(labelled.border / OF_NORMS)

    def prepared() -> Iterator[Tensor]:
        batches = data.eval_dataloader("probe")
        for batch in bar(batches, label="norms of random starts", unit=" batches"):
            index = batch["index"]
            chosen = (index >= 0) & (index < labelled.border) & (index % every == 0)
            if chosen.sum() > 1:  # a norm of one picture's one position has no variance
                yield prepare(batch["image"][chosen].to(device))

    side = _Side(models)
    update_bn(prepared(), side)
    side.eval()


def _probed(starts: Starts, labelled: Labelled, wish: PaysWish) -> dict[str, Any]:
    """The accuracies of all starts, and what the distilled one gains over each other."""
    bank = labelled.bank
    labels = labelled.class_ids
    right_by_start: dict[str, np.ndarray] = {}  # (S, N)
    for name in starts.models:
        rows = []
        for seed in range(wish.seeds):
            features = starts.features_of(labelled, name, seed)
            fitted = half_of_each_class(labels[:bank], seed)
            is_right = ridge_outcomes(
                features[fitted], labels[fitted], features[bank:], labels[bank:]
            )
            rows.append(is_right.cpu().numpy())
        right_by_start[name] = np.stack(rows)
    of_starts = {}
    for name, right_SN in right_by_start.items():
        of_seeds = right_SN.mean(axis=1).tolist()
        of_starts[name] = {"mean": float(np.mean(of_seeds)), "seeds": of_seeds}
    gains = []
    for name, right_SN in right_by_start.items():
        if name != DISTILLED:
            gain = gain_in_accuracy(right_by_start[DISTILLED], right_SN)
            gains.append({"over": name, **_points(gain)})
    return {
        "folder": wish.folder,
        "classes": len(labels.unique()),
        "labelled": bank,
        "judged": len(labels) - bank,
        "features": starts.layers,
        "starts": of_starts,
        "gains": gains,
    }


def _points(gain: Gain) -> dict[str, float]:
    """A gain in points, with its interval."""
    return {
        "points": round(100 * gain.mean, 3),
        "low": round(100 * gain.low, 3),
        "high": round(100 * gain.high, 3),
    }


def _notes(data: DistillationDataModule, judged: int) -> list[str]:
    """What speaks against the figures: judging pictures that the student has seen without their labels."""
    with suppress(UserError, OSError):  # the pictures of the distillation may be gone
        distilled = files_of(data.splits.listed("train")[0])
        shared = files_of(data.splits.listed("probe")[1]) & distilled
        if shared:
            return [f"{len(shared):,} of the {judged:,} were distilled on, without their labels"]
    return []


def _written(folder: Path, probe: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    """Writes the figures into ``pays.json``, and with their answers into ``summary.json``."""
    content = {
        "run": str(folder),
        "probe": probe,
        "answers": [gain_line(gain) for gain in probe["gains"]],
    }
    file = folder / FILE
    write_json(file, content)
    summary = mapping_of(folder / "summary.json")
    if summary:
        write_json(folder / "summary.json", {**summary, "pays": content})
    return content, file

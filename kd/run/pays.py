"""``kd-eval RUN pays=DIR``: what a distilled backbone is worth, by a linear probe on its frozen features.

Each start has the same layers: those that the run's losses have taught, else the classifier's input. Each
seed fits a ridge classifier (:func:`kd.tasks.features.ridge_classifier`) to another half of the labelled training
pictures, the same half for all starts, and all are judged by the same validation pictures.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from kd.data.datamodule import DistillationDataModule
from kd.data.sources import Joined
from kd.data.splits import PROBE, files_of
from kd.errors import UserError
from kd.machine import choose_device
from kd.models import ModelSpec, Preprocess, build_model
from kd.models.segmenter import DenseModel
from kd.models.taps import PRELOGITS, Taps
from kd.module.evaluation import Labelled, look_at
from kd.progress import bar
from kd.proof.seeds import gain_in_accuracy
from kd.report.evaluated import gain_line
from kd.run.build import untrained_student_in
from kd.run.eval_options import EvalOptions
from kd.run.open import open_run
from kd.run.request import Request
from kd.run.run import Run
from kd.run.trust import Trust
from kd.settings import Probe
from kd.ship.finished import FinishedRun
from kd.storage.elsewhere import Json
from kd.storage.student_metadata import student_metadata_in
from kd.tasks.features import half_of_each_class, ridge_outcomes

RANDOM = "random"
PRETRAINED = "pretrained"
DISTILLED = "distilled"
"""Names of starts."""
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
        """The mean of each layer over its positions (of tokens, the patch tokens), one layer after the other: float32
        ``(N, D)`` of uint8 ``(N, 3, H, W)``.
        """
        with self.taps as caught:
            self.model(self.prepare(images))
        vectors = []
        for output in self.taps.read(caught, self.layers, "patch"):
            # several rows a picture where the layer sees windows
            of_pictures = output.unflatten(0, (len(images), -1)).mean(dim=1)
            # maps (N, D, H, W), or tokens (N, T, D) that fill no grid
            positions = {4: (2, 3), 3: (1,)}.get(of_pictures.ndim)
            if positions:
                of_pictures = of_pictures.mean(dim=positions)
            vectors.append(of_pictures.float())
        return torch.cat(vectors, dim=1)


def _starts(
    run: FinishedRun, trusted: Trust, options: EvalOptions
) -> dict[str, Sequence[nn.Module]]:
    """The backbones that are compared, by start, the distilled one last: the order of the page's rows. A random start is
    another one for each seed.

    Args:
        run: the distilled one.
        trusted: what the user trusts in the run's settings.
        options: of the command.

    Raises:
        UserError: as of :func:`_pretrained`.
    """
    file = run.folder / "student.safetensors"
    pretrained = _pretrained(run, options)
    starts: dict[str, Sequence[nn.Module]] = {
        RANDOM: [untrained_student_in(trusted.of(file), seed) for seed in range(options.seeds)],
        PRETRAINED: [] if pretrained is None else [pretrained],
        DISTILLED: [run.model],
    }
    return {name: models for name, models in starts.items() if models}


def measure_pays(request: Request, options: EvalOptions) -> Json:
    """Measures a run's backbone beside its other starts.

    Args:
        request: the command line; it names one run.
        options: of the command, with ``pays``.

    Returns:
        ``run``, its folder; ``probe`` (:func:`_probed`); ``answers``, a sentence for each other start.

    Raises:
        UserError: not one finished run, no labelled pictures, or pre-trained weights that do not fit.
    """
    if len(request.rest) != 1:
        raise UserError(f"pays: takes one run, got {len(request.rest)}")
    run = open_run(request.rest[0], request)
    settings = run.folder / "config.yaml"
    _, trusted = Run.settings(settings, request)
    device = choose_device()
    starts = _starts(run, trusted, options)
    probe = _probed(run, starts, options, device)
    answers = []
    for gain in probe["gains"]:
        answers.append(gain_line(gain))
    folder = str(run.folder)
    return {"run": folder, "probe": probe, "answers": answers}


def _taught_layers(config: Json) -> list[str]:
    """The student's layers that the run's losses read; without such losses the classifier's input."""
    layers: list[str] = []
    for tap in (config["model"].get("taps") or {}).values():
        of_student = tap["student"]
        layers += [of_student] if isinstance(of_student, str) else of_student
    return list(dict.fromkeys(layers)) or [PRELOGITS]


def _pretrained(run: FinishedRun, options: EvalOptions) -> nn.Module | None:
    """The student's architecture with the weights of ``pretrained=``, or with those of ``model.student.checkpoint`` or
    ``.pretrained`` that the run began with; None where there are neither. Layers that it inherited are no such weights.

    Raises:
        UserError: they can't be had, or do not fit.
    """
    settings = run.config["model"]["student"]
    checkpoint = settings.get("checkpoint")
    of_timm = bool(settings.get("pretrained")) and not checkpoint
    checkpoint_key = settings.get("checkpoint_key")
    key = "model.student"
    if options.pretrained:
        of_timm = options.pretrained.lower() == "true"
        checkpoint = None if of_timm else options.pretrained
        checkpoint_key = None
        key = "pretrained"
    if not (checkpoint or of_timm):
        return None
    student = student_metadata_in(run.folder / "student.safetensors")
    if student.builder is not None:
        raise UserError("pretrained: is for models of timm's; the student has a builder of its own")
    kwargs = dict(student.kwargs)
    classes = kwargs.pop("num_classes")
    spec = ModelSpec(
        arch=student.arch,
        img_size=kwargs.pop("img_size", student.img_size),
        kwargs=kwargs,
        pretrained=of_timm,
        checkpoint=checkpoint,
        checkpoint_key=checkpoint_key,
    )
    try:
        return build_model(spec, classes, key, dense=isinstance(run.model, DenseModel))
    except UserError as error:
        # the command has that one key
        inner = r"pretrained\.(checkpoint|pretrained|arch|builder)"
        raise UserError(re.sub(inner, "pretrained", str(error))) from error


def _settle_norms(
    models: Sequence[nn.Module],
    prepare: Preprocess,
    data: DistillationDataModule,
    device: torch.device,
) -> None:
    """Gives the batch norms of random starts the statistics of labelled training pictures, :data:`OF_NORMS` at most.

    As drawn they hold mean 0 and variance 1; a training gives them its pictures' statistics in its first steps. Models
    without batch norms are left as they are.

    Args:
        models: on ``device``.
        prepare: their input.
        data: its split ``probe`` holds the labelled pictures, the training part first.
        device: of the models.
    """
    labelled = data.split("probe")
    assert isinstance(labelled, Joined)
    every = math.ceil(labelled.border / OF_NORMS)

    batches = data.eval_dataloader("probe")
    gathered = []  # uint8 (n, 3, H, W) each; of many pictures a loaded batch has few or none
    for batch in bar(batches, label="norms of random starts", unit=" batches"):
        index = batch["index"]
        chosen = (index >= 0) & (index < labelled.border) & (index % every == 0)
        gathered.append(batch["image"][chosen])
    images = torch.cat(gathered).split(data.batch_size)
    for model in models:
        # a norm of one picture's one position has no variance
        update_bn((prepare(part.to(device)) for part in images if len(part) > 1), model)
        model.eval()


# -- frozen features -------------------------------------------------------------------------------------------------
def _probed(
    run: FinishedRun,
    starts: Mapping[str, Sequence[nn.Module]],
    options: EvalOptions,
    device: torch.device,
) -> Json:
    """The accuracies of linear probes on all starts, and what the distilled one gains over each other.

    Args:
        run: the distilled one; it names the layers, the preprocessing and the training pictures.
        starts: backbones by start, as of :func:`_starts`; moved to ``device``, random ones get statistics of their norms.
        options: name the labelled pictures (``pays``) and how many seeds there are.
        device: of the computation.

    Returns:
        The part ``probe`` of the figures: ``starts`` has each start's accuracies in 0..1, one a seed; ``gains`` over
        each other start are in points, with the ends of their interval; ``how`` and ``notes`` are sentences for the page.

    Raises:
        UserError: the labelled pictures can't be read, or there is only one to judge by.
    """
    data = run.load_data()
    data.splits.probe = Probe(options.pays or "")
    try:
        data.split("probe")
    except UserError as error:
        raise UserError(str(error).replace(PROBE, "pays")) from error
    if len(data.splits.listed("probe")[1].targets) < 2:
        raise UserError(f"pays: needs two pictures or more to judge by, {options.pays} has one")

    layers = _taught_layers(run.config)
    taught = {}  # by start and seed
    for name, models in starts.items():
        for seed, model in enumerate(models):
            model.to(device).eval()
            taught[f"{name} {seed}"] = TaughtFeatures(model, layers, run.preprocess)
    _settle_norms(starts[RANDOM], run.preprocess, data, device)
    batches = bar(data.eval_dataloader("probe"), label="labelled pictures", unit=" batches")
    labelled = look_at(taught, data, batches, device)

    right_by_start: dict[str, np.ndarray] = {}  # (S, N)
    for name, models in starts.items():
        rows = []
        for seed in range(options.seeds):
            features = labelled.features[f"{name} {seed % len(models)}"]
            rows.append(_right(features, labelled, seed))
        right_by_start[name] = np.stack(rows)
    accuracies = {}
    gains = []
    for name, right_SN in right_by_start.items():
        accuracies[name] = right_SN.mean(axis=1).tolist()
        if name != DISTILLED:
            gain = gain_in_accuracy(right_by_start[DISTILLED], right_SN)
            points = {"points": gain.mean, "low": gain.low, "high": gain.high}
            shown = {key: round(100 * share, 3) for key, share in points.items()}
            gains.append({"over": name, **shown})

    judged = len(labelled.class_ids) - labelled.bank
    how = (
        f"linear probe on frozen features ({', '.join(layers)}): {options.seeds} fits, each to another half of "
        f"{labelled.bank:,} labelled pictures of {len(labelled.class_ids.unique())} classes, judged by {judged:,} others"
    )
    return {
        "folder": options.pays,
        "starts": accuracies,
        "gains": gains,
        "how": how,
        "notes": _notes(data, judged),
    }


def _right(features: Tensor, labelled: Labelled, seed: int) -> np.ndarray:
    """Whether a fit to half of the reference is right on each judging picture, bool ``(N,)``.

    Args:
        features: ``(M + N, D)``, those of the M reference pictures first.
        labelled: class ids of all, and how many are reference (``bank``).
        seed: chooses the half, the same for all starts.
    """
    bank = labelled.bank
    labels = labelled.class_ids
    half = half_of_each_class(labels[:bank], seed)
    is_right = ridge_outcomes(features[half], labels[half], features[bank:], labels[bank:])
    return is_right.cpu().numpy()


def _notes(data: DistillationDataModule, judged: int) -> list[str]:
    """What speaks against the figures: judging pictures that are among the run's training pictures; those of
    ``data.unlabeled`` are not compared. ``judged``: how many pictures judge, for the sentence.
    """
    with suppress(UserError, OSError):  # the pictures of the distillation may be gone
        distilled = files_of(data.splits.listed("train")[0])
        shared = files_of(data.splits.listed("probe")[1]) & distilled
        if shared:
            return [f"{len(shared):,} of the {judged:,} were distilled on, without their labels"]
    return []

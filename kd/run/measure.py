"""What ``kd-eval`` measures: the student of a run, or the model in a weights file, on one split of pictures."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kd.callbacks.fidelity import write
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import classes_below, identity, printable
from kd.data.transforms import CORRUPTIONS, STRENGTHS, corrupted
from kd.errors import UserError
from kd.models import Prepare, TeacherSpec, count_parameters
from kd.models.weights import about, weights_file
from kd.module import evaluation
from kd.module.evaluation import Answers, look_at
from kd.progress import bar
from kd.run.build import data_of, student_in, task_in, task_of, teacher_specs
from kd.run.request import Request
from kd.run.run import Run
from kd.ship.export.student import read_metadata
from kd.ship.finished import FinishedRun, check_classes, teacher_of
from kd.storage.objects import is_url
from kd.storage.run_urls import run_at
from kd.storage.shown import Table
from kd.storage.writing import write_text
from kd.tasks import Task
from kd.tasks.features import rank_of_gram
from kd.teachers import FrozenTeacher, RunTeacher, build_teacher

Found = tuple[
    nn.Module, Prepare, list[str], DistillationDataModule
]  # A model, its input, its classes, the data
Models = dict[str, tuple[Callable[[Tensor], Tensor], int]]


@dataclass(frozen=True)
class Options:
    """What ``kd-eval`` was given, checked."""

    split: str = "val"
    """Split of the data."""
    folder: str | None = None
    """Folder of other pictures."""
    robust: bool = False
    """Whether damaged pictures are measured too."""
    arch: str = ""
    """timm's name of the model in a bare weights file that does not hold it."""
    img_size: int | None = None
    """Side of the model's input in pixels."""
    out: Path | None = None
    """File of a table of the pictures (``.csv``), or of the figures (``.json``)."""

    @property
    def place(self) -> str:
        """Name of the pictures' loader: the split, or ``folder`` for other pictures."""
        return "folder" if self.folder else self.split

    @property
    def file(self) -> str:
        """Name of the JSON file in the run's folder; a folder's results never take the name of a split's."""
        name = Path(self.folder).resolve().name if self.folder else self.split
        return f"eval_{f'folder_{name}' if self.folder and name in ('train', 'val') else name}.json"


@dataclass
class Subject:
    """A model and the pictures that it is measured on."""

    name: str
    """As it was given."""
    run: Path | None
    """The run's folder; None for a bare weights file."""
    model: nn.Module
    """The model, in eval mode."""
    prepare: Prepare
    """Its input."""
    classes: list[str]
    """Names by class id."""
    data: DistillationDataModule
    """Holds the split."""
    task: Task
    """What the labels mean."""
    teacher: RunTeacher | None
    """The teacher whose answers are compared with the model's."""


@dataclass
class Evaluation:
    """What an evaluation has found."""

    results: list[dict[str, Any]]
    """The figures of each model."""
    files: list[Path]
    """Files that the figures were written to."""
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """On how many pictures the first model alone is right, and each other model alone."""
    notes: list[str] = field(default_factory=list)
    """What the sources of the pictures report about them, each line once."""

    @classmethod
    def written(
        cls, results: list[dict[str, Any]], runs: Sequence[Path | None], options: Options
    ) -> "Evaluation":
        """Writes the figures into each run's folder, and to ``options.out``.

        Args:
            results: of each model.
            runs: folder of each; None for a bare weights file, which has none.
            options: of the command.
        """
        text = [json.dumps(result, indent=2) + "\n" for result in results]
        files = []
        for own, run in zip(text, runs, strict=True):
            if run is not None:
                files.append(run / options.file)
                write_text(files[-1], own)
        if options.out is not None:
            files.append(options.out)
            if options.out.suffix == ".json":
                options.out.write_text(
                    text[0] if len(text) == 1 else json.dumps(results, indent=2) + "\n"
                )
        return cls(results, files)


def is_run(word: str) -> bool:
    """Whether a word of the command line names a run, and not a bare weights file or a folder of timm's."""
    path = run_at(word)
    return not (path.is_file() or (path / "config.json").is_file())


def subjects(request: Request, options: Options) -> list[Subject]:
    """The models that the words of a command line name: runs and weights files.

    Raises:
        UserError: no finished run, no weights file, no pictures to measure one on, or a recipe beside a run.
    """
    words = [str(run_at(word)) if is_url(word) else word for word in request.rest]  # fetched once
    first = next((word for word in words if is_run(word)), None)
    if first is not None and request.recipe is not None:
        raise UserError(
            f"recipe: can't be given with the run {first}, which has its own; data.key=value changes it"
        )
    return [
        _of_run(w, request, options) if is_run(w) else _of_file(w, first, request, options)
        for w in words
    ]


def _of_run(word: str, request: Request, options: Options) -> Subject:
    run = Run.open(word, request)
    data = _data(run.load_data(), options, run.classes)
    run.task.build(len(run.classes), data.source.ignore_index)
    return Subject(
        str(run.folder),
        run.folder,
        run.model,
        run.preprocess,
        run.classes,
        data,
        run.task,
        run.teacher(),
    )


def _of_file(word: str, run: str | None, request: Request, options: Options) -> Subject:
    file = weights_file(Path(word), "weights")
    given = {item.split("=", 1)[0] for item in request.overrides}
    if not (run or request.recipe or options.folder or "data.source" in given):
        raise UserError(
            f"{word}: needs pictures: folder=DIR (DIR/<class>/*.jpg), recipe=NAME, or "
            "data.source=ImageFolder data.source.root=DIR"
        )
    config, trusted = Run.settings(run_at(run) / "config.yaml" if run else None, request)
    said = read_metadata(file) if file.suffix == ".safetensors" else {}
    if not {"arch", "kwargs"} <= said.keys():
        task = (
            task_in(run_at(run) / "student.safetensors", trusted)
            if run
            else task_of(config, trusted)
        )
        model, prepare, classes, data = _foreign(word, data_of(config, trusted), options, task)
    elif said.get("classifies") == "false":
        raise UserError(
            f"{file}: nothing has trained the student's classifier (kd-predict writes its features)"
        )
    else:
        model, prepare, classes = student_in(file, trusted)
        task = task_in(file, trusted)
        data = _data(data_of(config, trusted), options, classes)
    if not (run or request.recipe) and "data.img_size" not in given:
        data.size = prepare.size  # views as large as the model's input
    task.build(len(classes), data.source.ignore_index)
    teacher = teacher_of(teacher_specs(config, trusted), classes, task) if run else None
    return Subject(word, None, model, prepare, classes, data, task, teacher)


def _foreign(word: str, all_data: DistillationDataModule, options: Options, task: Task) -> Found:
    said = about(word)
    if not (said.arch or options.arch):
        raise UserError(
            f"arch: {word} does not say which model it is; give the name of one of timm's: arch=NAME"
        )
    folder = options.folder
    own = said.classes or (classes_below(folder, "folder") if folder else [])
    data = _data(all_data, options, own if options.folder else None)
    classes = list(data.source.classes)
    spec = TeacherSpec(checkpoint=word, arch=options.arch, img_size=options.img_size)
    try:
        built = build_teacher(spec, len(classes), classes, "weights", task.dense)
    except UserError as error:
        raise UserError(str(error).removeprefix("weights.")) from error
    assert isinstance(built, FrozenTeacher)
    return built.in_the_datas_classes(), built.prepare, classes, data


def _data(
    data: DistillationDataModule, options: Options, classes: list[str] | None
) -> DistillationDataModule:
    if options.folder:
        data.splits.use_folder(options.folder, classes or [])
    data.split(options.place)
    if classes is not None:
        check_classes(data, classes)
    return data


def evaluate_models(request: Request, options: Options) -> Evaluation:
    """Measures all models of a command line on the same pictures, and writes the results.

    Raises:
        UserError: see :func:`subjects`; models with other pictures or classes; ``out`` where there is no table.
    """
    if any(_gives_features(word) for word in request.rest):
        return _evaluate_features(request, options)
    measured = subjects(request, options)
    _check_same_pictures(measured, options)
    task, csv_file = (
        measured[0].task,
        options.out if options.out is not None and options.out.suffix == ".csv" else None,
    )
    if not task.in_rows and csv_file:
        raise UserError("out: is not available for segmentation; kd-predict writes the masks")
    kept = [Answers(task, s.classes) if task.in_rows else None for s in measured]
    own_data = not any(item.startswith("data.source") for item in request.overrides)
    results = [measure(s, options, a, own_data) for s, a in zip(measured, kept, strict=True)]
    answers = [a for a in kept if a is not None]
    found = Evaluation.written(results, [subject.run for subject in measured], options)
    if csv_file:
        _write_answers(csv_file, measured, answers, options)
    found.pairs = [answers[0].only(other) for other in answers[1:]]
    for subject in measured:
        found.notes += [note for note in subject.data.source.notes if note not in found.notes]
    return found


def _check_same_pictures(measured: Sequence[Subject], options: Options) -> None:
    splits = ((subject.data.split(options.place), subject.classes) for subject in measured)
    first, *others = ((len(split.targets), identity(split), classes) for split, classes in splits)
    for subject, found in zip(measured[1:], others, strict=True):
        if found != first:
            raise UserError(
                f"{measured[0].name} and {subject.name} have other pictures or labels to validate with "
                f"({first[0]:,} and {found[0]:,}); name the same for all: folder=DIR or "
                "data.source.root=DIR"
            )


def measure(
    subject: Subject, options: Options, answers: Answers | None, own_data: bool
) -> dict[str, Any]:
    """Measures a model, and its teacher where it has one: metrics, fidelity and, where wanted, damaged pictures.

    Args:
        subject: the model and its pictures.
        options: of the command.
        answers: takes each picture's answer; None: not kept.
        own_data: the pictures are the run's own, so ``fidelity.json``, which the report shows, is written too.

    Returns:
        The content of ``eval_*.json``.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, task, classes = subject.data, subject.task, subject.classes
    task.name_metrics(classes)
    fidelity = task.fidelity(len(classes))
    readers = [each for each in (fidelity, answers) if each is not None]
    batches = data.eval_dataloader(options.place)
    found = evaluation.metrics_of_student(
        subject.model, subject.prepare, batches, task, subject.teacher, device, readers
    )
    if fidelity is not None and options.place == "val" and own_data and subject.run is not None:
        write(subject.run, fidelity, data, "val", classes)
    models = {"student": subject.model} | (
        {"teacher": subject.teacher.model} if subject.teacher else {}
    )
    return {
        "run": subject.name,
        "data": options.folder or f"{data.source.describe()} ({options.split})",
        "pictures": len(data.split(options.place).targets),
        **({"left_out": data.splits.left_out} if data.splits.left_out else {}),
        **{
            name: {"params": count_parameters(model), **found[name]}
            for name, model in models.items()
        },
        **({"fidelity": fidelity.result(classes)} if fidelity is not None else {}),
        **({"robust": _robust(subject, options, device)} if options.robust else {}),
    }


def _robust(
    subject: Subject, options: Options, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for name in CORRUPTIONS:
        for strength in STRENGTHS:
            subject.task.reset()
            batches = corrupted(subject.data.eval_dataloader(options.place), name, strength)
            task, model = subject.task, subject.model
            metrics = evaluation.metrics_of_student(
                model, subject.prepare, batches, task, subject.teacher, device
            )
            for which, values in metrics.items():
                found.setdefault(name, {}).setdefault(which, []).append(values[task.primary])
    return found


def _write_answers(
    file: Path, measured: Sequence[Subject], kept: Sequence[Answers], options: Options
) -> None:
    split, alone = measured[0].data.split(options.place), len(measured) == 1
    columns = {}
    for subject, answers in zip(measured, kept, strict=True):
        for key in [
            key for key in next(iter(answers.rows.values()), {}) if not key.startswith("label")
        ]:
            columns[key if alone else f"{subject.name} {key}"] = answers, key
    labels = [
        key for key in next(iter(kept[0].rows.values()), {"label": ""}) if key.startswith("label")
    ]
    text = io.StringIO()
    table = Table(text, "\n")
    table.add(["picture", *labels, *columns])
    for i in sorted(kept[0].rows):
        row = [answers.rows[i][key] for answers, key in columns.values()]
        table.add([printable(split.name(i)), *(kept[0].rows[i][key] for key in labels), *row])
    write_text(file, text.getvalue())


def _gives_features(word: str) -> bool:
    """Whether a word of the command line names a run whose student has no classifier, or one that nothing trained."""
    if not is_run(word):
        return False
    file = run_at(word) / "student.safetensors"
    return file.is_file() and read_metadata(file).get("classifies") == "false"


def _evaluate_features(request: Request, options: Options) -> Evaluation:
    other = next((word for word in request.rest if not _gives_features(word)), None)
    without = (
        request.rest[0]
        if other is None
        else next(word for word in request.rest if _gives_features(word))
    )
    if other is not None:
        raise UserError(
            f"{without} has no classifier and {other} has one: they can't be compared by one measure"
        )
    csv_file = options.out is not None and options.out.suffix == ".csv"
    for key, given in (("folder", options.folder), ("robust", options.robust), ("out", csv_file)):
        if given:
            raise UserError(
                f"{key}: needs a classifier, and {without} has none; data.probe.root=DIR measures features "
                "by labelled pictures"
            )
    results = [_features_of_run(word, request, options) for word in request.rest]
    return Evaluation.written(results, [Path(result["run"]) for result in results], options)


def _features_of_run(word: str, request: Request, options: Options) -> dict[str, Any]:
    opened = Run.open(word, request)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, models = opened.data, _models(opened, device)
    ranks = _ranks(models, data, options.split, device)
    found: dict[str, dict[str, float]] = {
        name: {"params": n, "rankme": ranks[name]} for name, (_, n) in models.items()
    }
    if data.probe is not None:
        batches = bar(data.eval_dataloader("probe"), label="labelled pictures", unit=" batches")
        seen = look_at({name: call for name, (call, _) in models.items()}, data, batches, device)
        for name in models:
            found[name] |= seen.accuracy(name)
    return {
        "run": str(opened.folder),
        "data": f"{data.source.describe()} ({options.split})",
        "pictures": len(data.split(options.split).targets),
        **({"probe": data.probe.root} if data.probe else {}),
        **found,
    }


def _models(opened: FinishedRun, device: torch.device) -> Models:
    student, prepare = opened.model.to(device), opened.preprocess
    models: Models = {
        "student": (lambda images: student(prepare(images)), count_parameters(student))
    }
    for name, teacher in opened.feature_teachers().items():
        teacher.to(device)
        models[f"teacher {name}".strip()] = teacher, count_parameters(teacher.model)
    return models


@torch.inference_mode()
def _ranks(
    models: Models, data: DistillationDataModule, split: str, device: torch.device
) -> dict[str, float]:
    grams: dict[str, Tensor] = {}
    for batch in bar(data.eval_dataloader(split), label="evaluating", unit=" batches"):
        images = batch["image"][batch["index"] >= 0].to(device)
        for name, (call, _) in models.items():
            x = call(images).double()
            grams[name] = grams.get(name, torch.zeros((), device=device)) + x.T @ x
    return {name: round(rank_of_gram(gram), 4) for name, gram in grams.items()}

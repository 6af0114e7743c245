"""What ``kd-eval`` measures: the student of a run, or the model in a weights file, on one split of pictures."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kd.callbacks.fidelity import write
from kd.commands._finished import check_finished, student_in, teacher_of_run
from kd.data.corruptions import CORRUPTIONS, STRENGTHS, corrupted
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import class_folders, identity, printable
from kd.data.sources.places import joined, place_of
from kd.errors import UserError
from kd.models import Prepare, TeacherSpec, count_parameters
from kd.models.weights import about, weights_file
from kd.module.evaluation import evaluate
from kd.run.parser import KDCLI, build_data, build_task
from kd.run.request import Request
from kd.ship.export.student import read_metadata
from kd.storage.checkpoints import write_whole
from kd.storage.objects import is_url
from kd.storage.run_urls import run_at
from kd.tasks import Task
from kd.teachers import FrozenTeacher, RunTeacher, build_teacher

Found = tuple[nn.Module, Prepare, list[str], DistillationDataModule]  # A model, its input, its classes, the data


@dataclass(frozen=True)
class Asked:
    """The command's own keys."""

    split: str = "val"  # of the data
    folder: str | None = None  # of other pictures
    robust: bool = False  # on damaged pictures too
    arch: str = ""  # timm's name of the model in a bare weights file that does not say
    img_size: int | None = None  # side of its input in pixels

    @property
    def place(self) -> str:
        """The split's name in the data module."""
        return "folder" if self.folder else self.split


@dataclass
class Subject:
    """A model and the pictures that it is measured on."""

    name: str  # as it was asked for
    run: Path | None  # its folder; None for a bare weights file
    model: nn.Module  # in eval mode
    prepare: Prepare  # its input
    classes: list[str]  # names by class id
    data: DistillationDataModule  # holds the split
    task: Task  # what the labels mean
    teacher: RunTeacher | None  # whose answers its own are compared with


@dataclass
class Answers:
    """What each picture is and what each model says of it."""

    task: Task  # writes answers as rows of a table
    classes: list[str]
    # by the picture's number: its target, and by model the answer and its probability
    rows: dict[int, dict[str, str]] = field(default_factory=dict)

    def update(self, student: Tensor, teacher: Tensor | None, target: Tensor, index: Tensor) -> None:
        """Adds a batch: logits ``(N, C)`` of both, ids ``(N,)`` or labels ``(N, C)``, numbers of the pictures."""
        given = {"label": target, "student": student} | ({} if teacher is None else {"teacher": teacher})
        columns = {f"{name}{ending}": column for name, answer in given.items()
                   for ending, column in self.task.rows(answer, self.classes).items()}  # fmt: skip
        for place, i in enumerate(index.tolist()):
            self.rows[i] = {key: column[place] for key, column in columns.items()}

    def right(self) -> dict[int, bool]:
        """Whether the model is right, by the picture's number."""
        return {i: row["student"] == row["label"] for i, row in self.rows.items()}


# -- what is measured --------------------------------------------------------------------------------------------------


def is_run(word: str) -> bool:
    """Whether a word of the command line names a run, and not a bare weights file or a folder of timm's."""
    path = run_at(word)
    return not (path.is_file() or (path / "config.json").is_file())


def subjects(request: Request, asked: Asked) -> list[Subject]:
    """The models that the words of a command line name.

    Raises:
        UserError: no finished run, no weights file, or no pictures to measure one on.
    """
    words = [str(run_at(word)) if is_url(word) else word for word in request.rest]  # fetched once
    first = next((word for word in words if is_run(word)), None)
    if first is not None and request.recipe is not None:
        raise UserError(f"recipe: {first} has settings of its own; data.key=value changes them")
    return [
        _of_run(run_at(word), request, asked) if is_run(word) else _of_file(word, first, request, asked)
        for word in words
    ]


def _settings(request: Request, recipe: str | None) -> dict[str, Any]:
    asking = Request(recipe, request.overlays, request.overrides, trust=request.trust, flags=request.flags)
    return KDCLI(asking.parser_args(), instantiate=False).as_dict()


def _of_run(run: Path, request: Request, asked: Asked) -> Subject:
    several = sorted(str(file.parent) for file in run.glob("students/*/student.safetensors"))
    if several and not (run / "student.safetensors").is_file():
        raise UserError(f"{run} has several students, name one: {', '.join(several)}")
    check_finished(run)
    config = _settings(request, str(run / "config.yaml"))
    model, prepare, classes = _kd_student(run / "student.safetensors", str(run), request, config)
    data = _data(config, asked, classes)
    task = _task(config, classes, data)
    return Subject(str(run), run, model, prepare, classes, data, task,
                   teacher_of_run(config["model"], classes, task))  # fmt: skip


def _kd_student(
    file: Path, name: str, request: Request, config: dict[str, Any]
) -> tuple[nn.Module, Prepare, list[str]]:
    if read_metadata(file).get("classifies") == "false":
        raise UserError(f"{name}: nothing has trained the student's classifier (kd-predict writes its features)")
    return student_in(file, request, config)


def _of_file(word: str, run: str | None, request: Request, asked: Asked) -> Subject:
    """A model without a run; beside one, on the run's pictures and compared with its teacher."""
    file = weights_file(Path(word), "weights")
    given = {item.split("=", 1)[0] for item in request.overrides}
    recipe = str(run_at(run) / "config.yaml") if run else request.recipe
    if not (recipe or asked.folder or "data.source" in given):
        raise UserError(f"{word}: on which pictures? folder=DIR (DIR/<class>/*.jpg), recipe=NAME, or "
                        "data.source=ImageFolder data.source.root=DIR")  # fmt: skip
    config = _settings(request, recipe)
    ours = file.suffix == ".safetensors" and {"arch", "kwargs"} <= read_metadata(file).keys()
    model, prepare, classes, data = _ours(file, request, config, asked) if ours else _foreign(word, config, asked)
    if not recipe and "data.img_size" not in given:
        data.size = prepare.size  # views as large as the model's input
    task = _task(config, classes, data)
    teacher = teacher_of_run(config["model"], classes, task) if run else None
    return Subject(word, None, model, prepare, classes, data, task, teacher)


def _ours(file: Path, request: Request, config: dict[str, Any], asked: Asked) -> Found:
    model, prepare, classes = _kd_student(file, str(file), request, config)
    return model, prepare, classes, _data(config, asked, classes)


def _foreign(word: str, config: dict[str, Any], asked: Asked) -> Found:
    """A weights file as it may be a teacher's, with its classes in the data's order."""
    said = about(word)
    if not (said.arch or asked.arch):
        raise UserError(f"arch: {word} does not say which model it is; give the name of one of timm's: arch=NAME")
    own = said.classes or (_classes_in(asked.folder) if asked.folder else [])
    data = _data(config, asked, own if asked.folder else None)
    classes = list(data.source.classes)
    spec = TeacherSpec(checkpoint=word, arch=asked.arch, img_size=asked.img_size)
    try:
        built = build_teacher(spec, len(classes), classes, "weights", build_task(config["model"]["task"]).dense)
    except UserError as error:
        raise UserError(str(error).removeprefix("weights.")) from error
    assert isinstance(built, FrozenTeacher)
    return built.in_the_datas_classes(), built.prepare, classes, data


def _classes_in(folder: str) -> list[str]:
    return class_folders(joined(folder), "folder", place_of(folder, "folder"))


def _data(config: dict[str, Any], asked: Asked, classes: list[str] | None) -> DistillationDataModule:
    """The pictures, whose classes must be ``classes`` where those are known."""
    data = build_data(config["data"])
    if asked.folder:
        data.use_folder(asked.folder, classes or [])
    data.split(asked.place)
    if classes is not None and list(data.source.classes) != classes:
        raise UserError(f"data.source: its {len(data.source.classes)} classes are not the student's {len(classes)}")
    return data


def _task(config: dict[str, Any], classes: list[str], data: DistillationDataModule) -> Task:
    task = build_task(config["model"]["task"])
    task.build(len(classes), data.source.ignore_index)
    return task


def check_same_pictures(measured: Sequence[Subject], asked: Asked) -> None:
    """Raises a UserError where models would be compared on different pictures or labels."""
    first, *others = (_named(subject, asked) for subject in measured)
    for subject, found in zip(measured[1:], others, strict=True):
        if found != first:
            raise UserError(f"{measured[0].name} and {subject.name} have other pictures or labels to validate with "
                            f"({first['pictures']:,} and {found['pictures']:,}); name the same for all: folder=DIR or "
                            "data.source.root=DIR")  # fmt: skip


def _named(subject: Subject, asked: Asked) -> dict[str, Any]:
    split = subject.data.split(asked.place)
    return {"pictures": len(split.targets), "content": identity(split), "classes": subject.classes}


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(subject: Subject, asked: Asked, answers: Answers | None, own_data: bool) -> dict[str, Any]:
    """Measures a model (and its teacher): metrics, fidelity, and damaged pictures where they are asked for.

    Args:
        subject: the model.
        asked: the command's keys.
        answers: keeps what is said of each picture.
        own_data: the pictures are the run's own: ``fidelity.json``, which the report shows, is written too.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, task, classes = subject.data, subject.task, subject.classes
    fidelity = task.fidelity(len(classes))
    found = evaluate(subject.model, subject.prepare, data.eval_dataloader(asked.place), task, subject.teacher, device,
                     [each for each in (fidelity, answers) if each is not None])  # fmt: skip
    if fidelity is not None and asked.place == "val" and own_data and subject.run is not None:
        write(subject.run, fidelity, data, "val", classes)
    models = {"student": subject.model} | ({"teacher": subject.teacher.model} if subject.teacher else {})
    return {
        "run": subject.name,
        "data": asked.folder or f"{data.source.describe()} ({asked.split})",
        "pictures": len(data.split(asked.place).targets),
        **({"left_out": data.left_out} if data.left_out else {}),
        **{name: {"params": count_parameters(model), **found[name]} for name, model in models.items()},
        **({"fidelity": fidelity.result(classes)} if fidelity is not None else {}),
        **({"robust": _robust(subject, asked, device)} if asked.robust else {}),
    }


def _robust(subject: Subject, asked: Asked, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """The task's main metric on damaged pictures: by damage and model, at each strength."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in CORRUPTIONS:
        for strength in STRENGTHS:
            subject.task.reset()
            batches = corrupted(subject.data.eval_dataloader(asked.place), name, strength)
            metrics = evaluate(subject.model, subject.prepare, batches, subject.task, subject.teacher, device)
            for model, values in metrics.items():
                found.setdefault(name, {}).setdefault(model, []).append(values[subject.task.primary])
    return found


# -- what each picture got ---------------------------------------------------------------------------------------------


def write_answers(file: Path, measured: Sequence[Subject], kept: Sequence[Answers], asked: Asked) -> None:
    """A line a picture: its name, its label, and each model's answer with its probability."""
    split, alone = measured[0].data.split(asked.place), len(measured) == 1
    columns = {}
    for subject, answers in zip(measured, kept, strict=True):
        first = next(iter(answers.rows.values()), {})
        for key in [key for key in first if not key.startswith("label")]:
            columns[key if alone else f"{subject.name} {key}"] = answers, key
    labels = [key for key in next(iter(kept[0].rows.values()), {"label": ""}) if key.startswith("label")]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["picture", *labels, *columns])
    for i in sorted(kept[0].rows):
        row = [answers.rows[i][key] for answers, key in columns.values()]
        table.writerow([printable(split.name(i)), *(kept[0].rows[i][key] for key in labels), *row])
    write_whole(file, lambda opened: opened.write(text.getvalue().encode()))


def only_right(first: Answers, other: Answers) -> tuple[int, int]:
    """How many pictures the first alone names right, and how many the other alone."""
    mine, theirs = first.right(), other.right()
    return (sum(mine[i] and not theirs[i] for i in mine), sum(theirs[i] and not mine[i] for i in mine))

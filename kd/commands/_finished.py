"""A finished run, as the commands that use its student need it."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kd.data.datamodule import DistillationDataModule
from kd.data.transforms import height_width
from kd.errors import UserError
from kd.models import Preprocess, TeacherSpec
from kd.run.own_keys import refuse_foreign
from kd.run.parser import KDCLI, build_data, build_task
from kd.run.quiet import quiet_libraries
from kd.run.request import Request, translate
from kd.run.trust import ALL, trusted_class
from kd.ship.export.manifest import Layout, Manifest
from kd.ship.export.prepared import Prepared
from kd.ship.export.student import builder_in, load_student, read_metadata
from kd.storage.objects import is_url
from kd.storage.run_urls import run_at
from kd.tasks import Task
from kd.teachers import RunTeacher, build_teacher, build_teachers


@dataclass
class FinishedRun:
    """A run's student and settings."""

    folder: Path  # of the run, or of one of its students
    config: dict[str, Any]  # the resolved settings
    model: nn.Module  # the student, in eval mode
    preprocess: Preprocess  # its input
    classes: list[str]  # names by class id; empty for a student without a classifier
    task: Task  # what its answers mean, built for the classes

    @property
    def kind(self) -> str:
        return self.task.answers if self.classes else "features"

    @property
    def arch(self) -> str:
        """timm's name of the architecture, or the builder's."""
        return read_metadata(self.folder / "student.safetensors")["arch"]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the views that validation shows."""
        return height_width(self.config["data"]["img_size"])

    @property
    def crop_ratio(self) -> float:
        """Share of a scaled picture that validation's crop keeps."""
        return float(self.config["data"]["crop_ratio"])

    @cached_property
    def data(self) -> DistillationDataModule:
        """The run's data.

        Raises:
            UserError: it is gone, or has other classes.
        """
        data = build_data(self.config["data"])
        data.split("val")
        known = len(data.source.classes)
        if self.classes and list(data.source.classes) != self.classes:
            raise UserError(f"data.source: its {known} classes are not the student's {len(self.classes)}")
        if self.classes:
            self.task.build(known, data.source.ignore_index)
        return data

    def prepared(self, layout: Layout) -> Prepared:
        return Prepared(self.model, self.preprocess, self.size, layout)

    def manifest(self, format_name: str, layout: Layout, int8: bool) -> Manifest:
        return Manifest(
            self.kind, self.arch, self.classes, self.size, self.crop_ratio, layout,
            list(self.preprocess.mean), list(self.preprocess.std), format_name, int8,
        )  # fmt: skip

    def calibration(self, layout: Layout, count: int) -> Iterator[np.ndarray]:
        """Training pictures of a fixed shuffle as validation would see them, one at a time, ``(1, *shape)``."""
        pictures = self.data.sample_pictures(count)
        for picture in pictures.permute(0, 2, 3, 1) if layout == "nhwc" else pictures:
            yield picture.contiguous()[None].numpy()


def open_run(request: Request, takes: tuple[str, ...] = ()) -> FinishedRun:
    """Opens the run that a command line names first.

    Args:
        request: its first word is the folder; of its overrides only ``data.*`` and ``model.teacher*`` may be left.
        takes: the command's own keys, named where another is given.

    Raises:
        UserError: no finished run, or a key that the command does not take.
    """
    folder = run_at(request.rest[0])
    check_finished(folder)
    refuse_foreign(request, takes)
    request.recipe = str(folder / "config.yaml")
    config = KDCLI(request.parser_args(), instantiate=False).as_dict()
    model, preprocess, classes = student_in(folder / "student.safetensors", request, config)
    if classes and read_metadata(folder / "student.safetensors").get("classifies") == "false":
        model.reset_classifier(0)  # type: ignore[operator]
        classes = []
    task = build_task(config["model"]["task"])
    return FinishedRun(folder, config, model, preprocess, classes, task)


def student_in(file: Path, request: Request, config: dict[str, Any]) -> tuple[nn.Module, Preprocess, list[str]]:
    """The student in a file: built by timm, by :mod:`kd.models`, or by a class that the user stands for.

    Args:
        file: its weights.
        request: the command line, with ``trust=``.
        config: the settings of its run, which were checked.

    Raises:
        UserError: see :func:`kd.load_student`.
    """
    named = (config["model"]["student"] or {}).get("builder") or {}
    trusted = [*request.trust, *([ALL] if "trust" in request.flags else []), *named.get("class_path", "").split()]
    return load_student(file, trusted_class(builder_in(file), trusted))


def teacher_of_run(model: dict[str, Any], classes: list[str], task: Task) -> RunTeacher | None:
    """The run's teacher or teachers, if their checkpoints are still there."""
    specs = _specs(model)
    gone = [s["checkpoint"] for s in specs.values() if not _is_there(s)]
    if not model["student"].get("head", True):
        return None
    if gone:
        print(f"the teacher's checkpoint {gone[0]} is gone: the student alone", file=sys.stderr)
    if gone or not specs or not all(s["head"] for s in specs.values()):
        return None
    built = {name: TeacherSpec(**{**spec, "placement": "same"}) for name, spec in specs.items()}
    return build_teachers(built.get(""), {name: s for name, s in built.items() if name}, classes, task.dense)


def feature_teachers(model: dict[str, Any]) -> dict[str, RunTeacher]:
    """The teachers of a run without labels, by name; those whose checkpoint is gone are left out."""
    found: dict[str, RunTeacher] = {}
    for name, spec in _specs(model).items():
        if not spec["pretrained"] and not _is_there(spec):
            print(f"the teacher's checkpoint {spec['checkpoint']} is gone: {name or 'it'} is left out", file=sys.stderr)
            continue
        own = TeacherSpec(**{**spec, "placement": "same", "head": False})
        found[name] = build_teacher(own, 0, [], f"model.teachers.{name}" if name else "model.teacher")
    return found


def _is_there(spec: dict[str, Any]) -> bool:
    """Whether a teacher has a checkpoint; that a URL leads to one shows when it is fetched."""
    place = spec["checkpoint"]
    return bool(place) and (is_url(str(place)) or Path(place).exists())


def _specs(model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"": model["teacher"]} if model["teacher"] else model["teachers"] or {}


def check_finished(folder: Path) -> None:
    """Raises a UserError unless a run has left its student and settings in ``folder``."""
    for name in ("config.yaml", "student.safetensors"):
        if (folder / name).is_file():
            continue
        several = sorted(path.parent.name for path in folder.glob("students/*/student.safetensors"))
        if several:
            raise UserError(f"{folder} holds several students: name one, {folder}/students/{several[0]}")
        raise UserError(f"{folder} is no finished run: it has no {name}")


def choose_device(name: str | None) -> torch.device:
    """The device asked for, else the GPU where there is one.

    Raises:
        UserError: there is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device: '{name}' can't be used: {str(error).splitlines()[0]}") from error
    return device


@dataclass(frozen=True)
class TorchModel:
    """Opens a run's student or teacher in torch, in the process that times it."""

    items: list[str]  # the run's folder and settings, as on the command line
    model: str  # ``student`` or ``teacher``
    threads: int  # of torch

    def __call__(self) -> Callable[[np.ndarray], object]:
        """Takes uint8 pictures ``(N, H, W, 3)``."""
        torch.set_num_threads(self.threads)
        quiet_libraries()
        opened = open_run(translate(self.items))
        teacher = teacher_of_run(opened.config["model"], opened.classes, opened.task)
        student = opened.prepared("nhwc")

        def run(pictures: np.ndarray) -> object:
            images = torch.from_numpy(pictures)
            with torch.inference_mode():
                if self.model == "student" or teacher is None:
                    return student(images)
                return teacher(images.permute(0, 3, 1, 2).contiguous())

        return run

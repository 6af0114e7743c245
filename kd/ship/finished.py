"""A finished run as those need it who ship its student: no training configuration, no trainer."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.models import Preprocess, TeacherSpec, height_width
from kd.models.hub import check_downloadable
from kd.progress import bar
from kd.ship.export.base import Runtime, in_torch
from kd.ship.export.manifest import ExportManifest
from kd.ship.export.prepared import Prepared
from kd.storage.objects import is_url
from kd.storage.student_metadata import student_metadata_in
from kd.tasks import Task
from kd.teachers import RunTeacher, StoredAnswers, Teacher, build_teacher, build_teachers

Specs = Mapping[str, TeacherSpec]
"""Settings of teachers by name; a single teacher's name is empty."""


@dataclass
class FinishedRun:
    """A run's student and settings (:func:`kd.run.open.open_run`)."""

    folder: Path
    """Folder of the run."""
    config: dict[str, Any]
    """The resolved settings."""
    model: nn.Module
    """The student, in eval mode."""
    preprocess: Preprocess
    """The student's input."""
    classes: list[str]
    """Names by class id; empty for a student without a classifier."""
    task: Task
    """What its answers mean; reading :attr:`data` builds it for the classes."""
    load_teachers: Callable[[], Specs]
    """Gives the settings of the teachers."""
    load_data: Callable[[], DistillationDataModule]
    """Gives the run's data, unchecked."""

    @cached_property
    def teachers(self) -> Specs:
        """The settings of its teachers; only a command that measures them builds these."""
        return self.load_teachers()

    @property
    def kind(self) -> str:
        """What the student answers: ``classification``, ``multilabel``, ``segmentation``, ``numbers`` or
        ``features``.
        """
        if self.classes:
            return self.task.answers
        return "features"

    @property
    def arch(self) -> str:
        """timm's name of the architecture, or the builder's."""
        return student_metadata_in(self.folder / "student.safetensors").arch

    @property
    def facts(self) -> dict[str, list[float | None]]:
        """Numbers that belong to classes, by name (:mod:`kd.data.class_facts`)."""
        return student_metadata_in(self.folder / "student.safetensors").facts

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the views that validation shows."""
        return height_width(self.config["data"]["img_size"])

    @property
    def crop_ratio(self) -> float:
        """Share of a scaled picture that validation's crop keeps, in 0..1."""
        return float(self.config["data"]["crop_ratio"])

    @cached_property
    def data(self) -> DistillationDataModule:
        """The run's data, with the validation split loaded; :attr:`task` is built for its classes where the student has
        some.

        Raises:
            UserError: the pictures are gone, or have other classes than the student.
        """
        data = self.load_data()
        data.split("val")
        if self.classes:
            check_classes(data, self.classes)
            self.task.build(len(self.classes), data.source.ignore_index)
        return data

    @cached_property
    def has_teacher(self) -> bool:
        """Whether all teachers can be measured (:func:`measurable`), and the student has a classifier, too.

        Weights or stored answers that are missing are named on stderr, once.
        """
        return bool(self.classes) and measurable(self.teachers)

    def teacher(self) -> RunTeacher | None:
        """The run's teacher or teachers, built on the CPU, all for one device (:func:`teacher_of`); None without one, or
        where one of them can't be measured (:attr:`has_teacher`).

        Raises:
            UserError: it can't be built.
        """
        if self.has_teacher:
            return teacher_of(self.teachers, self.classes, self.task)
        return None

    def feature_teachers(self) -> dict[str, RunTeacher]:
        """The teachers of a run without labels, by name, without classifiers; a single teacher's name is "".

        A teacher whose weights are missing is left out with a line on stderr. Stored answers and teachers of the user's own
        class have no features: they are left out without a line.

        Raises:
            UserError: one can't be built.
        """
        teachers: dict[str, RunTeacher] = {}
        for name, spec in self.teachers.items():
            if isinstance(spec.builder, Teacher):  # a class that answers has no features
                continue
            why = _why_missing(name, spec)
            if why:
                print(f"{why}: {name or 'it'} is left out", file=sys.stderr)
                continue
            headless = replace(spec, placement="same", head=False)
            teachers[name] = build_teacher(headless, 0, [], _key_of(name))
        return teachers

    def prepared(self) -> Prepared:
        """The student with its preprocessing: uint8 pictures -> answers."""
        return Prepared(self.model, self.preprocess, self.size)

    def manifest(self, format_name: str, int8: bool) -> ExportManifest:
        """What an export says of itself.

        Args:
            format_name: of the export.
            int8: whether it is quantised.
        """
        return ExportManifest(
            task=self.kind,
            arch=self.arch,
            classes=self.classes,
            size=self.size,
            crop_ratio=self.crop_ratio,
            mean=list(self.preprocess.mean),
            std=list(self.preprocess.std),
            format=format_name,
            int8=int8,
            facts=self.facts,
        )

    def calibration(self, count: int) -> Iterator[np.ndarray]:
        """At most ``count`` training pictures of a fixed shuffle as validation would see them, one at a time, uint8
        ``(1, H, W, 3)``.
        """
        pictures = self.data.sample_pictures(count, "pictures for the calibration")
        pictures = pictures.permute(0, 2, 3, 1)
        for picture in bar(pictures, label="calibrating"):
            yield picture.contiguous()[None].numpy()

    def student_runtime(self) -> Runtime:
        """Runs the student in torch on pictures ``(N, H, W, 3)``."""
        return in_torch(self.prepared())

    @cached_property
    def teacher_takes_pictures(self) -> bool:
        """Whether the teachers answer for any picture: all can be measured (:attr:`has_teacher`), and none is stored
        answers, which exist for their own pictures alone. The first folder of stored answers is named on stderr, once.
        """
        if not self.has_teacher:
            return False
        for spec in self.teachers.values():
            if isinstance(spec.builder, StoredAnswers):
                folder = spec.builder.folder
                print(f"{folder} holds the answers to its own pictures alone", file=sys.stderr)
                return False
        return True

    def teacher_runtime(self) -> Runtime | None:
        """The teacher in torch: uint8 pictures of the run's size -> logits in the data's classes.

        None without a teacher that takes any picture (:attr:`teacher_takes_pictures`).

        Raises:
            UserError: it can't be built.
        """
        teacher = self.teacher() if self.teacher_takes_pictures else None
        if teacher is None:
            return None
        return in_torch(teacher, channels_first=True)


def check_classes(data: DistillationDataModule, classes: list[str]) -> None:
    """Checks that data has the student's classes, in order.

    Raises:
        UserError: it has others.
    """
    if list(data.source.classes) != classes:
        raise UserError(
            f"data.source: its {len(data.source.classes)} classes are not the student's {len(classes)}"
        )


def measurable(specs: Specs) -> bool:
    """Whether all teachers can be measured: they have classifiers, and their checkpoints are still there.

    False, too, without a teacher. A missing checkpoint is named on stderr.

    Args:
        specs: settings of teachers by name.
    """
    for name, spec in specs.items():
        why = _why_missing(name, spec)
        if why:
            print(f"{why}: only the student is measured", file=sys.stderr)
            return False
    return bool(specs) and all(spec.head for spec in specs.values())


def teacher_of(specs: Specs, classes: list[str], task: Task) -> RunTeacher | None:
    """The teacher, or ensemble, that a run was trained with, on the CPU; None without one.

    Args:
        specs: settings of teachers by name; their own devices (``placement``) are left aside, so that
            :meth:`RunTeacher.to` moves all to the device that it names.
        classes: of the data, in which the teacher answers.
        task: of the run, which its answers must fit.

    Raises:
        UserError: it can't be built.
    """
    on_one_device = {}
    for name, spec in specs.items():
        on_one_device[name] = replace(spec, placement="same")
    single = on_one_device.pop("", None)
    teacher = build_teachers(single, on_one_device, classes, task.dense)
    if teacher is not None:
        teacher.expect(task)
    return teacher


def _why_missing(name: str, spec: TeacherSpec) -> str:
    """Why a teacher's weights, or its stored answers, can't be had; "" where they can.

    A URL passes: whether it leads to a file shows when it is fetched. So does a teacher without a checkpoint that the
    user's class builds. Pre-trained weights must be on this disk, or the hub within reach.

    Args:
        name: of one of several teachers; "" of a single one.
        spec: its settings.
    """
    what, place = "checkpoint", spec.checkpoint
    if isinstance(spec.builder, StoredAnswers):
        what, place = "answers", spec.builder.folder
    if place:
        is_there = is_url(str(place)) or Path(str(place)).exists()
        return "" if is_there else f"the teacher's {what} {place} not found"
    if spec.builder is not None:
        return ""
    if not spec.pretrained:
        return "the teacher has no checkpoint"
    try:
        check_downloadable(spec.arch, f"{_key_of(name)}.checkpoint")
    except UserError as error:
        return str(error)
    return ""


def _key_of(name: str) -> str:
    """The settings of a teacher by its name: ``model.teacher`` for a single one."""
    return f"model.teachers.{name}" if name else "model.teacher"

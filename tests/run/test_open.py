"""open_run: a run folder's config.yaml and its student's file are enough."""

import shutil
from functools import wraps
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning

from kd.cli import main
from kd.data.datamodule import DistillationDataModule as DataModule
from kd.data.sources import ImageFolder, SegmentationFolder
from kd.models import TeacherSpec
from kd.run.build import data_of, task_of, teacher_specs
from kd.run.open import open_run
from kd.run.request import Request
from kd.run.trust import Trust
from kd.ship.finished import FinishedRun
from tests._files import write_yaml
from tests._helpers import CLASSES, draw_folder

DATA = {
    "source": {"class_path": "kd.data.sources.ImageFolder", "init_args": {"root": "pictures", "val": None}},
    "img_size": [24, 32], "batch_size": 8, "num_workers": 0, "augment": None, "val_fraction": 0.5,
}  # fmt: skip
TEACHER = {
    "arch": "vit_tiny_patch16_224",
    "img_size": 32,
    "checkpoint": "t.safetensors",
    "cache": False,
}
MODEL = {
    "student": {"arch": "vit_tiny_patch16_224"},
    "teacher": TEACHER,
    "teachers": None,
    "task": None,
}


@pytest.fixture()
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever builds a trainer fails."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the training configuration was built")

    monkeypatch.setattr(pytorch_lightning.Trainer, "__init__", refuse)


@pytest.mark.usefixtures("no_training")
def test_what_uses_a_student_builds_no_training(finished: Path, tmp_path: Path) -> None:
    run = str(finished)
    assert main("export", [run, "to=hub", f"out={tmp_path / 'hub'}"]) == 0
    file = tmp_path / "found.jsonl"
    assert main("predict", [run, str(finished.parents[2] / "data" / "val"), f"out={file}"]) == 0
    assert len(file.read_text().splitlines()) == 4 * len(CLASSES)
    assert main("card", [run, f"out={tmp_path / 'card.md'}"]) == 0
    assert main("eval", [run, "data.batch_size=4"]) == 0
    opened = open_run(run)
    assert isinstance(opened, FinishedRun)
    pictures = np.zeros((2, 40, 40, 3), np.uint8)
    teacher = opened.teacher_runtime()  # of kd-serve and kd-latency
    assert teacher is not None and teacher(pictures).shape == (2, len(CLASSES))
    assert opened.student_runtime()(pictures).shape == (2, len(CLASSES))


def test_opening_builds_no_data_module(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataModule, "__init__", wraps(DataModule.__init__)(lambda self, **_: 1 / 0))
    assert open_run(str(finished)).size == (40, 40)
    with pytest.raises(Exception, match="division"):
        _ = open_run(str(finished)).data


@pytest.fixture()
def config(tmp_path: Path) -> Path:
    """A run's settings, as one's own."""
    file = tmp_path / "config.yaml"
    write_yaml(file, {"recipe": "r", "seed": 3, "data": DATA, "model": MODEL})
    return file


def over(file: Path, *items: str) -> dict:
    request = Request(recipe=str(file), overrides=list(items), flags={"trust"})
    return request.resolved()


def test_data_are_those_of_the_run(config: Path) -> None:
    data = data_of(over(config), Trust())
    assert (
        data.size == (24, 32)
        and isinstance(data.source, ImageFolder)
        and data.source.root == "pictures"
    )
    assert (
        data.seed == data.splits.given.seed == 3
    )  # which pictures are held out for validation depends on it


def test_a_command_line_replaces_values(config: Path) -> None:
    data = data_of(
        over(config, "data.source.root=007", "data.batch_size=2", "data.augment.mixup=1"), Trust()
    )
    assert (data.source.root, data.batch_size, data.augment.mixup) == ("007", 2, 1.0)  # type: ignore[attr-defined]
    data = data_of(
        over(config, "data.source=SegmentationFolder", "data.source.class_names=[a, b]"), Trust()
    )
    assert isinstance(data.source, SegmentationFolder) and data.source.root == "pictures"


def test_teachers_and_task(config: Path) -> None:
    (spec,) = teacher_specs(over(config, "model.teacher.img_size=[24,32]"), Trust()).values()
    assert isinstance(spec, TeacherSpec) and spec.img_size == (24, 32) and spec.cache == "off"
    assert teacher_specs(over(config, "model.teacher=null"), Trust()) == {}
    several = over(
        config, "model.teacher=null", "model.teachers.a.arch=resnet18", "model.teachers.b.weight=2"
    )
    assert {name: spec.weight for name, spec in teacher_specs(several, Trust()).items()} == {
        "a": 1.0,
        "b": 2.0,
    }
    assert type(task_of(over(config), Trust())).__name__ == "Classification"


def test_another_split_is_held_out_by_another_seed(tmp_path: Path, config: Path) -> None:
    shutil.rmtree(draw_folder(tmp_path / "pictures", train=6, val=1) / "val")
    held = []
    for seed in (3, 4):
        settings = over(config, f"data.source.root={tmp_path / 'pictures'}") | {"seed": seed}
        split = data_of(settings, Trust()).split("val")
        held.append([split.name(i) for i in range(len(split.targets))])
    assert held[0] != held[1]

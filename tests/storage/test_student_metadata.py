"""What a student's file says of its model is of the right type wherever it is read, or names what is wrong."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kd.errors import UserError
from kd.models.weights import read_weights
from kd.run.build import student_in, task_in
from kd.run.trust import Trust
from kd.ship.export.formats.hub import made_by_timm
from kd.ship.export.student import builder_in, load_student, untrained_student
from kd.ship.predict_words import answers_of
from kd.storage.student_metadata import StudentMetadata, student_metadata_in
from kd.storage.weights_files import read_metadata
from tests._helpers import ROOT, refuses

VALUES: tuple[Any, ...] = (
    None, True, 5, -1, 1.5, 10**15, "word", "a\x1b[2J\n", [], ["a"], [1, 2, 3], [[1]], [{"class_path": "os.system"}],
    {}, {"a": 1}, {"class_path": 5, "init_args": {}}, {"class_path": "os.system", "init_args": 5}, {"num_classes": "4"},
)  # fmt: skip


def by_timm(file: Path) -> StudentMetadata:
    return made_by_timm(file, "to=hub")


READERS: tuple[Callable[[Path], object], ...] = (
    student_metadata_in,
    answers_of,
    builder_in,
    by_timm,
    load_student,
    lambda file: untrained_student(file, 0),
    lambda file: student_in(Trust().of(file)),
    lambda file: task_in(Trust().of(file)),
    lambda file: read_weights(file, "weights"),
)


def damaged(student: Path, copy: Path, name: str, value: Any) -> Path:
    """A copy of a student's file in which the metadata has another value of one name."""
    text = value if name == "arch" and isinstance(value, str) else json.dumps(value)
    save_file(load_file(student), copy, {**read_metadata(student), name: text})
    return copy


NAMES = [field.alias or name for name, field in StudentMetadata.model_fields.items()]


@pytest.mark.parametrize("name", NAMES)
def test_every_reader_takes_every_value(finished: Path, tmp_path: Path, name: str) -> None:
    refused = set()
    for number, value in enumerate(VALUES):
        copy = tmp_path / f"{number}.safetensors"
        file = damaged(finished / "student.safetensors", copy, name, value)
        for reader in READERS:
            try:
                reader(file)
            except UserError as error:
                refused.add((reader, number))
                assert str(file) in str(error) or "to=hub" in str(error)
                assert "\n" not in str(error)
    assert refused
    assert name != "builder" or (by_timm, VALUES.index({})) in refused


def test_a_file_of_another_package_is_none_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, file, {"format": "pt"})
    with refuses("says nothing of its model"):
        student_metadata_in(file)


def test_metadata_is_read_in_one_place() -> None:
    """What a file says is text of a stranger's: whoever else reads it would have to check it again."""
    callers = set()
    for file in (ROOT / "kd").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if called and node.func.id == "read_metadata":  # type: ignore[attr-defined]
                callers.add(str(file.relative_to(ROOT)))
    assert (
        callers
        == {
            "kd/storage/student_metadata.py",
            "kd/ship/export/formats/backbone.py",  # the export's own part of it, which from_metadata checks
            "kd/run/measure.py",  # whether it is ours at all
        }
    )


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    file = tmp_path / "student.safetensors"
    file.write_bytes(b"not the format of safetensors")
    for reader in (student_metadata_in, answers_of, builder_in):
        with refuses("student.safetensors is not a readable safetensors file: "):
            reader(file)


@pytest.mark.parametrize("value", [[64], [], [64, 64, 64], 0, [64, 0], True])
def test_a_size_is_a_side_or_height_and_width(
    value: object, finished: Path, tmp_path: Path
) -> None:
    for size in (64, [64, 48]):
        file = damaged(
            finished / "student.safetensors", tmp_path / "x.safetensors", "img_size", size
        )
        assert student_metadata_in(file).img_size == size
    damaged(finished / "student.safetensors", file, "img_size", value)
    with refuses("its metadata is damaged: img_size$"):
        student_metadata_in(file)

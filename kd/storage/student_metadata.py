"""What the metadata of a ``student.safetensors`` says of its model, checked: a file of strangers is data of no known shape.

Torch is not imported.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.storage.elsewhere import LARGEST_STUDENT, json_of, open_regular
from kd.storage.weights_files import read_metadata

Made = dict[str, Any]
"""``class_path`` and ``init_args`` of an object."""


@dataclass(frozen=True)
class StudentMetadata:
    """The metadata of a student's file; every field has the type it is declared with.

    ``kd.ship.export.student.student_metadata`` writes them.
    """

    arch: str
    """timm's name of the architecture, or the builder's."""
    kwargs: dict[str, Any]
    """Arguments of ``timm.create_model``, with ``num_classes``."""
    classes: list[str] = field(default_factory=list)
    """Names by class id; in regression, of the numbers that it answers. Empty without a classifier."""
    img_size: int | list[int] | None = None
    """Side, or height and width, of the input in pixels; None where kd does not prepare the pictures."""
    mean: list[float] = field(default_factory=list)
    """Of each channel, for values in 0..1; empty where kd does not prepare the pictures."""
    std: list[float] = field(default_factory=list)
    """Likewise."""
    task: Made | None = None
    """What its answers mean; None: classes."""
    builder: Made | None = None
    """Of a model that timm has not built."""
    facts: dict[str, list[float | None]] = field(default_factory=dict)
    """By name, a number for each class (:mod:`kd.data.class_facts`)."""
    has_own_form: bool = False
    """``dense`` in the file: a segmenter above a timm backbone; in a backbone's file, one that ends before timm's."""
    has_trained_classifier: bool = True
    """``classifies`` in the file: whether anything has trained the classifier."""

    @property
    def num_classes(self) -> int:
        """Values that the model answers with; 0 for one without a classifier."""
        return int(self.kwargs["num_classes"])

    @property
    def gives_features(self) -> bool:
        """Whether what the model is for are its features: it has no classifier, or one that nothing has trained."""
        return not self.classes or not self.has_trained_classifier


def weights_digest(run: Path) -> str:
    """Twelve hexadecimal digits that tell a run's student from any other: of its ``student.safetensors``' SHA-256.

    Args:
        run: the run's folder.
    """
    file = run / "student.safetensors"
    status = file.stat()
    return _digest(file, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _digest(file: Path, *_state: int) -> str:
    """:func:`weights_digest` of a file in the state that its inode, its time and its size tell: read once."""
    with open_regular(file, LARGEST_STUDENT) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:12]


def is_student(metadata: Mapping[str, str]) -> bool:
    """Whether kd has written a file with this metadata: other packages' files say less."""
    return {"arch", "kwargs"} <= metadata.keys()


def student_metadata_in(file: Path) -> StudentMetadata:
    """Reads the metadata of ``student.safetensors``, not its weights.

    Raises:
        UserError: the file is no safetensors, kd has not written it, or values in it are of a wrong type; names them.
    """
    metadata = read_metadata(file)
    if not is_student(metadata):
        raise UserError(f"{file}: says nothing of its model, as a student.safetensors of kd's does")
    fields = {}
    for name, value in checked_values(metadata, file).items():
        fields[FIELDS.get(name, name)] = value
    return StudentMetadata(**fields)


def checked_values(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    """What a file's metadata says that :data:`CHECKS` knows.

    Args:
        metadata: text by name; every value is JSON but for ``arch``.
        file: for the message.

    Returns:
        The values by their names in the file; without those that the file lacks.

    Raises:
        UserError: values of a wrong type; names them.
    """
    values: dict[str, Any] = {}
    wrong = []
    for name, is_right in CHECKS.items():
        if name not in metadata:
            continue
        try:
            values[name] = metadata[name] if name == "arch" else json_of(metadata[name])
        except ValueError:
            wrong.append(name)
            continue
        if not is_right(values[name]):
            wrong.append(name)
    if wrong:
        raise UserError(f"{file}: its metadata is damaged: {', '.join(wrong)}")
    return values


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def are_words(value: object) -> bool:
    """Whether a value of a file is a list of texts."""
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _are_arguments(value: object) -> bool:
    """Of a model: a class count with other names of any plain value."""
    if not isinstance(value, dict):
        return False
    return _is_whole(value.get("num_classes"))


def _is_size(value: object) -> bool:
    """A side in pixels, or a list of height and width; null is refused: a file that says no size leaves ``img_size`` out."""
    sides = [value]
    if isinstance(value, list):
        sides = value
        if len(sides) != 2:
            return False
    return all(isinstance(side, int) and side is not True and side > 0 for side in sides)


def _are_channels(value: object) -> bool:
    return isinstance(value, list) and all(_is_number(number) for number in value)


def _is_made(value: object) -> bool:
    """Nothing, a class with its arguments, or {}, for a class whose arguments no file can hold."""
    if value is None or value == {}:
        return True
    if not isinstance(value, dict) or not _is_printable(value.get("class_path")):
        return False
    return isinstance(value.get("init_args"), dict)


def are_facts(value: object) -> bool:
    """Whether a value of a file is, by name, lists of numbers or null."""
    if not isinstance(value, dict):
        return False
    for numbers in value.values():
        if not isinstance(numbers, list):
            return False
        if not all(number is None or _is_number(number) for number in numbers):
            return False
    return True


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


CHECKS = {
    "arch": _is_printable,
    "kwargs": _are_arguments,
    "classes": are_words,
    "img_size": _is_size,
    "mean": _are_channels,
    "std": _are_channels,
    "task": _is_made,
    "builder": _is_made,
    "facts": are_facts,
    "dense": _is_truth,
    "classifies": _is_truth,
}
"""By name in the file, whether a value may be its."""
FIELDS = {"dense": "has_own_form", "classifies": "has_trained_classifier"}
"""Fields of :class:`StudentMetadata` that have other names in the file."""

"""What the metadata of a ``student.safetensors`` says of its model, checked: a file of strangers is data of no known shape.

Torch is not imported.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    with_config,
)
from typing_extensions import TypedDict

from kd.errors import UserError
from kd.storage.elsewhere import LARGEST_STUDENT, json_of, open_regular
from kd.storage.weights_files import read_metadata

Name = Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]
"""Text without control characters and ends of lines."""


class MadeObject(TypedDict):
    """A class with its arguments."""

    class_path: Name
    init_args: dict[str, Any]


@with_config(strict=True, extra="allow")
class ModelArguments(TypedDict):
    """Arguments of ``timm.create_model``."""

    num_classes: int


_ARGUMENTS = TypeAdapter(ModelArguments)
Unknown = Annotated[dict[str, Any], Field(max_length=0)]
"""{}, for a class whose arguments no file can hold."""
Side = Annotated[int, Field(gt=0)]
"""Pixels."""
Facts = dict[str, list[float | None]]
"""By name, a number for each class (:mod:`kd.data.class_facts`)."""


class StudentMetadata(BaseModel):
    """The metadata of a student's file, each value of its type; another file of weights may have some of them.

    ``kd.ship.export.student.student_metadata`` writes them.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    arch: Name = ""
    """timm's name of the architecture, or the builder's."""
    kwargs: Annotated[dict[str, Any], AfterValidator(_ARGUMENTS.validate_python)] = {}
    """Arguments of ``timm.create_model``, with ``num_classes``."""
    classes: list[str] = []
    """Names by class id; in regression, of the numbers that it answers. Empty without a classifier."""
    img_size: Side | Annotated[list[Side], Field(min_length=2, max_length=2)] | None = None
    """Side, or height and width, of the input in pixels; None where kd does not prepare the pictures."""
    mean: list[float] = []
    """Of each channel, for values in 0..1; empty where kd does not prepare the pictures."""
    std: list[float] = []
    """Likewise."""
    task: MadeObject | Unknown | None = None
    """What its answers mean; None: classes."""
    builder: MadeObject | Unknown | None = None
    """Of a model that timm has not built."""
    facts: Facts = {}
    has_own_form: bool = Field(False, alias="dense")
    """A segmenter above a timm backbone; in a backbone's file, one that ends before timm's."""
    has_trained_classifier: bool = Field(True, alias="classifies")
    """Whether anything has trained the classifier."""

    @field_validator("*", mode="before")
    @classmethod
    def _of_json(cls, text: str, info: ValidationInfo) -> object:
        """A value from its text; a ValueError for what is no JSON."""
        return text if info.field_name == "arch" else json_of(text)

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
    try:
        return checked(metadata)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def checked(metadata: Mapping[str, str]) -> StudentMetadata:
    """What a file's metadata says of its model.

    Args:
        metadata: text by name; every value is JSON but for ``arch``. What the file lacks has its default.

    Raises:
        UserError: values of a wrong type; names them.
    """
    try:
        return StudentMetadata.model_validate(metadata)
    except ValidationError as error:
        wrong = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors())
        raise UserError(f"its metadata is damaged: {', '.join(wrong)}") from error

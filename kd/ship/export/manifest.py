"""What a program must know to use an exported student; written into every export."""

import json
from collections.abc import Iterable
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from kd.config.kinds import problem_in
from kd.errors import UserError
from kd.storage.elsewhere import json_of
from kd.storage.student_metadata import Facts, Name
from kd.storage.writing import write_json

FILE = "manifest.json"
PREFIX = "kd."  # of the keys in a model file's own metadata

MOST = 8192  # pixels a side

Side = Annotated[int, Field(gt=0, le=MOST)]
TASKS = ("classification", "multilabel", "segmentation", "features", "numbers")
Task = Annotated[str, Field(pattern=f"^({'|'.join(TASKS)})$")]


def as_lines(names: Iterable[str]) -> str:
    """Class names, one a line whatever they hold: the line is the class id."""
    return "".join(f"{' '.join(name.split())}\n" for name in names)


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class ExportManifest:
    """Input and answer of an export: a centre crop as uint8 RGB goes in; scaling and normalisation are in the graph.

    A ValueError names the fields where a file holds what no export says of itself.
    """

    task: Task
    """What the answer is: logits of one class a picture, of several labels, of a class for every pixel; features; or
    numbers, each under the name of a class."""
    arch: Name
    """timm's name of the architecture, or the builder's."""
    classes: list[str]
    """Names by class id (of ``numbers``: of each number); empty for features."""
    size: tuple[Side, Side]
    """Height and width of the input in pixels."""
    crop_ratio: Annotated[float, Field(gt=1e-6, le=1)]
    """Share of the scaled picture's side that the centre crop keeps, in (0, 1]."""
    mean: list[float]
    """Of each channel, for values in 0..1, as the graph applies it."""
    std: list[float]
    """Likewise."""
    format: str
    """The export's format as ``to=`` names it; ``torch`` where nothing is exported."""
    int8: bool = False
    """Whether weights and activations are quantised."""
    fp16: bool = False
    """Whether weights and activations are FP16, but for layers that need float32; the answer is float32."""
    facts: Facts = field(default_factory=dict)
    """By name, a number for each class."""
    layout: Literal["nhwc"] = "nhwc"
    """Of the pictures: (N, H, W, 3)."""
    interpolation: Literal["bilinear"] = "bilinear"
    """How a client must scale a picture."""
    antialias: Literal[True] = True
    """Whether that filters where it shrinks the picture, as Pillow does and OpenCV's default does not."""

    def __post_init__(self) -> None:
        """Raises a ValueError where the classes do not fit the task or the facts."""
        if not self.classes and self.task != "features":
            raise ValueError(f"classes: {self.task} needs their names")
        for values in self.facts.values():
            if len(values) != len(self.classes):
                raise ValueError("facts: must be a number for each class")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one picture, uint8: height, width and 3."""
        return (*self.size, 3)

    def as_metadata(self) -> dict[str, str]:
        """For a model file's own metadata: each field as JSON, by its name after :data:`PREFIX`."""
        return {f"{PREFIX}{key}": json.dumps(value) for key, value in asdict(self).items()}

    def write(self, folder: Path) -> None:
        """Writes ``manifest.json`` into ``folder``."""
        write_json(folder / FILE, asdict(self))


def from_metadata(metadata: dict[str, str], file: Path) -> ExportManifest:
    """The manifest in a model file's own metadata.

    Args:
        metadata: strings by key, as :meth:`ExportManifest.as_metadata` has written them.
        file: named in the message.

    Raises:
        UserError: kd-export has not written the file.
    """
    content = {}
    try:
        for key, value in metadata.items():
            if key.startswith(PREFIX):
                content[key.removeprefix(PREFIX)] = json_of(value)
        return manifest_of(content)
    except (ValueError, TypeError, KeyError) as error:
        lacks = f"its metadata does not say what goes in ({error})"
        raise UserError(f"{file} was not written by kd-export: {lacks}") from error


def manifest_of(content: dict[str, Any]) -> ExportManifest:
    """The manifest whose fields have these values, as JSON gives them.

    Raises:
        ValueError, TypeError, KeyError: a field is missing, unknown, or has a wrong value.
    """
    height, width = content["size"]
    try:
        return ExportManifest(**{**content, "size": (int(height), int(width))})
    except ValidationError as error:
        key, problem = problem_in(error)
        wrong = key.partition(".")[0] or problem.partition(":")[0]
        raise ValueError(f"{wrong}: not what an export says of itself") from error

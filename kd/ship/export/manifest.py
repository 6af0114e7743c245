"""What a program must know to use an exported student; written into every export."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from kd.errors import UserError
from kd.storage.elsewhere import json_of, text_of
from kd.storage.student_metadata import are_facts, are_words
from kd.storage.writing import write_json

FILE = "manifest.json"
PREFIX = "kd."  # of the keys in a model file's own metadata

MOST = 8192  # pixels a side

TASKS = ("classification", "multilabel", "segmentation", "features", "numbers")
Layout = Literal["nhwc", "nchw"]


def as_lines(names: Iterable[str]) -> str:
    """Class names, one a line whatever they hold: the line is the class id."""
    return "".join(f"{' '.join(name.split())}\n" for name in names)


@dataclass(frozen=True)
class ExportManifest:
    """Input and answer of an export: a centre crop as uint8 RGB goes in; scaling and normalisation are in the graph."""

    task: str
    """What the answer is: logits of one class a picture, of several labels, of a class for every pixel; features; or
    numbers, each under the name of a class."""
    arch: str
    """timm's name of the architecture, or the builder's."""
    classes: list[str]
    """Names by class id (of ``numbers``: of each number); empty for features."""
    size: tuple[int, int]
    """Height and width of the input in pixels."""
    crop_ratio: float
    """Share of the scaled picture's side that the centre crop keeps, in (0, 1]."""
    layout: Layout
    """``nhwc`` (N, H, W, 3) or ``nchw`` (N, 3, H, W)."""
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
    facts: dict[str, list[float | None]] = field(default_factory=dict)
    """By name, a number for each class."""

    def __post_init__(self) -> None:
        """Raises ValueError, which names the fields, where a file holds what no export says of itself."""
        wrong = []
        if self.task not in TASKS:
            wrong.append("task")
        if self.layout not in get_args(Layout):
            wrong.append("layout")
        named = are_words([self.arch]) and self.arch.isprintable()
        if not named or not are_words(self.classes):
            wrong.append("arch and classes")
        if not self.classes and self.task != "features":
            wrong.append("classes")
        if not all(0 < side <= MOST for side in self.size):
            wrong.append("size")
        if not are_facts(self.facts) or any(
            len(values) != len(self.classes) for values in self.facts.values()
        ):
            wrong.append("facts")
        if not isinstance(self.crop_ratio, int | float) or not 1e-6 < self.crop_ratio <= 1:
            wrong.append("crop_ratio")
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: not what an export says of itself")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one picture in the manifest's layout: ``(H, W, 3)`` or ``(3, H, W)``, uint8."""
        height, width = self.size
        if self.layout == "nhwc":
            return (height, width, 3)
        return (3, height, width)

    def arranged(self, pixels: np.ndarray) -> np.ndarray:
        """One picture, ``(H, W, 3)``, in the manifest's layout: of :attr:`shape`."""
        if self.layout == "nhwc":
            return pixels
        return pixels.transpose(2, 0, 1)

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
    try:
        content = {}
        for key, value in metadata.items():
            if key.startswith(PREFIX):
                content[key.removeprefix(PREFIX)] = json_of(value)
        return _manifest(content)
    except (ValueError, TypeError, KeyError) as error:
        lacks = f"its metadata does not say what goes in ({error})"
        raise UserError(f"{file} was not written by kd-export: {lacks}") from error


def read_manifest(folder: Path) -> ExportManifest:
    """The manifest of an export's folder.

    Raises:
        UserError: ``folder`` has no ``manifest.json``, or a damaged one.
    """
    file = folder / FILE
    try:
        return _manifest(json_of(text_of(file)))
    except FileNotFoundError as error:
        raise UserError(f"{folder} is not an export: it has no {FILE}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} can't be read as the manifest of an export: {error}") from error


def _manifest(content: dict) -> ExportManifest:
    """The manifest of JSON's values by field; raises a ValueError, TypeError or KeyError for values that are not one."""
    height, width = content["size"]
    return ExportManifest(**{**content, "size": (int(height), int(width))})

"""What a format is, and what runs its files."""

import logging
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kd.config.suggest import near
from kd.errors import UserError, causes, needs_extra
from kd.ship.export.manifest import ExportManifest

if TYPE_CHECKING:
    import onnx
    from torch import Tensor, nn

    from kd.ship.export.prepared import Prepared
    from kd.teachers import RunTeacher

INPUT, OUTPUT = "pictures", "answer"  # Names of the exported graph's input and output

_FOLDER = Path(__file__).with_name("formats")
FORMATS = tuple(sorted(file.stem for file in _FOLDER.glob("[a-z]*.py")))
"""The names that ``kd-export to=`` takes, the files of ``formats/``; another format is given by its class path."""

TENSORRT = "trtexec writes it, on the GPU that runs it: to=onnx, then trtexec --onnx=model.onnx --saveEngine=model.plan"
OTHERS = {
    **dict.fromkeys(("tensorrt", "trt", "engine"), TENSORRT),
    "tflite": "to=litert writes it",
    **dict.fromkeys(("mlmodel", "mlpackage"), "to=coreml writes it"),
    "pte": "to=executorch writes it",
}
"""Names of programs and files that are no formats, and what writes them."""

Calibration = Callable[
    [], Iterator[np.ndarray]
]  # Training pictures, one at a time: uint8 ``(1, *manifest.shape)``


class Runtime(Protocol):
    """What runs an exported file: a batch of pictures in, the student's answers out, both NumPy arrays on the CPU."""

    def __call__(self, pictures: np.ndarray) -> np.ndarray:
        """uint8 ``(N, *manifest.shape)`` -> float32 ``(N, C)``, dense ``(N, C, H, W)``, features ``(N, D)``."""


@dataclass(frozen=True)
class ExportJob:
    """All that a format may need to export one student."""

    prepared: "Prepared"
    """The student with its preprocessing, on the CPU."""
    student: "nn.Module"
    """The student alone."""
    manifest: ExportManifest
    """What the export says of itself."""
    weights: Path
    """The run's ``student.safetensors``."""
    calibration: Calibration
    """Training pictures, for int8."""
    teacher: "Callable[[], RunTeacher | None]" = lambda: None
    """Loads the run's teacher, for a format that ships it too."""
    halve: "Callable[[onnx.ModelProto], onnx.ModelProto] | None" = None
    """Makes the FP16 copy of a graph, and proves it; None for float32 and int8."""


class Format(ABC):
    """One way to ship a student.

    Attributes:
        quantises: whether it knows int8.
        halves: whether it knows FP16: :meth:`write` has the job's ``halve`` convert an ONNX graph of the student.
        mixes: whether its FP16 files can keep layers in float32.
        timed: whether ``kd-latency`` runs its files.
        features: its answer is the features below the classifier.
        note: what the comparison with the student did not see; "" where it ran the file itself.
        needs: modules by the extra that brings them.
        quantiser: the modules of int8 likewise.
    """

    quantises = False
    halves = False
    mixes = True
    timed = False
    features = False
    note = ""
    needs: Mapping[str, Sequence[str]] = {}
    quantiser: Mapping[str, Sequence[str]] = {"openvino": ("nncf",)}

    def check(self, key: str, int8: bool) -> None:
        """Checks that the packages of a format can be imported; called before torch is loaded.

        Args:
            key: the setting that asks for the format (``to=onnx``); the message begins with it.
            int8: whether the export is quantised, which needs :attr:`quantiser` too.

        Raises:
            UserError: one is missing; the message names the extra that brings it.
        """
        with quiet():
            for extra, modules in self.needs.items():
                for module in modules:
                    need(module, extra, key)
            if not int8:
                return
            for extra, modules in self.quantiser.items():
                for module in modules:
                    need(module, extra, "int8=true")

    @abstractmethod
    def write(self, job: ExportJob, folder: Path) -> Path:
        """Writes the export into an empty folder.

        Returns:
            The file or folder that :meth:`open` takes.

        Raises:
            UserError: a missing extra, or an operator that the format lacks.
        """

    @abstractmethod
    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Loads what :meth:`write` has just written; ``threads`` 0 leaves their number to the runtime.

        Of formats that are :attr:`timed`, timing calls it in a process of its own, on an object that has written nothing.
        """

    def reference(self, job: ExportJob) -> Runtime:
        """Runs in torch what the export must agree with."""
        return in_torch(job.prepared)


def find_format(name: str) -> Format:
    """The format of one of the names in :data:`FORMATS`, or of a class path, which is imported.

    Raises:
        UserError: no such name or class (the message lists the names and the nearest one), or one of :data:`OTHERS`.
    """
    refuse_foreign_format(name)
    try:
        if name in FORMATS:
            return _format_in(import_module(f"kd.ship.export.formats.{name}"))
        module, _, kind = name.rpartition(".")
        return getattr(import_module(module), kind)()
    except (ImportError, AttributeError, ValueError) as error:
        hint = near(name, FORMATS)
        raise UserError(f"to: must be one of {', '.join(FORMATS)}, got '{name}'{hint}") from error


def refuse_foreign_format(name: str) -> None:
    """Raises a UserError for a name of :data:`OTHERS`."""
    remedy = OTHERS.get(name.lower())
    if remedy:
        raise UserError(f"to: no format '{name}': {remedy}")


def _format_in(module: ModuleType) -> Format:
    """The format that a file of ``formats/`` defines."""
    for kind in vars(module).values():
        own = isinstance(kind, type) and kind.__module__ == module.__name__
        if own and issubclass(kind, Format):
            return kind()
    raise AttributeError(f"{module.__name__} has no Format")


def about_formats() -> dict[str, str]:
    """What each format is, by name: the first line of its file, which is not imported."""
    about = {}
    for name in FORMATS:
        first_line, _, _ = _source(name).partition("\n")
        about[name] = first_line.strip('"').replace("``", "")
    return about


def formats_with(ability: str) -> list[str]:
    """The formats whose files set ``ability``, an attribute of :class:`Format`, to True; they are read, not imported."""
    return [name for name in FORMATS if f"\n    {ability} = True\n" in _source(name)]


def _source(name: str) -> str:
    """The text of a format's file."""
    return (_FOLDER / f"{name}.py").read_text(encoding="utf-8")


@contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Inside, without the warnings of libraries that convert a graph, and without their log lines up to a ``level``."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


OF_OPERATOR = (
    r"No ONNX function found for <OpOverload\(op='([\w.:]+)'",
    r"(?:No decompositions? registered|not supported).*?(aten[.:]+\w+)",
)
"""Messages that name an operator which a format lacks."""


@contextmanager
def converting(job: ExportJob, key: str) -> Iterator[None]:
    """Inside, a library converts the student: whatever it raises becomes a UserError of one line.

    Args:
        job: of the student.
        key: the setting that names the format; the message begins with it.

    Raises:
        UserError: the conversion has failed, or the code inside has raised it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # converters' errors have no common class
        raise UserError(f"{key}: {job.manifest.arch} can't be exported: {_why(error)}") from error


def _why(error: BaseException) -> str:
    """The unsupported operator, or else the first line of the innermost cause that has a message, at most 200 characters.

    Args:
        error: of a converter; it and its causes are searched for an operator, the outermost first.
    """
    reason = ""
    for cause in causes(error):
        text = re.sub(r"\x1b\[[\d;]*m", "", str(cause))  # without colours
        for pattern in OF_OPERATOR:
            operator = re.search(pattern, text)
            if operator:
                return f"the operator {operator[1]} is not supported"
        lines = text.strip().splitlines()
        if lines:
            reason = lines[0].strip()
    return reason[:200]


def attends(student: "nn.Module") -> bool:
    """Whether a student has attention layers; quantisers treat such models differently."""
    return any("Attention" in type(module).__name__ for module in student.modules())


def in_torch(call: "Callable[[Tensor], Tensor]", channels_first: bool = False) -> Runtime:
    """A runtime of a model in torch, without gradients.

    Pixels are made contiguous in memory: another order would choose other kernels, whose last bits differ.

    Args:
        call: takes the runtime's uint8 pictures ``(N, H, W, 3)`` on the CPU.
        channels_first: ``call`` takes ``(N, 3, H, W)`` instead.
    """
    import torch

    @torch.inference_mode()
    def run(pictures: np.ndarray) -> np.ndarray:
        """Pictures -> the answers of ``call``, both as NumPy."""
        images = torch.from_numpy(pictures)
        if channels_first:
            images = images.permute(0, 3, 1, 2)
        return call(images.contiguous()).numpy()

    return run


def one_by_one(run: Callable[[np.ndarray], np.ndarray]) -> Runtime:
    """A runtime for any number of pictures, of one that takes a single picture ``(1, H, W, 3)``."""
    return lambda pictures: np.concatenate([run(picture[None]) for picture in pictures])


def need(module: str, extra: str, what: str) -> ModuleType:
    """Imports an optional package.

    Args:
        module: its import name.
        extra: kd's extra that installs it.
        what: the setting or file that needs it; the message begins with it.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"{what}: {needs_extra(extra)}") from error

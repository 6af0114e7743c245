"""What a format is, and what runs its files."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kd.errors import UserError, needs_extra
from kd.ship.export.manifest import Manifest

if TYPE_CHECKING:
    from torch import nn

    from kd.ship.export.prepared import Prepared

INPUT, OUTPUT = "pictures", "answer"  # Names of the exported graph's input and output

Calibration = Callable[[], Iterator[np.ndarray]]  # Training pictures, one at a time: uint8 ``(1, *manifest.shape)``


class Runtime(Protocol):
    def __call__(self, pictures: np.ndarray) -> np.ndarray:
        """uint8 ``(N, *manifest.shape)`` -> float32 ``(N, C)``, dense ``(N, C, H, W)``, features ``(N, D)``."""


@dataclass(frozen=True)
class Job:
    prepared: "Prepared"  # the student with its preprocessing, on the CPU
    student: "nn.Module"  # the student alone
    manifest: Manifest  # what the export says of itself
    weights: Path  # the run's ``student.safetensors``
    calibration: Calibration  # for int8


@dataclass(frozen=True)
class Limits:
    agreement: float = 0.999  # of a float export: share of answers that are the student's own, in 0..1
    drop: float = 0.01  # of an int8 export: how much of the task's main metric it may lose, in 0..1


class Format(ABC):
    """One way to ship a student.

    Attributes:
        quantises: whether it knows int8.
        features: its answer is the features below the classifier.
        needs: modules by the extra that brings them.
    """

    quantises = False
    features = False
    needs: Mapping[str, Sequence[str]] = {}

    def check(self, key: str, int8: bool) -> None:
        for extra, modules in self.needs.items():
            for module in modules:
                need(module, extra, key)
        if int8:
            need("nncf", "openvino", "int8=true")

    @abstractmethod
    def write(self, job: Job, folder: Path) -> Path:
        """Writes the export into an empty folder."""

    @abstractmethod
    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Loads what :meth:`write` wrote; ``threads`` 0 leaves their number to the runtime."""

    def reference(self, job: Job) -> "nn.Module":
        """What the export must agree with: uint8 pictures -> answers, in torch."""
        return job.prepared


def need(module: str, extra: str, what: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"{what}: {needs_extra(extra)}") from error

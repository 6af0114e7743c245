"""kd: knowledge distillation for vision models."""

import time
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Unix time. The process itself may be older: a shell, or an installation, that became this program.
_IMPORTED = time.time()

# Public name -> the module that it is taken from. Imported on first use, so that `import kd` costs nothing.
_PUBLIC = {
    "Classification": "kd.tasks",
    "DataInfo": "kd.data.info",
    "Distillation": "kd.distill.step",
    "DistillationDataModule": "kd.data.datamodule",
    "DistillationModule": "kd.module.distillation",
    "KDLoss": "kd.losses",
    "Monitor": "kd.monitor.monitor",
    "OptimSpec": "kd.optim",
    "Preprocess": "kd.models",
    "Regression": "kd.tasks",
    "TapSpec": "kd.settings",
    "Teacher": "kd.teachers",
    "load_student": "kd.ship.export",
    "save_student": "kd.ship.export",
    "annotate": "kd.clock",
    "evaluate": "kd.api",
    "export": "kd.api",
    "predict": "kd.api",
    "read_run": "kd.report.records",
    "size": "kd.api",
    "train": "kd.api",
}

__all__ = sorted(_PUBLIC)
_PACKAGES = ("losses", "tasks")


def __getattr__(name: str) -> Any:
    """What ``kd.NAME`` is: a public class or function, or one of the packages ``losses`` and ``tasks``.

    The module that has it (:data:`_PUBLIC`) is imported at the first use. Python calls this for each name that ``kd``
    does not hold: for a package until it is imported, for a public name each time.

    Raises:
        AttributeError: kd does not offer the name; ``hasattr`` and ``from kd import`` rely on this kind of error.
    """
    if name in _PACKAGES:
        return import_module(f"kd.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kd' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def public(name: str) -> str:
    """The dotted name of the module from which ``kd.NAME`` comes; "" for a name that kd does not offer, and for packages."""
    return _PUBLIC.get(name, "")


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES, "__version__"]

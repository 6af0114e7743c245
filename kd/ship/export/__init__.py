"""The student outside of training: its weights, and one file a format that other programs run."""

from importlib import import_module
from typing import Any

# Public name -> the module that defines it: what serves an ONNX file must not load torch.
_PUBLIC = {"load_student": "kd.ship.export.student", "save_student": "kd.ship.export.student"}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kd.ship.export' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)

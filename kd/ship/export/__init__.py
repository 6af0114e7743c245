"""The student outside of training: its weights, and one file a format that other programs run."""

from importlib import import_module
from typing import Any

__all__ = ["load_student", "save_student"]


def __getattr__(name: str) -> Any:  # what serves an ONNX file must not load torch
    if name not in __all__:
        raise AttributeError(f"module 'kd.ship.export' has no attribute '{name}'")
    return getattr(import_module("kd.ship.export.student"), name)

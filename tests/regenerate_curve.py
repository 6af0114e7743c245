"""Writes tests/curve.json anew: python -m tests.regenerate_curve (say in the commit why the curves changed)."""

import json
import tempfile
from pathlib import Path

import torch

from tests._helpers import draw_folder, save_teacher
from tests.test_curve import CURVES, PATHS

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name, path in PATHS.items():
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root)
            pictures = draw_folder(folder / "pictures")
            teacher = save_teacher(folder / "teacher.safetensors", seed=1)
            found[name] = [float(f"{loss:.9g}") for loss in path(pictures, teacher, folder)]
    CURVES.write_text(json.dumps(found, indent=1) + "\n")

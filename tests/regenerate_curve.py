"""Writes tests/curve.json anew: python -m tests.regenerate_curve (say in the commit why the curve changed)."""

import json
import tempfile
from pathlib import Path

import torch

from tests._helpers import draw_folder, save_teacher
from tests.test_module import CURVE, train_curve

if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pictures = draw_folder(Path(folder) / "pictures")
        teacher = save_teacher(Path(folder) / "teacher.safetensors", seed=1)
        curve = train_curve(pictures, teacher)
    CURVE.write_text(json.dumps({"loss": [round(x, 6) for x in curve]}, indent=1) + "\n")

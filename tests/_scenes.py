"""Scenes with masks, and a recipe for them."""

from pathlib import Path

import numpy as np
from PIL import Image

from tests._files import write_yaml
from tests._helpers import ACCELERATOR, ARCH, TINY

NAMES = ["left", "right", "never"]


def draw(root: Path, train: int = 8, val: int = 4, height: int = 30, width: int = 40) -> Path:
    """Pictures whose halves differ in colour; the mask says which half; a stripe between is 9, ignored."""
    rng = np.random.RandomState(0)
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            border = rng.randint(10, 30)
            mask = np.zeros((height, width), np.uint8)
            mask[:, border:] = 1
            mask[:, border] = 9
            pixels = np.where((mask == 0)[..., None], [200, 60, 40], [30, 80, 190]) + rng.normal(
                0, 10, (height, width, 3)
            )
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(
                root / f"images/{split}/{i}.jpg", quality=95
            )
            Image.fromarray(mask).save(root / f"masks/{split}/{i}.png")
    return root


def recipe_of(tmp_path: Path, root: Path, **changes: object) -> Path:
    model = {"arch": ARCH, "img_size": [24, 32], "kwargs": TINY}
    config = {
        "recipe": "tiny",
        "data": {
            "source": {"class_path": "SegmentationFolder",
                       "init_args": {"root": str(root), "class_names": NAMES, "ignore_index": 9}},
            "img_size": [24, 32], "batch_size": 4, "num_workers": 0, "crop_ratio": 1.0,
        },
        "model": {
            "task": {"class_path": "Segmentation"}, "teacher": None, "distill_losses": {},
            "student": {**model, "kwargs": {**TINY, "depth": 4}},
        },
        "optim": {"lr": 0.005, "warmup_epochs": 0},
        "trainer": {"max_epochs": 6, "log_every_n_steps": 1, "accelerator": ACCELERATOR},
        "runs_dir": str(tmp_path / "runs"),
    }  # fmt: skip
    for key, value in changes.items():
        config["model"][key] = value
    file = tmp_path / "tiny.yaml"
    write_yaml(file, config)
    return file

"""Small data and models that the tests share."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

ROOT = Path(__file__).parent.parent
TINY = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
ARCH = "vit_tiny_patch16_224"
CLASSES = ("apple", "bread", "cake", "dates")


def draw_folder(root: Path, train: int = 12, val: int = 4, classes: tuple[str, ...] = CLASSES, size: int = 40) -> Path:
    """An ImageFolder whose classes differ in colour; noise makes each picture its own."""
    rng = np.random.RandomState(0)
    for split, count in (("train", train), ("val", val)):
        for c, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                colour = np.array([60 * c, 255 - 60 * c, 128])
                pixels = np.clip(colour + rng.normal(0, 40, (size, size + 4, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i:02d}.jpg", quality=90)
    return root


def tiny_vit(num_classes: int = len(CLASSES), seed: int = 0, **kwargs: object) -> torch.nn.Module:
    """A ViT of a few thousand parameters at 32 px."""
    torch.manual_seed(seed)
    return timm.create_model(ARCH, num_classes=num_classes, img_size=32, **{**TINY, **kwargs})


def save_teacher(path: Path, num_classes: int = len(CLASSES), **kwargs: object) -> Path:
    """A checkpoint of a tiny ViT."""
    save_file(tiny_vit(num_classes, **kwargs).state_dict(), path)
    return path


def write_recipe(path: Path, data: Path, teacher: Path | None, **changes: object) -> Path:
    """A complete recipe for the tiny pair; ``changes`` are dotted keys with ``__`` for the dot."""
    config: dict = {
        "recipe": "tiny",
        "preflight": "warn",
        "data": {
            "source": {"class_path": "kd.data.sources.ImageFolder", "init_args": {"root": str(data)}},
            "img_size": 32, "batch_size": 8, "num_workers": 0,
        },
        "model": {
            "teacher": {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(teacher)} if teacher else None,
            "student": {"arch": ARCH, "img_size": 32, "kwargs": {**TINY, "depth": 1}},
            "task_loss_weight": 0.5,
            "distill_losses": {"kd": {"class_path": "kd.losses.KDLoss", "init_args": {"temperature": 2.0}}}
            if teacher else {},
        },
        "optim": {"lr": 0.001, "warmup_epochs": 0},
        "trainer": {"max_epochs": 2, "log_every_n_steps": 1, "accelerator": "cpu"},
        "runs_dir": str(path.parent / "runs"),
    }  # fmt: skip
    for key, value in changes.items():
        node, *rest = key.split("__")
        place = config
        for part in rest:
            place = place[node]
            node = part
        place[node] = value
    path.write_text(yaml.safe_dump(config))
    return path


def run_cli(*items: str, program: str = "train", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``kd-train`` or ``kd-eval`` in a process of its own, one thread."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; from kd.cli import {program}_main; sys.exit({program}_main())", *items]
        if program != "train"
        else [sys.executable, "-m", "kd.cli", *items],
        cwd=ROOT, text=True, capture_output=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )  # fmt: skip

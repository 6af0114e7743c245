"""Which file holds the weights at a place: a file, a run's folder, a folder of timm's, or a URL."""

import re
from pathlib import Path

from safetensors import safe_open

from kd.errors import UserError
from kd.storage.checkpoints import run_folder
from kd.storage.elsewhere import LARGEST_STUDENT, regular
from kd.storage.objects import fetched

FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".npz", ".pkl")
"""Endings of weights files that are read."""
TIMM_FILES = ("model.safetensors", "pytorch_model.bin")
"""Weights in a folder of timm's, the first that is there."""


def weights_file(path: Path, key: str) -> Path:
    """The weights file at a place; one at a URL is fetched.

    Args:
        path: a file, a run's folder, a folder of timm's, or the URL of a file or of a run.
        key: the configuration key that named it.

    Raises:
        UserError: no such file.
    """
    url = re.match(r"([a-z][a-z0-9+]+):/+(.+)", str(path))  # a Path has one slash of the two
    if url and not path.exists():
        place = f"{url[1]}://{url[2]}"
        if path.suffix not in FILES:
            place += "/student.safetensors"
        return fetched(place, key or "checkpoint")
    path = run_folder(path)
    candidates = [path]
    if path.is_dir():
        candidates = [path / name for name in ("student.safetensors", *TIMM_FILES)]
    for file in candidates:
        if file.is_file():
            return file
    hint = ""
    hub = re.fullmatch(r"(?:hf[-_]hub:)?timm/(\S+)", str(path))
    if hub:
        root = key.removesuffix(".checkpoint")
        hint = f"; timm's weights: {root}.arch={hub[1]} {root}.pretrained=true"
    raise UserError(f"{key}: {candidates[0]} not found{hint}")


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, {} where it has none; the tensors are not read, torch is not imported."""
    with safe_open(regular(path, LARGEST_STUDENT), framework="numpy") as opened:
        return dict(opened.metadata() or {})

"""timm's hub format: a folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads."""

from pathlib import Path
from typing import Any

import timm
from torch import Tensor

from kd.errors import UserError
from kd.models import Preprocess
from kd.ship.export.base import ExportJob, Format, Runtime, in_torch
from kd.ship.export.manifest import read_manifest
from kd.ship.export.student import builder_in, timm_config, write_timm_folder
from kd.storage.elsewhere import json_of
from kd.storage.weights_files import read_metadata


class Hub(Format):
    """``config.json`` and ``model.safetensors``; ready for the Hugging Face hub together with ``kd-card``'s README."""

    def write(self, job: ExportJob, folder: Path) -> Path:
        """The folder of timm's hub format: ``model.safetensors``, ``config.json``, ``manifest.json``.

        Raises:
            UserError: a segmenter, or a student that timm has not built.
        """
        manifest = job.manifest
        if manifest.task == "segmentation":
            raise UserError(
                "to=hub: timm builds no models for dense prediction (to=backbone, to=onnx do)"
            )
        arch, kwargs = made_of(job.weights, "to=hub")
        prepare = Preprocess(model_size(job.weights), manifest.mean, manifest.std)
        config = timm_config(
            job.student, arch, kwargs, prepare, manifest.classes, manifest.crop_ratio
        )
        write_timm_folder(job.weights, folder, config)
        manifest.write(folder)
        return folder

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Built by timm from the folder alone, on pictures prepared as its ``config.json`` says.

        Args:
            file: the folder.
            threads: not read: torch's own.
        """
        model: Any = timm.create_model(f"local-dir:{file}", pretrained=True).eval()
        config = model.pretrained_cfg
        _channels, height, width = config["input_size"]
        prepare = Preprocess((height, width), config["mean"], config["std"])
        layout = read_manifest(file).layout

        def run(images: Tensor) -> Tensor:
            return model(prepare(images))

        return in_torch(run, layout)


def made_of(weights: Path, key: str) -> tuple[str, dict[str, Any]]:
    """Architecture and arguments, for timm, of the ``student.safetensors`` at ``weights``.

    Raises:
        UserError: timm has not built it; ``key`` begins the message.
    """
    builder = builder_in(weights)
    if builder:
        raise UserError(
            f"{key}: the student was built by {builder}, not by timm (to=onnx takes it)"
        )
    metadata = read_metadata(weights)
    return metadata["arch"], json_of(metadata["kwargs"])


def model_size(weights: Path) -> int | list[int]:
    """The side, or height and width, of a student's input in pixels."""
    return json_of(read_metadata(weights)["img_size"])

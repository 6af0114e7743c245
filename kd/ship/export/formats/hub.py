"""timm's hub format: a folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads."""

from pathlib import Path
from typing import Any

import timm
from safetensors.torch import save
from torch import Tensor

from kd.errors import UserError
from kd.models import Preprocess
from kd.ship.export.base import ExportJob, Format, Runtime, in_torch
from kd.ship.export.student import input_size, timm_config, write_timm_folder
from kd.storage.student_metadata import StudentMetadata, student_metadata_in
from kd.storage.writing import write_bytes


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
        student = made_by_timm(job.weights, "to=hub")
        size = input_size(student, job.weights)
        prepare = Preprocess(size, manifest.mean, manifest.std)
        config = timm_config(
            job.student,
            student.arch,
            student.kwargs,
            prepare,
            manifest.classes,
            manifest.crop_ratio,
        )
        write_timm_folder(job.weights, folder, config)
        if student.gives_features and student.classes:
            # its classifier, which nothing has trained, is in the run's file, and not in the model
            write_bytes(folder / "model.safetensors", save(job.student.state_dict()))
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

        def run(images: Tensor) -> Tensor:
            return model(prepare(images))

        return in_torch(run, channels_first=True)


def made_by_timm(weights: Path, key: str) -> StudentMetadata:
    """The metadata of the ``student.safetensors`` at ``weights``, whose model, or a segmenter's backbone, timm has built.

    Raises:
        UserError: timm has not built it; ``key`` begins the message.
    """
    metadata = student_metadata_in(weights)
    if metadata.builder is not None:
        builder = metadata.builder.get("class_path", "a class of one's own")
        raise UserError(
            f"{key}: the student was built by {builder}, not by timm (to=onnx takes it; its tensors are in "
            "student.safetensors, their names below model.)"
        )
    return metadata

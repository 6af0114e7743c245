"""CoreML (extra coreml): ``model.mlpackage`` for iPhones, iPads and Macs, an RGB image in, one at a time."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kd.ship.export.base import (
    INPUT,
    OUTPUT,
    ExportJob,
    Format,
    Runtime,
    converting,
    in_torch,
    need,
    one_by_one,
    quiet,
)
from kd.ship.export.formats.onnx import prove_half

EXTRA = "coreml"
KEY = "to=coreml"


class CoreML(Format):
    """``model.mlpackage`` with an image input: one RGB picture of the manifest's size.

    kd does not run the file, on a Mac neither: the gate runs the traced graph that CoreML converts in the file's place.
    """

    halves = True
    mixes = False
    note = "CoreML runs on macOS alone: compared was the graph that it converts"
    needs: Mapping[str, Sequence[str]] = {EXTRA: ("coremltools",)}

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``model.mlpackage`` in float32; in FP16 where the job has ``halve``, which measures the ONNX graph first
        (:func:`prove_half`). The traced graph is kept in this object for :meth:`open`.

        Raises:
            UserError: the extra is missing, or the student has an operator that CoreML lacks.
        """
        import torch

        tools = need("coremltools", EXTRA, KEY)
        prove_half(job)
        height, width = job.manifest.size
        picture_13HW = torch.zeros(1, 3, height, width)
        precision = tools.precision.FLOAT16 if job.halve else tools.precision.FLOAT32
        with (
            converting(job, KEY),
            quiet(),
            contextlib.redirect_stderr(io.StringIO()),
            torch.no_grad(),
        ):
            self._trace: Any = torch.jit.trace(_image_first(job), (picture_13HW,))
            model = tools.convert(
                self._trace,
                inputs=[tools.ImageType(name=INPUT, shape=picture_13HW.shape)],
                outputs=[tools.TensorType(name=OUTPUT, dtype=np.float32)],
                convert_to="mlprogram",
                compute_precision=precision,
                minimum_deployment_target=tools.target.iOS16,
                skip_model_load=True,
            )
            model.user_defined_metadata.update(job.manifest.as_metadata())
            file = folder / "model.mlpackage"
            model.save(str(file))
        return file

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """The traced graph that :meth:`write` has just converted, in torch; one picture at a time, as in the file."""
        return one_by_one(in_torch(lambda images: self._trace(images.float()), channels_first=True))


def _image_first(job: ExportJob) -> Any:
    """The student with its preprocessing for float pictures ``(1, 3, H, W)`` of 0..255, which CoreML's image input gives."""
    import torch

    class ImageFirst(torch.nn.Module):
        """Brings a picture into the order that the student's preprocessing expects."""

        def __init__(self, prepared: torch.nn.Module) -> None:
            super().__init__()
            self.prepared = prepared

        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            """``(1, 3, H, W)``, float in 0..255 -> the student's answer."""
            return self.prepared(pictures.permute(0, 2, 3, 1))

    return ImageFirst(job.prepared).eval()

"""CoreML (extra coreml): ``model.mlpackage`` for iPhones, iPads and Macs, an RGB image in, one at a time."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kd.errors import UserError
from kd.ship.export.base import (
    INPUT,
    OUTPUT,
    ExportJob,
    Format,
    Runtime,
    converting,
    in_torch,
    need,
    quiet,
)
from kd.ship.export.formats.onnx import prove_half

EXTRA = "coreml"
KEY = "to=coreml"


class CoreML(Format):
    """``model.mlpackage`` with an image input: one RGB picture of the manifest's size.

    The file's input and output are checked for name, shape and type. kd does not run the file, on a Mac neither: the gate
    runs the traced graph that CoreML converts in the file's place.
    """

    halves = True
    mixes = False
    needs: Mapping[str, Sequence[str]] = {EXTRA: ("coremltools",)}

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``model.mlpackage`` in float32; in FP16 where the job has ``halve``.

        Raises:
            UserError: the extra is missing, or the student has an operator that CoreML lacks.
        """
        import torch

        tools = need("coremltools", EXTRA, KEY)
        if job.halve:
            self._simulation = prove_half(job)
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
            self._answer = tuple(self._trace(picture_13HW).shape)
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
        check_interface(file, job.manifest.size, self._answer)
        return file

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """The traced graph that :meth:`write` has just converted, in torch.

        Raises:
            UserError: the file is not of this process.
        """
        if not hasattr(self, "_trace"):
            raise UserError(f"{file}: CoreML runs on macOS alone, and kd runs no CoreML")
        run = in_torch(lambda images: self._trace(images.float()), self._layout_of(file))

        def one_by_one(pictures: np.ndarray) -> np.ndarray:
            """uint8 ``(N, *manifest.shape)`` -> answers, one picture at a time, as the file takes them."""
            answers = [run(picture[None]) for picture in pictures]
            return np.concatenate(answers)

        return one_by_one

    def note(self) -> str:
        """What the comparison could not see."""
        return (
            "CoreML runs on macOS alone: compared was the graph that it converts; the file's input and output "
            "were checked for shape and type"
        )

    def simulate(self, file: Path) -> Runtime:
        """The student's FP16 graph in ONNX with each result rounded to FP16."""
        return self._simulation

    def _layout_of(self, file: Path) -> Any:
        """The layout in which the gate gives pictures, ``nhwc`` or ``nchw``, from the file's own metadata."""
        tools = need("coremltools", EXTRA, str(file))
        metadata = tools.utils.load_spec(str(file)).description.metadata.userDefined
        return "nchw" if "nchw" in metadata["kd.layout"] else "nhwc"


def check_interface(file: Path, size: tuple[int, int], answer: Sequence[int]) -> None:
    """Checks that a package takes an RGB image of a size, and gives a float32 array of a shape.

    Args:
        file: the package.
        size: height and width in pixels.
        answer: the shape of the student's answer to one picture.

    Raises:
        UserError: anything else.
    """
    tools = need("coremltools", EXTRA, KEY)
    description = tools.utils.load_spec(str(file)).description
    image = description.input[0].type.imageType
    array = description.output[0].type.multiArrayType
    kinds = tools.proto.FeatureTypes_pb2
    written = {
        "inputs": [feature.name for feature in description.input],
        "outputs": [feature.name for feature in description.output],
        "size": (image.height, image.width),
        "colours": image.colorSpace == kinds.ImageFeatureType.RGB,
        "answer": tuple(array.shape),
        "float32": array.dataType == kinds.ArrayFeatureType.FLOAT32,
    }
    wanted = {
        "inputs": [INPUT],
        "outputs": [OUTPUT],
        "size": size,
        "colours": True,
        "answer": tuple(answer),
        "float32": True,
    }
    for name, value in wanted.items():
        if written[name] != value:
            raise UserError(f"{KEY}: the file's {name} are {written[name]}, expected {value}")


def _image_first(job: ExportJob) -> Any:
    """The student with its preprocessing for float pictures ``(1, 3, H, W)`` of 0..255, which CoreML's image input gives."""
    import torch

    class ImageFirst(torch.nn.Module):
        """Brings a picture into the layout that the student's preprocessing expects."""

        def __init__(self, prepared: torch.nn.Module, channels_last: bool) -> None:
            super().__init__()
            self.prepared = prepared
            self.channels_last = channels_last

        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            """``(1, 3, H, W)``, float in 0..255 -> the student's answer."""
            if self.channels_last:
                pictures = pictures.permute(0, 2, 3, 1)
            return self.prepared(pictures)

    return ImageFirst(job.prepared, job.manifest.layout == "nhwc").eval()

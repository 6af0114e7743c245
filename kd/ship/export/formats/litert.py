"""LiteRT, once TensorFlow Lite (extra litert): ``model.tflite`` for Android and iOS, one picture at a time."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kd.errors import UserError, first_line
from kd.ship.export.base import (
    INPUT,
    ExportJob,
    Format,
    Runtime,
    attends,
    converting,
    need,
    one_by_one,
    quiet,
)
from kd.storage.elsewhere import LARGEST_STUDENT, regular
from kd.storage.writing import write_bytes

EXTRA = "litert"
KEY = "to=litert"
SIGNATURE = "serving_default"


class LiteRT(Format):
    """``model.tflite``: one uint8 picture in; the converter takes no dynamic batch."""

    quantises = True
    timed = True
    needs: Mapping[str, Sequence[str]] = {EXTRA: ("litert_torch", "ai_edge_litert.interpreter")}
    quantiser: Mapping[str, Sequence[str]] = {EXTRA: ("ai_edge_quantizer",)}

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``model.tflite``; quantised where ``job.manifest.int8``.

        Raises:
            UserError: the extra is missing, or the student has an operator that LiteRT lacks.
        """
        import torch

        converter = need("litert_torch", EXTRA, KEY)
        file = folder / "model.tflite"
        picture = torch.zeros((1, *job.manifest.shape), dtype=torch.uint8)
        output = io.StringIO()  # progress bars
        with (
            converting(job, KEY),
            quiet(),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            model = converter.convert(job.prepared, sample_kwargs={INPUT: picture})
            model.export(str(file))
            if job.manifest.int8:
                write_bytes(file, _quantized(file, job))
        return file

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Runs the file with LiteRT's interpreter on the CPU (XNNPACK), one picture after another.

        Raises:
            UserError: the extra is missing, or the file is not a LiteRT model.
        """
        litert = need("ai_edge_litert.interpreter", EXTRA, str(file))
        place = str(regular(file, LARGEST_STUDENT))
        try:
            interpreter = litert.Interpreter(model_path=place, num_threads=threads or None)
            interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise UserError(f"{file} is not a LiteRT model: {first_line(error)}") from error
        pictures_place = interpreter.get_input_details()[0]["index"]
        answer_place = interpreter.get_output_details()[0]["index"]

        def run(picture: np.ndarray) -> np.ndarray:
            """The answer to one uint8 picture."""
            interpreter.set_tensor(pictures_place, picture)
            interpreter.invoke()
            return interpreter.get_tensor(answer_place)

        return one_by_one(run)


def _quantized(file: Path, job: ExportJob) -> bytes:
    """An int8 copy of a float file, by LiteRT's own quantiser.

    Weights have one scale for each output channel. A CNN's activations have scales calibrated on training
    pictures, a transformer's are scaled when the file runs (as in :mod:`kd.ship.export.formats.executorch`).

    Args:
        file: ``model.tflite`` in float32.
        job: its student and its training pictures.

    Returns:
        The content of the int8 file.
    """
    package = need("ai_edge_quantizer.quantizer", EXTRA, KEY)
    names = need("ai_edge_quantizer.qtyping", EXTRA, KEY).TFLOperationName
    algorithms = need("ai_edge_quantizer.algorithm_manager", EXTRA, KEY).AlgorithmName
    quantizer: Any = package.Quantizer(str(file))
    if attends(job.student):
        for layer in (names.FULLY_CONNECTED, names.CONV_2D, names.DEPTHWISE_CONV_2D):
            quantizer.add_dynamic_config(".*", layer, num_bits=8)
    else:
        quantizer.add_static_config(
            ".*", names.ALL_SUPPORTED, activation_num_bits=8, weight_num_bits=8
        )
        # A CNN multiplies matrices where it scales pictures alone. LiteRT has no int8 kernel for that order.
        quantizer.update_quantization_recipe(
            ".*", names.BATCH_MATMUL, algorithm_key=algorithms.NO_QUANTIZE
        )
    ranges = None
    if quantizer.need_calibration:
        pictures = [{INPUT: picture} for picture in job.calibration()]
        ranges = quantizer.calibrate({SIGNATURE: pictures}, num_threads=1)
    result = quantizer.quantize(ranges, enable_progress_report=False)
    return bytes(result.quantized_model)

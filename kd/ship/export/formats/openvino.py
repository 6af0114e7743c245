"""OpenVINO (extra openvino): ``model.xml`` and ``model.bin``, for Intel's and other CPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kd.ship.export.base import INPUT, ExportJob, Format, Runtime, need
from kd.ship.export.formats.onnx import Onnx
from kd.ship.export.nncf import quantized
from kd.storage.elsewhere import LARGEST_STUDENT, regular

EXTRA = "openvino"


class OpenVino(Format):
    """Converted from ONNX, so that both hold the same graph; weights keep the type that they have there."""

    quantises = True
    timed = True
    halves = True
    needs: Mapping[str, Sequence[str]] = {**Onnx.needs, EXTRA: ("openvino",)}

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``model.xml`` and ``model.bin``, converted from the ONNX export; float32 is not compressed to float16.

        int8 is made of the converted float32 model, FP16 of the ONNX graph before. Returns the path of ``model.xml``.

        Raises:
            UserError: an extra is not installed, or the student has an operator that ONNX lacks.
        """
        openvino = need("openvino", EXTRA, "to=openvino")
        float_job = replace(job, manifest=replace(job.manifest, int8=False))
        with TemporaryDirectory(dir=folder) as part:
            onnx_file = Onnx().write(float_job, Path(part))
            model = openvino.convert_model(onnx_file)
        if job.manifest.int8:
            model = quantized(model, job)
        for key, value in job.manifest.as_metadata().items():
            model.set_rt_info(value, key.split("."))
        file = folder / "model.xml"
        openvino.save_model(model, file, compress_to_fp16=False)
        return file

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Runs the model with OpenVINO on the CPU in float32, also where the CPU would be faster in bfloat16.

        Args:
            file: ``model.xml``, with ``model.bin`` beside it.
            threads: of the CPU; 0: OpenVINO's choice.
        """
        openvino = need("openvino", EXTRA, str(file))
        settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        if threads:
            settings["INFERENCE_NUM_THREADS"] = str(threads)
        compiled = openvino.Core().compile_model(
            str(regular(file, LARGEST_STUDENT)), "CPU", settings
        )
        return lambda pictures: compiled({INPUT: pictures})[0]

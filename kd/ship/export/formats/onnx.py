"""ONNX (extra export): ``model.onnx`` with the preprocessing, for ONNX Runtime and most else; any batch."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kd.errors import UserError, first_line
from kd.ship.export.base import INPUT, OUTPUT, ExportJob, Format, Runtime, converting, need, quiet
from kd.ship.export.manifest import ExportManifest, from_metadata
from kd.ship.export.nncf import quantized
from kd.storage.elsewhere import LARGEST_STUDENT, regular

if TYPE_CHECKING:
    import onnxruntime
    import torch

EXTRA = "export"


class Onnx(Format):
    """``model.onnx``: uint8 pictures in, a dynamic batch, the manifest in the metadata."""

    quantises = True
    timed = True
    halves = True
    needs: Mapping[str, Sequence[str]] = {EXTRA: ("onnx", "onnxscript", "onnxruntime")}

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``model.onnx``; quantised where ``job.manifest.int8``, in FP16 where the job has ``halve``.

        Raises:
            UserError: the extra is not installed, or the student has an operator that ONNX lacks.
        """
        onnx = need("onnx", EXTRA, "to=onnx")
        file = folder / "model.onnx"
        onnx_program(job).save(file)
        model = onnx.load(file)
        if job.manifest.int8:
            model = quantized(model, job)
        if job.halve:
            model = job.halve(model)
        for key, value in job.manifest.as_metadata().items():
            model.metadata_props.add(key=key, value=value)
        onnx.save(model, file)
        return file

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Runs the file with ONNX Runtime on the CPU, on ``threads`` threads (0: its own choice)."""
        return as_runtime(open_session(file, threads))


def prove_half(job: ExportJob) -> None:
    """The FP16 proof of a format that has another graph: on the ONNX graph of the same student.

    Args:
        job: its ``halve`` measures each layer as it converts the graph; without one nothing is done.
    """
    if job.halve:
        job.halve(onnx_program(job).model_proto)


def open_session(file: Path, threads: int = 0) -> "onnxruntime.InferenceSession":
    """An ``onnxruntime.InferenceSession`` on the CPU.

    Args:
        file: an ONNX model.
        threads: of one operation; 0: as many as there are cores.

    Raises:
        UserError: the extra is missing, or the file is no ONNX model.
    """
    runtime = need("onnxruntime", EXTRA, str(file))
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # it prints what the file says; errors are raised, too
    try:
        place = str(regular(file, LARGEST_STUDENT))
        return runtime.InferenceSession(place, options, providers=["CPUExecutionProvider"])
    except UserError:
        raise
    except Exception as error:  # its classes derive from Exception alone
        raise UserError(f"{file} is not a readable ONNX model: {first_line(error)}") from error


def as_runtime(session: "onnxruntime.InferenceSession") -> Runtime:
    """Wraps a session of ONNX Runtime: pictures as NumPy in, the output ``answer`` out.

    Pictures are uint8 ``(N, *manifest.shape)`` for any N; answers are float32. ONNX Runtime
    itself refuses other types and shapes.
    """
    return lambda pictures: session.run([OUTPUT], {INPUT: pictures})[0]


def open_model(file: Path, threads: int) -> tuple[ExportManifest, Runtime]:
    """The manifest in an ONNX file's metadata, and what runs it on ``threads`` threads of the CPU (0: ONNX Runtime's
    choice).

    Raises:
        UserError: not an ONNX file, or not one of kd-export.
    """
    session = open_session(file, threads)
    metadata = dict(session.get_modelmeta().custom_metadata_map)
    return from_metadata(metadata, file), as_runtime(session)


def onnx_program(job: ExportJob) -> "torch.onnx.ONNXProgram":
    """The ONNX program of ``job.prepared``, for batches of any size.

    Raises:
        UserError: the model has an operator that ONNX lacks.
    """
    import torch

    # Two pictures: of a batch of one the exporter takes the 1 for a constant.
    example = torch.from_numpy(np.zeros((2, *job.manifest.shape), np.uint8))
    with quiet(logging.ERROR), torch.inference_mode(), converting(job, "to=onnx"):
        program = torch.onnx.export(
            job.prepared,
            (example,),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    assert program is not None, "with dynamo=True it is one"
    return program

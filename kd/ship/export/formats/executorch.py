"""ExecuTorch (extra executorch): ``model.pte`` for phones and small machines, one picture at a time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kd.errors import UserError, first_line
from kd.ship.export.base import (
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

if TYPE_CHECKING:
    import torch

EXTRA = "executorch"
KEY = "to=executorch"


class ExecuTorch(Format):
    """``model.pte``: one uint8 picture in, whose memory the file plans ahead.

    What XNNPACK has no kernel for is computed by ExecuTorch's own portable kernels.
    """

    quantises = True
    timed = True
    needs: Mapping[str, Sequence[str]] = {EXTRA: ("executorch.exir", "executorch.runtime")}
    quantiser: Mapping[str, Sequence[str]] = {EXTRA: ("torchao",)}

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``model.pte``; quantised where ``job.manifest.int8``.

        Raises:
            UserError: the extra is missing, or the student has an operator that ExecuTorch lacks.
        """
        exir = need("executorch.exir", EXTRA, KEY)
        partition = need("executorch.backends.xnnpack.partition.xnnpack_partitioner", EXTRA, KEY)
        model: torch.nn.Module = job.prepared
        with converting(job, KEY), quiet():
            if job.manifest.int8:
                model = _quantized(model, job)
            edge = exir.to_edge_transform_and_lower(
                _traced(model, job), partitioner=[partition.XnnpackPartitioner()]
            )
            program = edge.to_executorch()
        file = folder / "model.pte"
        write_bytes(file, program.buffer)
        return file

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Runs the file with ExecuTorch's XNNPACK, one picture after another.

        Args:
            file: ``model.pte``.
            threads: of this process's pool, which all files of the process share; 0: as it is.

        Raises:
            UserError: the extra is missing, or the file is not a program of ExecuTorch.
        """
        import torch

        runtime = need("executorch.runtime", EXTRA, str(file))
        if threads:
            pool = need("executorch.extension.pybindings.portable_lib", EXTRA, str(file))
            pool._unsafe_reset_threadpool(threads)
        try:
            program = runtime.Runtime.get().load_program(regular(file, LARGEST_STUDENT))
            method = program.load_method("forward")
        except RuntimeError as error:
            raise UserError(
                f"{file} is not a program of ExecuTorch: {first_line(error)}"
            ) from error

        def run(picture: np.ndarray) -> np.ndarray:
            """The answer to one uint8 picture."""
            try:
                answer = method.execute([torch.from_numpy(picture)])[0]
            except RuntimeError as error:
                raise UserError(f"{file}: ExecuTorch can't run it: {first_line(error)}") from error
            return answer.numpy().copy()  # the next run reuses its memory

        return one_by_one(run)


def _traced(model: "torch.nn.Module", job: ExportJob) -> "torch.export.ExportedProgram":
    """The graph of a model for one uint8 picture."""
    import torch

    picture = torch.zeros((1, *job.manifest.shape), dtype=torch.uint8)
    with torch.no_grad():
        return torch.export.export(model, (picture,))


def _quantized(model: "torch.nn.Module", job: ExportJob) -> "torch.nn.Module":
    """An int8 copy for XNNPACK, by torchao.

    Weights are symmetric, one scale for each output channel. A CNN's activations have scales calibrated on training
    pictures. A transformer's few large activations would take most of such a scale, so there each batch's activations
    give it when the file runs; of its layers only linear ones are quantised.

    Args:
        model: the student with its preprocessing, in float32.
        job: its shape of pictures, and its training pictures.
    """
    import torch

    xnnpack = need("executorch.backends.xnnpack.quantizer.xnnpack_quantizer", EXTRA, KEY)
    pt2e = need("torchao.quantization.pt2e.quantize_pt2e", EXTRA, KEY)
    quantizer = xnnpack.XNNPACKQuantizer()
    if attends(job.student):
        dynamic = xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
        # Not globally: XNNPACK does not run a quantised product of matrices, by which pictures are scaled.
        quantizer.set_module_type(torch.nn.Linear, dynamic)
    else:
        static = xnnpack.get_symmetric_quantization_config(is_per_channel=True)
        quantizer.set_global(static)
    with torch.no_grad():
        prepared = pt2e.prepare_pt2e(_traced(model, job).module(), quantizer)
        for picture in job.calibration():
            prepared(torch.from_numpy(picture))
        return pt2e.convert_pt2e(prepared)

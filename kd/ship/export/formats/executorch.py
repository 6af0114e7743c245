"""ExecuTorch (extra executorch): ``model.pte`` for phones and small machines, batches up to max_batch."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kd.errors import UserError, first_line
from kd.ship.export.base import ExportJob, Format, Runtime, attends, converting, need, quiet
from kd.ship.export.formats.onnx import prove_half
from kd.storage.elsewhere import LARGEST_STUDENT, regular
from kd.storage.writing import write_bytes

if TYPE_CHECKING:
    import torch

EXTRA = "executorch"
KEY = "to=executorch"


class ExecuTorch(Format):
    """``model.pte``: uint8 pictures in, any batch up to ``job.max_batch``, whose memory the file plans ahead.

    What XNNPACK has no kernel for is computed by ExecuTorch's own portable kernels.
    """

    quantises = True
    timed = True
    halves = True
    mixes = False
    bounded = True
    needs: Mapping[str, Sequence[str]] = {EXTRA: ("executorch.exir", "executorch.runtime")}
    quantiser: Mapping[str, Sequence[str]] = {EXTRA: ("torchao",)}

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``model.pte``; quantised where ``job.manifest.int8``, in FP16 where the job has ``halve``.

        Raises:
            UserError: the extra is missing, or the student has an operator that ExecuTorch lacks.
        """
        exir = need("executorch.exir", EXTRA, KEY)
        partition = need("executorch.backends.xnnpack.partition.xnnpack_partitioner", EXTRA, KEY)
        model: torch.nn.Module = job.prepared
        prove_half(job)
        if job.halve:
            model = _in_half_precision(model)
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
        """Runs the file with ExecuTorch's XNNPACK; a larger batch than the file allows runs in parts.

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
        # The planned shape is that of the largest batch.
        max_batch = method.metadata.input_tensor_meta(0).sizes()[0]

        def run(pictures: np.ndarray) -> np.ndarray:
            """uint8 pictures -> answers, at most ``max_batch`` at a time."""
            answers = []
            for start in range(0, len(pictures), max_batch):
                part = torch.from_numpy(pictures[start : start + max_batch])
                try:
                    answer = method.execute([part])[0]
                except RuntimeError as error:
                    raise UserError(
                        f"{file}: ExecuTorch can't run it: {first_line(error)}"
                    ) from error
                answers.append(answer.numpy().copy())  # the next run reuses its memory
            return np.concatenate(answers)

        return run


def _traced(model: "torch.nn.Module", job: ExportJob) -> "torch.export.ExportedProgram":
    """The graph of a model for batches of 1 to ``job.max_batch`` uint8 pictures."""
    import torch

    # Two pictures where there may be more than one: of a batch of one torch takes the 1 for a constant.
    pictures = min(2, job.max_batch)
    example = torch.zeros((pictures, *job.manifest.shape), dtype=torch.uint8)
    shapes = None
    if job.max_batch > 1:
        shapes = ({0: torch.export.Dim("batch", min=1, max=job.max_batch)},)
    with torch.no_grad():
        return torch.export.export(model, (example,), dynamic_shapes=shapes)


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


def _in_half_precision(prepared: "torch.nn.Module") -> "torch.nn.Module":
    """A copy of the student with its preprocessing, whose model computes in FP16; pictures and answers as before."""
    import torch

    class Half(torch.nn.Module):
        """Casts the input to FP16 and the answer back to float32."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model.half()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.model(images.half()).float()

    copied: Any = copy.deepcopy(prepared)
    copied.model = Half(copied.model)
    return copied

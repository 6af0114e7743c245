"""PyTorch's own portable graph: ``model.pt2``, for ``torch.export.load`` without the model's code."""

from pathlib import Path

from kd.ship.export.base import INPUT, ExportJob, Format, Runtime, converting, in_torch
from kd.storage.elsewhere import LARGEST_STUDENT, regular


class TorchExport(Format):
    """``torch.export.load("model.pt2").module()(pictures)``; the manifest is in its extra files."""

    timed = True

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``model.pt2`` with a dynamic batch and the manifest beside it in the archive.

        Raises:
            UserError: ``torch.export`` can't trace the student; the message has its first line.
        """
        import torch

        example = torch.zeros((2, *job.manifest.shape), dtype=torch.uint8)
        shapes = {INPUT: {0: torch.export.Dim("batch")}}
        with converting(job, "to=torch_export"), torch.no_grad():
            program = torch.export.export(job.prepared, (example,), dynamic_shapes=shapes)
        file = folder / "model.pt2"
        torch.export.save(program, file, extra_files=job.manifest.as_metadata())
        return file

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Runs the graph in torch; ``threads`` has no effect, the number of threads is the process's."""
        import torch

        return in_torch(torch.export.load(regular(file, LARGEST_STUDENT)).module())

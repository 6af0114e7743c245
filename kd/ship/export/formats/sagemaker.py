"""SageMaker: ``model.tar.gz`` for its Triton images (the model repository at the archive's root)."""

import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from kd.ship.export.base import ExportJob, Format, Runtime
from kd.ship.export.formats.onnx import Onnx
from kd.ship.export.formats.triton import NAME, Triton
from kd.storage.archives import unpack


class SageMakerArchive(Format):
    """What ``SAGEMAKER_TRITON_DEFAULT_MODEL_NAME=student`` finds below ``/opt/ml/model``."""

    quantises = True
    halves = True
    needs = Onnx.needs

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``model.tar.gz`` with Triton's model repository."""
        file = folder / "model.tar.gz"
        with TemporaryDirectory(dir=folder) as part:
            repository = Triton().write(job, Path(part))
            with tarfile.open(file, "w:gz") as archive:
                archive.add(repository / NAME, NAME)
        return file

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Unpacks the archive into a temporary folder and runs the ONNX file in it.

        The folder is deleted at once: ONNX Runtime has the whole file in memory by then.
        """
        with TemporaryDirectory() as part:
            unpack(file, Path(part))
            return Triton().open(Path(part), threads)

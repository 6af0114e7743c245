"""NVIDIA Triton's model repository: ``student/config.pbtxt``, ``student/labels.txt``, ``student/1/model.onnx``."""

import json
from pathlib import Path

import numpy as np

from kd.ship.export.base import INPUT, OUTPUT, ExportJob, Format, Runtime
from kd.ship.export.formats.onnx import Onnx
from kd.ship.export.manifest import ExportManifest, as_lines
from kd.storage.writing import make_folder, write_text

NAME = "student"
MAX_BATCH = 64  # pictures that Triton joins into one batch at most

CONFIG = """\
name: "{name}"
backend: "{backend}"
max_batch_size: {max_batch}
input [
  {{
    name: "{input}"
    data_type: TYPE_UINT8
    dims: {in_dims}
  }}
]
output [
  {{
    name: "{output}"
    data_type: TYPE_FP32
    dims: {out_dims}{labels}
  }}{more_outputs}
]
dynamic_batching {{
  max_queue_delay_microseconds: 2000
}}
"""


class Triton(Format):
    """The ONNX file in Triton's model repository, with its configuration and the class names."""

    quantises = True
    halves = True
    needs = Onnx.needs

    def write(self, job: ExportJob, folder: Path) -> Path:
        """The repository in ``folder``, which is returned; the answer's shape is measured by running the ONNX file once.

        Raises:
            UserError: as of :meth:`kd.ship.export.formats.onnx.Onnx.write`.
        """
        manifest = job.manifest
        model = folder / NAME
        Onnx().write(job, make_folder(model / "1"))
        run = self.open(folder)
        picture = np.zeros((1, *manifest.shape), np.uint8)
        answer = run(picture)
        text = config(manifest, answer.shape[1:])
        describe(model, manifest, text)
        return folder

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Runs the ONNX file of the repository ``file`` with ONNX Runtime, without Triton."""
        return Onnx().open(file / NAME / "1" / "model.onnx", threads)


def describe(model: Path, manifest: ExportManifest, text: str) -> None:
    """Writes ``config.pbtxt`` with a text of :func:`config`, and the names of classes, into a model's folder."""
    write_text(model / "config.pbtxt", text)
    if manifest.classes:
        write_text(model / "labels.txt", as_lines(manifest.classes))


def config(
    manifest: ExportManifest,
    answer: tuple[int, ...],
    name: str = NAME,
    backend: str = "onnxruntime",
    more_outputs: str = "",
) -> str:
    """The text of ``config.pbtxt``.

    It refers to ``labels.txt`` for one class or several labels a picture, not for masks, numbers and features.

    Args:
        manifest: of the export.
        answer: shape of one picture's answer, without the batch.
        name: of the model, its folder's.
        backend: of Triton.
        more_outputs: what follows the answer in the list of outputs.
    """
    labels = (
        '\n    label_filename: "labels.txt"'
        if manifest.task in ("classification", "multilabel")
        else ""
    )
    return CONFIG.format(
        name=name,
        backend=backend,
        more_outputs=more_outputs,
        max_batch=MAX_BATCH,
        input=INPUT,
        output=OUTPUT,
        in_dims=json.dumps(list(manifest.shape)),
        out_dims=json.dumps(list(answer)),
        labels=labels,
    )

"""A server in a process of its own, over a model whose answer is known."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kd.ship.export.manifest import Manifest
from tests._helpers import ROOT

ABOUT = Manifest("classification", "mean", ["r", "g", "b"], (8, 8), 1.0, "nhwc", [0.0] * 3, [1.0] * 3, "onnx")


def mean_colour(file: Path, taken: str = "UINT8", **metadata: str) -> Path:
    """An ONNX model whose logits are a picture's mean red, green and blue; its metadata as given."""
    import onnx
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Cast", ["pictures"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["x", "axes"], ["answer"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes, "mean",
        [helper.make_tensor_value_info("pictures", getattr(TensorProto, taken), ["n", None, None, 3])],
        [helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor("axes", TensorProto.INT64, [2], [1, 2])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    for key, value in (ABOUT.as_metadata() | {f"kd.{key}": value for key, value in metadata.items()}).items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, file)
    return file


@contextmanager
def serving(
    model: Path, *items: str, before: str = "", files: int = 1024
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server in a process of its own, after the statements ``before``, of so many open files: port, process."""
    items = (str(model), "port=0", "threads=1", *items)
    code = f"{before}\nimport sys\nfrom kd.cli import main\nsys.exit(main('serve', {list(items)}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )  # fmt: skip
    try:
        line = process.stdout.readline()  # type: ignore[union-attr]
        assert " on http://" in line, line + process.stdout.read()  # type: ignore[union-attr]
        yield int(line.rpartition(":")[2]), process
    finally:
        process.kill()
        process.wait()

"""A server in a process of its own, over a model whose answer is known."""

import os
import resource
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kd.ship.export.manifest import ExportManifest
from tests._forks import ForkedRun

# a file of tests that imports this is skipped without them
for package in (
    "starlette",
    "uvicorn",
    "python_multipart",
    "prometheus_client",
    "onnxruntime",
    "onnxscript",
):
    pytest.importorskip(package)

ABOUT = ExportManifest(
    "classification", "mean", ["r", "g", "b"], (8, 8), 1.0, [0.0] * 3, [1.0] * 3, "onnx"
)


def ask(
    port: int, path: str, body: bytes | None = None, kind: str = ""
) -> tuple[int, bytes, dict[str, str]]:
    """The status, the body and the headers of an answer; a body in the request makes it a POST."""
    url = f"http://127.0.0.1:{port}{path}"
    request = urllib.request.Request(url, body, {"content-type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


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
    for key, value in (
        ABOUT.as_metadata() | {f"kd.{key}": value for key, value in metadata.items()}
    ).items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, file)
    return file


@contextmanager
def serving(
    model: Path, *items: str, first: Callable[[], None] | None = None, files: int = 1024
) -> Iterator[tuple[int, "Served"]]:
    """A server in a forked process, after the call ``first``, of so many open files: port, process."""

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        if first:
            first()

    process = Served([str(model), "port=0", "threads=1", *items], prepare)
    try:
        yield process.port, process
    finally:
        process.end()


class Served(ForkedRun):
    """``kd-serve`` by a fork; it answers at ``port``.

    Args:
        items: its command line.
        first: a call made before.
    """

    def __init__(self, items: list[str], first: Callable[[], None] | None = None) -> None:
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as output:
            super().__init__(["serve", *items], stdout=output, first=first)
        self.stdout = os.fdopen(reading)
        lines = [""]
        while " on http://" not in lines[-1]:
            lines.append(self.stdout.readline())  # a run is exported first
            assert lines[-1], "".join(lines)
        self.port = int(lines[-1].rpartition(":")[2])

    def end(self) -> None:
        """Kills it, where it has not ended by itself."""
        self.kill()
        self.wait()
        self.stdout.close()

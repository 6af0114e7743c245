"""Exports as public checkers read them."""

import math
import shutil
import subprocess

import pytest

from kd.ship.export.manifest import Manifest
from kd.ship.export.triton import config


@pytest.mark.parametrize(("task", "answer", "labels"), [
    ("classification", (3,), "labels.txt"), ("segmentation", (3, 8, 8), ""), ("features", (5,), ""),
])  # fmt: skip
def test_triton_itself_reads_the_configuration(task: str, answer: tuple[int, ...], labels: str) -> None:
    pytest.importorskip("grpc")  # tritonclient.grpc raises a RuntimeError without it
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    text_format = pytest.importorskip("google.protobuf.text_format")
    classes = [] if task == "features" else ["r", "g", "b"]
    manifest = Manifest(task, "x", classes, (8, 8), 1.0, "nhwc", [0.0] * 3, [1.0] * 3, "triton")
    found = text_format.Parse(config(manifest, answer), messages.ModelConfig())
    assert found.name == "student" and found.backend == "onnxruntime" and found.max_batch_size > 1
    (taken,), (given,) = found.input, found.output
    assert (taken.name, taken.data_type, list(taken.dims)) == ("pictures", messages.TYPE_UINT8, [8, 8, 3])
    assert (given.name, given.data_type, tuple(given.dims)) == ("answer", messages.TYPE_FP32, answer)
    assert given.label_filename == labels and math.prod(given.dims) > 0


def test_the_servers_metrics_are_prometheus_own() -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed")
    pytest.importorskip("prometheus_client")
    from kd.ship.serving.metrics import Metrics

    metrics = Metrics()
    metrics.requests.labels(200).inc()
    metrics.seconds.observe(0.1)
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics.text(), capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")

"""Exports as public checkers read them."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kd.cli import main
from kd.ship.export.formats.cascade import BY_TEACHER
from kd.ship.export.formats.onnx import open_model
from kd.ship.export.formats.triton import config
from kd.ship.export.manifest import ExportManifest


@pytest.mark.parametrize(("task", "answer", "labels", "more"), [
    ("classification", (3,), "labels.txt", ()), ("segmentation", (3, 8, 8), "", ()), ("features", (5,), "", ()),
    ("classification", (3,), "labels.txt", ("cascade", "python", BY_TEACHER)),
])  # fmt: skip
def test_triton_itself_reads_the_configuration(
    task: str, answer: tuple[int, ...], labels: str, more: tuple[Any, ...]
) -> None:
    """By the message that the server parses it into."""
    pytest.importorskip("grpc")  # tritonclient.grpc raises a RuntimeError without it
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    text_format = pytest.importorskip("google.protobuf.text_format")
    classes = [] if task == "features" else ["r", "g", "b"]
    manifest = ExportManifest(task, "x", classes, (8, 6), 1.0, [0.0] * 3, [1.0] * 3, "triton")
    found = text_format.Parse(config(manifest, answer, *more), messages.ModelConfig())
    expected = more[:2] or ("student", "onnxruntime")
    assert (found.name, found.backend, found.max_batch_size) == (*expected, 64)
    assert more or found.dynamic_batching.max_queue_delay_microseconds == 2000
    (taken,), (given, *others) = found.input, found.output
    assert (taken.name, taken.data_type) == ("pictures", messages.TYPE_UINT8)
    assert list(taken.dims) == [8, 6, 3]
    assert (given.name, given.data_type) == ("answer", messages.TYPE_FP32)
    assert (tuple(given.dims), given.label_filename) == (answer, labels)
    assert [(other.name, list(other.dims)) for other in others] == (
        [("by_teacher", [1])] if more else []
    )


def test_the_servers_metrics_are_prometheus_own() -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed")
    pytest.importorskip("prometheus_client")
    from kd.ship.serving.metrics import Metrics

    metrics = Metrics()
    metrics.requests.labels(200).inc()
    metrics.seconds.observe(0.1)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics.text(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.fixture(scope="module")
def repository(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student's folder in Triton's repository."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("triton") / "out"
    assert main("export", [str(finished), "to=triton", f"out={folder}"]) == 0
    return folder / "student"


@pytest.mark.slow
def test_triton_is_told_what_the_graph_says(repository: Path) -> None:
    pytest.importorskip("grpc")
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    onnx, text_format = (
        pytest.importorskip("onnx"),
        pytest.importorskip("google.protobuf.text_format"),
    )
    found = text_format.Parse((repository / "config.pbtxt").read_text(), messages.ModelConfig())
    graph = onnx.load(repository / "1" / "model.onnx").graph
    for told, real in ((found.input, graph.input), (found.output, graph.output)):
        (told,), (real,) = told, real
        tensor, kinds = real.type.tensor_type, {"TYPE_UINT8": "UINT8", "TYPE_FP32": "FLOAT"}
        batch, *dims = tensor.shape.dim
        assert (told.name, list(told.dims)) == (real.name, [dim.dim_value for dim in dims])
        assert kinds[messages.DataType.Name(told.data_type)] == onnx.TensorProto.DataType.Name(
            tensor.elem_type
        )
        assert batch.dim_param  # any number of pictures, which Triton's own batches need


@pytest.mark.slow
def test_onnx_and_its_runtime_take_the_export_without_kd(repository: Path, tmp_path: Path) -> None:
    import onnx

    file = repository / "1" / "model.onnx"
    onnx.checker.check_model(str(file), full_check=True)
    manifest, runtime = open_model(file, 1)
    pictures = np.random.RandomState(0).randint(0, 256, (3, *manifest.shape), np.uint8)
    np.save(tmp_path / "pictures.npy", pictures)
    code = (
        f"import sys, numpy, onnxruntime; s = onnxruntime.InferenceSession({str(file)!r});"
        "numpy.save('answers', s.run(None, {s.get_inputs()[0].name: numpy.load('pictures.npy')})[0]);"
        "assert not {'kd', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert np.load(tmp_path / "answers.npy") == pytest.approx(runtime(pictures), abs=1e-5)


@pytest.mark.slow
def test_transformers_gives_the_labels_of_kd_predict(finished: Path, tmp_path: Path) -> None:
    """TimmWrapper resizes with timm's transforms: the same sizes and filter, in another library."""
    transformers = pytest.importorskip("transformers")
    pictures = sorted((finished.parents[2] / "data" / "train").rglob("*.jpg"))[::2][:20]
    assert (
        main("predict", [str(finished), *map(str, pictures), f"out={tmp_path / 'ours.csv'}"]) == 0
    )
    with (tmp_path / "ours.csv").open() as file:
        ours = list(csv.DictReader(file))
    pipeline = transformers.pipeline("image-classification", model=str(finished / "student"))
    theirs = [pipeline(str(picture), top_k=1)[0] for picture in pictures]
    assert len(ours) == 20 and [row["label_1"] for row in ours] == [
        answer["label"] for answer in theirs
    ]

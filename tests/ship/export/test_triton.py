"""Triton's configuration."""

import pytest

from kd.ship.export.formats.cascade import BY_TEACHER
from kd.ship.export.formats.triton import config
from kd.ship.export.manifest import ExportManifest


def test_triton_is_told_the_shapes_and_the_labels() -> None:
    manifest = ExportManifest(
        "classification", "x", ["a", "b"], (24, 32), 1.0, [0.0] * 3, [1.0] * 3, "onnx"
    )
    text = config(manifest, (2,))
    assert "dims: [24, 32, 3]" in text and 'dims: [2]\n    label_filename: "labels.txt"' in text
    scenes = ExportManifest(
        "segmentation", "x", ["a", "b"], (24, 32), 1.0, [0.0] * 3, [1.0] * 3, "onnx"
    )
    assert "dims: [24, 32, 3]" in config(scenes, (2, 24, 32)) and "labels.txt" not in config(
        scenes, (2, 24, 32)
    )


def test_tritons_own_reader_takes_the_configuration() -> None:
    """By the message that the server parses it into."""
    text_format = pytest.importorskip("google.protobuf.text_format")
    pytest.importorskip("grpc")
    model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2").ModelConfig
    manifest = ExportManifest(
        "classification", "x", ["a", "b"], (24, 32), 1.0, [0.0] * 3, [1.0] * 3, "onnx"
    )
    student = text_format.Parse(config(manifest, (2,)), model_config())
    assert (student.name, student.backend, student.max_batch_size) == ("student", "onnxruntime", 64)
    assert student.dynamic_batching.max_queue_delay_microseconds == 2000
    assert list(student.input[0].dims) == [24, 32, 3]
    text = config(manifest, (2,), "cascade", "python", BY_TEACHER)
    cascade = text_format.Parse(text, model_config())
    assert (cascade.name, cascade.backend) == ("cascade", "python")
    assert [(output.name, list(output.dims)) for output in cascade.output] == [
        ("answer", [2]),
        ("by_teacher", [1]),
    ]

"""Triton's configuration."""

from kd.ship.export.manifest import ExportManifest
from kd.ship.export.triton import config


def test_triton_is_told_the_shapes_and_the_labels() -> None:
    manifest = ExportManifest(
        "classification", "x", ["a", "b"], (24, 32), 1.0, "nhwc", [0.0] * 3, [1.0] * 3, "onnx"
    )
    text = config(manifest, (2,))
    assert "dims: [24, 32, 3]" in text and 'dims: [2]\n    label_filename: "labels.txt"' in text
    scenes = ExportManifest(
        "segmentation", "x", ["a", "b"], (24, 32), 1.0, "nchw", [0.0] * 3, [1.0] * 3, "onnx"
    )
    assert "dims: [3, 24, 32]" in config(scenes, (2, 24, 32)) and "labels.txt" not in config(
        scenes, (2, 24, 32)
    )

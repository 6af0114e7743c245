"""Small parts of an export: its graph's input, what it may lose, Triton's configuration."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kd.models import Preprocess
from kd.ship.export.gate import ExportLimits, failure, size_mb
from kd.ship.export.manifest import ExportManifest
from kd.ship.export.prepared import Prepared
from kd.ship.export.triton import config


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_the_graph_scales_and_normalises_as_training_does(layout: str) -> None:
    preprocess = Preprocess(8, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    pictures = torch.randint(256, (2, 3, 16, 12), dtype=torch.uint8)
    given = pictures.permute(0, 2, 3, 1) if layout == "nhwc" else pictures
    found = Prepared(nn.Identity(), preprocess, (16, 12), layout)(given)  # type: ignore[arg-type]
    assert found.shape == (2, 3, 8, 8)
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    assert ((found - preprocess(pictures)) * std).abs().max() < 2 / 255, (
        "two roundings of a picture's value"
    )
    as_it_is = Prepared(
        nn.Identity(), Preprocess((16, 12), [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]), (16, 12), layout
    )  # type: ignore[arg-type]
    torch.testing.assert_close(as_it_is(given), (pictures / 255 - mean) / std, rtol=1e-4, atol=1e-5)


def test_what_an_export_may_lose() -> None:
    limits = ExportLimits(agreement=0.99, drop=0.01)
    found = {"agreement": 0.98, "pictures": 100, "metric": "acc1", "student": 0.80, "export": 0.795}
    assert failure(found, int8=False, limits=limits).startswith(
        "it agrees with the student on 98.000% of 100 pictures"
    )
    assert failure(found, int8=True, limits=limits) == ""
    assert "acc1 falls from 80.00% to 70.00%, by more than 1 points" in failure(
        {**found, "export": 0.7}, True, limits
    )
    assert failure({**found, "agreement": 1.0}, False, limits) == ""


def test_the_size_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(250_000))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(bytes(500_000))
    assert (size_mb(tmp_path / "a"), size_mb(tmp_path)) == (0.25, 0.75)


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

"""What an export may lose, and how large it is."""

from pathlib import Path

import numpy as np
import torch

from kd.data.batch import Batch
from kd.ship.export.gate import compare_answers, failure, size_mb
from kd.ship.export.manifest import ExportManifest
from kd.ship.export.settings import ExportSettings
from kd.tasks import Classification


def test_what_an_export_may_lose() -> None:
    whole, quantised = (
        ExportSettings(int8=int8, min_agreement=99, max_drop=1) for int8 in (False, True)
    )
    found = {"agreement": 0.98, "pictures": 100, "metric": "acc1", "student": 0.80, "export": 0.795,
             "max_difference": 0.1}  # fmt: skip
    assert failure(found, whole).startswith("it agrees with the student on 98.000% of 100 pictures")
    assert failure(found, quantised) == ""
    worse = {**found, "export": 0.7}
    assert "acc1 falls from 80.0% to 70.0%, by more than 1 points" in failure(worse, quantised)
    assert failure({**found, "agreement": 1.0}, whole) == ""


def test_the_size_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(250_000))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(bytes(500_000))
    assert size_mb(tmp_path) == 0.75


def test_two_exports_of_one_run_are_compared_apart() -> None:
    """The second comparison must not count the first one's answers."""
    task = Classification(2)
    task.build(2, None)
    images = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    batch = Batch(image=images, target=torch.zeros(4, dtype=torch.long), index=torch.arange(4))
    manifest = ExportManifest(
        "classification", "a", ["x", "y"], (2, 2), 1.0, [0.5] * 3, [0.5] * 3, "onnx"
    )
    right, wrong = (np.array([row], np.float32) for row in ([1, 0], [0, 1]))
    measured = [
        compare_answers(
            lambda pictures: np.repeat(right, len(pictures), 0),
            lambda pictures: np.repeat(wrong, len(pictures), 0),
            manifest,
            [batch],
            task,
        )
        for _ in range(2)
    ]
    assert [each["student"] for each in measured] == [1.0, 1.0]
    assert [each["export"] for each in measured] == [0.0, 0.0]
    broken = right.repeat(4, 0)
    broken[1, 0] = np.nan  # torch takes it for the largest
    models = (lambda _: right.repeat(4, 0)), (lambda _: broken)
    lost = compare_answers(*models, manifest, [batch], task)
    assert lost["agreement"] == lost["export"] == 1.0
    assert "NaN" in failure(lost, ExportSettings(int8=True, max_drop=1))

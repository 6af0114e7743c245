"""The engines: the same pictures from the same numbers."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kd.cli import train_main
from kd.data import DistillationDataModule
from kd.data.sources import ImageFolder
from kd.errors import needs_extra
from kd.run.settings import Augment
from tests._helpers import draw_folder
from tests._runs import run

PLAIN = Augment(scale=0.3)
ALL = Augment(scale=0.3, color_jitter=0.4, random_erasing=0.5, mixup=0.8, cutmix=1.0)


def batches(pictures: Path, engine: Any, augment: Augment, **kwargs: Any) -> list[dict[str, torch.Tensor]]:
    data = DistillationDataModule(ImageFolder(str(pictures)), 32, 8, engine=engine, augment=augment, **kwargs)
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(3)
    return [data.on_after_batch_transfer(batch, 0) for batch in loader]


PADDED = Augment(pad=4, color_jitter=0.4)


@pytest.mark.parametrize("augment", [PLAIN, ALL, PADDED], ids=["plain", "all", "padded"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_device_engine_gives_the_torch_engines_pictures(pictures: Path, augment: Augment, workers: int) -> None:
    """On the CPU to the last bit: the same transforms with the same parameters, in another place."""
    wanted = batches(pictures, "torch", augment, num_workers=0)
    found = batches(pictures, "device", augment, num_workers=workers)
    assert len(found) == len(wanted) == 6
    for a, b in zip(wanted, found, strict=True):
        assert set(a) == set(b)
        for key in a:
            assert torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])), key


def test_dali_gives_the_torch_engines_pictures_within_a_few_levels(tmp_path: Path) -> None:
    """Upright and rotated JPEG, PNG, grey; the same crop boxes, flips and pairs."""
    pytest.importorskip("nvidia.dali")
    root = draw_folder(tmp_path / "data", size=80)
    first = sorted((root / "train" / "apple").iterdir())
    picture = Image.open(first[0]).resize((300, 200))
    picture.save(first[1].with_suffix(".png"))
    picture.convert("L").save(first[2])
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(first[3], exif=exif)
    for augment in (PLAIN, ALL):
        wanted, found = (batches(root, engine, augment, num_workers=0) for engine in ("torch", "dali"))
        for a, b in zip(wanted, found, strict=True):
            difference = (a["image"].int() - b["image"].int()).abs()
            assert difference.float().mean() < 1
            assert difference.max() <= 16 if augment is PLAIN else True  # a jittered level can be any number of levels
            assert torch.equal(a["target"], b["target"])
            assert torch.equal(a["index"], b["index"])


def test_a_missing_dali_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        pytest.skip("DALI is installed")
    assert train_main([f"recipe={recipe}", "data.engine=dali"]) == 2
    assert f"data.engine: dali {needs_extra('dali')}" in capsys.readouterr().err


def test_rand_augment_stays_with_torch(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_main([f"recipe={recipe}", "data.engine=device", "data.augment.rand_augment=9"]) == 2
    assert "data.augment.rand_augment: needs data.engine=torch, got device" in capsys.readouterr().err


def test_a_run_with_the_device_engine_learns_the_same(recipe: Path, tmp_path: Path) -> None:
    items = ["data.augment.color_jitter=0.3", "data.augment.mixup=0.8", "model.teacher.cache=on"]
    found = []
    for engine in ("torch", "device"):
        cache = [f"model.teacher.cache_dir={tmp_path / engine}", "model.teacher.cache_views=1"]
        folder = run(recipe, *items, *cache, f"data.engine={engine}")
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["cache"]["answers_read"] == 48
        found.append(summary["student"])
    assert found[0] == found[1]

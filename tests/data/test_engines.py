"""The engines: the same pictures from the same numbers."""

import importlib.util
import io
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import resize

from kd.data import transforms
from kd.data.datamodule import DistillationDataModule
from kd.data.engines import at_once, device
from kd.data.sources import ImageFolder, SegmentationFolder
from kd.errors import needs_extra
from kd.settings import Augment
from tests._helpers import Command, draw_folder, refuses
from tests._runs import run, summary_of
from tests._scenes import NAMES, draw

PLAIN = Augment(scale=0.3)
ALL = Augment(scale=0.3, color_jitter=0.4, random_erasing=0.5, mixup=0.8, cutmix=1.0)


def batches(
    pictures: Path, engine: Any, augment: Augment, **kwargs: Any
) -> list[dict[str, torch.Tensor]]:
    data = DistillationDataModule(
        ImageFolder(str(pictures)),
        img_size=32,
        batch_size=8,
        engine=engine,
        augment=augment,
        **kwargs,
    )
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(3)
    return [data.on_after_batch_transfer(batch, 0) for batch in loader]


PADDED = Augment(pad=4, color_jitter=0.4)


def odd_pictures(folder: Path) -> Path:
    """Pictures among which are a PNG, a grey one and a turned JPEG."""
    root = draw_folder(folder / "data", size=80)
    first = sorted((root / "train" / "apple").iterdir())
    picture = Image.open(first[0]).resize((300, 200))
    picture.save(first[1].with_suffix(".png"))
    picture.convert("L").save(first[2])
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(first[3], exif=exif)
    return root


LOADED = Augment(vflip=0.5, rotation=30, repeat=3, color_jitter=0.4, random_erasing=0.5, mixup=0.8)


VIEWS = {"plain": PLAIN, "all": ALL, "padded": PADDED, "loaded": LOADED}
FEW = [("device", 2, views) for views in VIEWS if views != "all"]


@pytest.mark.parametrize(
    ("engine", "workers", "views"),
    [*(("device", 0, views) for views in VIEWS), ("device", 2, "all"),
     *(pytest.param(*few, marks=pytest.mark.slow) for few in FEW)],
)  # fmt: skip
def test_the_device_engine_gives_the_torch_engines_pictures(
    pictures: Path, engine: str, workers: int, views: str
) -> None:
    """On the CPU to the last bit: the same transforms with the same parameters, in another place."""
    augment = VIEWS[views]
    wanted = batches(pictures, "torch", augment, num_workers=0)
    found = batches(pictures, engine, augment, num_workers=workers)
    assert len(found) == len(wanted) == 6
    for a, b in zip(wanted, found, strict=True):
        assert set(a) == set(b)
        for key in a:
            assert torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])), key


def test_turned_grey_and_png_pictures_give_the_torch_engines_views(tmp_path: Path) -> None:
    """A PNG, a grey and a turned JPEG in one batch with others."""
    root = odd_pictures(tmp_path)
    for a, b in zip(
        *(batches(root, engine, ALL, num_workers=0) for engine in ("torch", "device")), strict=True
    ):
        assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)
        assert set(a) == set(b)


def test_a_plan_stays_on_the_host() -> None:
    """Piece by piece it would be copied and sent to the device: of each picture that is erased one tensor."""
    plan = device.Plan([device.Recipe((0, 0, 1, 1), [(1, {"v": torch.ones(1)})])], [])
    assert apply_to_collection({"plan": plan}, torch.Tensor, lambda x: None)["plan"] is plan


@pytest.mark.parametrize("engine", ["torch", "device", "dali"])
@pytest.mark.parametrize("views", VIEWS)
def test_a_loader_process_sends_few_tensors_a_batch(
    pictures: Path, engine: Any, views: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a socket of its own, some 0.6 ms here; a batch of 64 pictures had 67 of them."""
    if engine == "dali":
        pytest.importorskip("nvidia.dali")
    data = DistillationDataModule(
        ImageFolder(str(pictures)), img_size=32, batch_size=8, engine=engine, augment=VIEWS[views]
    )
    loader = data.train_dataloader()
    keys = next(iter(loader.batch_sampler))
    read = loader.dataset.__getitems__ if hasattr(loader.dataset, "__getitems__") else None
    samples = read(keys) if read else [loader.dataset[key] for key in keys]
    batch = loader.collate_fn(samples)

    sent = []

    class Counting(ForkingPickler):
        def reducer_override(self, value: object) -> Any:
            if isinstance(value, torch.Tensor):
                sent.append(value)
            return NotImplemented

    Counting(io.BytesIO()).dump(batch)
    assert 1 <= len(sent) <= 3


@pytest.mark.parametrize("mixed", [{}, {"mixup": 0.8, "cutmix": 1.0}], ids=["not mixed", "mixed"])
def test_a_gpus_large_steps_give_the_same_pictures(
    pictures: Path, mixed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run on the CPU: flipped, erased and mixed at once."""
    augment = Augment(scale=0.3, vflip=0.5, random_erasing=0.5, **mixed)
    wanted = batches(pictures, "torch", augment, num_workers=0)
    monkeypatch.setattr(device.DeviceViews, "_one_by_one", device.DeviceViews._at_once)
    found = batches(pictures, "device", augment, num_workers=0)
    levels = 0
    for a, b in zip(wanted, found, strict=True):
        difference = (a["image"].int() - b["image"].int()).abs()
        assert difference.max() <= 1
        levels += int(difference.sum())
        assert torch.allclose(a["target"], b["target"])
    assert levels <= 3  # mixup's numbers are added in another order


def test_a_gpu_changes_the_colours_of_a_batch_as_torchvision_those_of_each_picture() -> None:
    torch.manual_seed(0)
    smooth = resize(torch.randint(256, (24, 3, 5, 5), dtype=torch.uint8), [40, 48])
    random = torch.randint(256, (24, 3, 40, 48), dtype=torch.uint8)
    grey = torch.randint(256, (24, 1, 40, 48), dtype=torch.uint8).expand(-1, 3, -1, -1)
    transform = v2.ColorJitter(0.4, 0.4, 0.4, 0.1)
    for images in (smooth, random, grey.clone()):
        drawn = [(i, transform.make_params([images[i]])) for i in range(1, 24)]
        expected = images.clone()
        for i, parameters in drawn:
            expected[i] = transform.transform(images[i], parameters)
        assert not torch.equal(expected[1:], images[1:])
        found, _ = at_once.finish(images, [(transform, drawn)], [], None, 1)
        difference = (found.int() - expected.int()).abs()
        # torchvision cuts levels off after each change
        assert difference.max() <= 5
        assert (difference > 2).float().mean() < 0.002
        assert abs((found.float() - expected.float()).mean()) < 0.2
        assert torch.equal(found[0], expected[0])


def test_masks_need_views_that_the_loader_makes(tmp_path: Path) -> None:
    source = SegmentationFolder(str(draw(tmp_path / "scenes", train=2, val=2)), NAMES, 9)
    with refuses(r"data.engine: masks need data.engine=torch or ray, got device"):
        _ = DistillationDataModule(source, augment=PLAIN, engine="device").info


def test_dali_gives_the_torch_engines_pictures_within_a_few_levels(tmp_path: Path) -> None:
    """Upright and rotated JPEG, PNG, grey; the same crop boxes, flips and pairs."""
    pytest.importorskip("nvidia.dali")
    root = odd_pictures(tmp_path)
    loaded = Augment(vflip=0.5, rotation=30, repeat=3, random_erasing=0.5)
    for augment in (PLAIN, ALL, loaded):
        wanted, found = (
            batches(root, engine, augment, num_workers=0) for engine in ("torch", "dali")
        )
        for a, b in zip(wanted, found, strict=True):
            difference = (a["image"].int() - b["image"].int()).abs()
            assert difference.float().mean() < 1
            assert (
                difference.max() <= 16 if augment is PLAIN else True
            )  # a jittered level can be any number of levels
            assert torch.equal(a["target"], b["target"])
            assert torch.equal(a["index"], b["index"])


def test_dali_changes_whole_pictures_as_torch_does(tmp_path: Path) -> None:
    """The case study's load: flips and rotations before the crop, several times; nearest pixels may be neighbours."""
    pytest.importorskip("nvidia.dali")
    root = odd_pictures(tmp_path)
    for repeat, rotation in ((1, 0), (2, 30)):
        augment = Augment(vflip=0.5, rotation=rotation, repeat=repeat, before_resize=True)
        wanted, made = (
            batches(root, engine, augment, num_workers=0) for engine in ("torch", "dali")
        )
        for a, b in zip(wanted, made, strict=True):
            difference = (a["image"].int() - b["image"].int()).abs().float()
            assert difference.mean() < (1 if not rotation else 3)
            assert torch.equal(a["target"], b["target"])


def test_dali_works_on_the_next_batch_beside_the_step(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch comes after the next one is scheduled, the same pictures; an epoch that ends early costs nothing."""
    pytest.importorskip("nvidia.dali")
    from kd.data.engines import dali

    wanted = batches(pictures, "dali", PLAIN, num_workers=0)
    data = DistillationDataModule(
        ImageFolder(str(pictures)),
        img_size=32,
        batch_size=8,
        num_workers=0,
        engine="dali",
        augment=PLAIN,
    )
    loader = data.train_dataloader()
    ahead = dali.OneAhead(loader, data._finish, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(2):
        ahead.batch_sampler.set_epoch(3)
        for number, batch in enumerate(ahead):
            assert len(data._finish._scheduled) == (2 if number < len(ahead) - 1 else 1)  # type: ignore[union-attr]
            made = data.on_after_batch_transfer(batch, 0)
            assert torch.equal(made["image"], wanted[number]["image"])
            if number == 2:
                break
    for number, batch in enumerate(ahead):
        made = data.on_after_batch_transfer(batch, 0)
        assert torch.equal(made["image"], wanted[number]["image"])


def test_a_missing_dali_is_one_line(recipe: Path, refusal: Command) -> None:
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        pytest.skip("DALI is installed")
    assert f"data.engine: dali {needs_extra('dali')}" in refusal(
        "train", [f"recipe={recipe}", "data.engine=dali"]
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_are_changed_before_they_are_cut_where_that_is_set(
    pictures: Path, workers: int
) -> None:
    """The device engine's views are torch's to the last bit, and not those cut first."""
    loaded = {"vflip": 0.5, "rotation": 30, "repeat": 2, "random_erasing": 0.5}
    wanted, found, after = (
        batches(pictures, engine, Augment(**loaded, before_resize=first), num_workers=count)
        for engine, first, count in (
            ("torch", True, 0),
            ("device", True, workers),
            ("torch", False, 0),
        )
    )
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(wanted, found, strict=True))
    assert not torch.equal(wanted[0]["image"], after[0]["image"])


def test_the_load_is_torchvisions_list_so_many_times() -> None:
    chain = transforms.train_transform(
        (32, 32), Augment(vflip=0.5, rotation=30, repeat=2, before_resize=True)
    ).transforms
    names = [type(transform).__name__ for transform in chain]
    unit = ["RandomHorizontalFlip", "RandomVerticalFlip", "RandomRotation"]
    assert names == [*unit, *unit, "RandomResizedCrop"]
    assert chain[2].degrees == [-30.0, 30.0]


def test_dali_changes_no_colours_of_whole_pictures(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, refusal: Command
) -> None:
    monkeypatch.setattr("kd.run.needs._installed", lambda package: True)
    augment = ["data.augment.before_resize=true", "data.augment.color_jitter=0.2"]
    assert (
        "data.augment.before_resize: with data.augment.color_jitter needs data.engine=torch or device, got dali"
        in refusal("train", [f"recipe={recipe}", "data.engine=dali", *augment])
    )


def test_a_run_with_the_device_engine_learns_the_same(recipe: Path, tmp_path: Path) -> None:
    items = ["data.augment.color_jitter=0.3", "data.augment.mixup=0.8", "model.teacher.cache=on"]
    found = []
    for engine in ("torch", "device"):
        cache = [f"model.teacher.cache_dir={tmp_path / engine}", "model.teacher.cache_views=1"]
        folder = run(recipe, *items, *cache, f"data.engine={engine}")
        summary = summary_of(folder)
        assert summary["cache"]["answers_read"] == 48
        found.append(summary["student"])
    assert found[0] == found[1]

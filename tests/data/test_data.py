"""Sources, the order of samples, views, damaged pictures."""

import json
import re
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kd.data.datamodule import DistillationDataModule
from kd.data.pictures import decode
from kd.data.sampler import EvalBatches, TrainBatches
from kd.data.sources import (
    Food101,
    HuggingFace,
    ImageFolder,
    Manifest,
    SegmentationFolder,
    Source,
    WebDataset,
)
from kd.data.splits import DataSpec, Splits
from kd.run.certify import usual_split
from kd.settings import Augment
from tests._files import write_json
from tests._helpers import CLASSES, Command, draw_folder, refuses

# -- order --------


def global_batches(
    world_size: int, epoch: int, batch: int = 12, length: int = 100
) -> list[list[int]]:
    samplers = [
        TrainBatches(length, batch // world_size, 3, rank, world_size) for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [[i for share in shares for i, _ in share] for shares in zip(*samplers, strict=True)]


def test_every_epoch_has_its_own_order_and_no_sample_twice() -> None:
    first, second = (sum(global_batches(2, e), []) for e in (0, 1))
    assert first != second
    assert len(set(first)) == len(first) == 96


def test_a_resumed_epoch_goes_on_behind_the_cursor() -> None:
    whole = list(TrainBatches(100, 12, 3))
    part = TrainBatches(100, 12, 3)
    part.skip(0, 36)
    assert list(part) == whole[3:]
    assert len(part) == 8  # of the whole epoch: Lightning counts from its own progress
    part.set_epoch(1)
    assert len(list(part)) == 8


@pytest.mark.parametrize(("length", "world_size"), [(16, 1), (17, 2), (5, 4), (3, 4)])
def test_evaluation_sees_every_sample_once_on_any_number_of_ranks(
    length: int, world_size: int
) -> None:
    shares = [list(EvalBatches(length, 4, r, world_size)) for r in range(world_size)]
    assert (
        len({tuple(len(b) for b in share) for share in shares}) == 1
    )  # the same collectives on all ranks
    seen = [i for share in shares for batch in share for i, epoch in batch if epoch >= 0]
    assert sorted(seen) == list(range(length))


# -- views --------


def module(pictures: Path, **kwargs: object) -> DistillationDataModule:
    return DistillationDataModule(ImageFolder(str(pictures)), img_size=32, batch_size=8, **kwargs)


STRONG = Augment(color_jitter=0.4, rand_augment=9, random_erasing=0.5, mixup=0.8, cutmix=1.0)


def epoch_of(data: DistillationDataModule, epoch: int) -> list[dict[str, torch.Tensor]]:
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Two batches, to the last pixel."""
    return (
        all(torch.equal(a[k], b[k]) for k in ("image", "target", "index"))
        and a["view"] == b["view"]
    )


def test_views_do_not_depend_on_workers_or_global_seeds(pictures: Path) -> None:
    torch.manual_seed(1)
    one = epoch_of(module(pictures, num_workers=0, augment=STRONG), 4)
    torch.manual_seed(2)
    two = epoch_of(module(pictures, num_workers=2, augment=STRONG), 4)
    for a, b in zip(one, two, strict=True):
        assert equal(a, b)
    other = epoch_of(module(pictures, num_workers=0, augment=STRONG), 5)
    assert not torch.equal(one[0]["image"], other[0]["image"])


def test_the_global_generator_is_left_alone(pictures: Path) -> None:
    data = module(pictures, num_workers=0, augment=STRONG)
    batches = iter(data.train_dataloader())
    torch.manual_seed(0)
    next(batches)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))


def test_a_batch_is_uint8_with_target_and_index(pictures: Path) -> None:
    batch = epoch_of(module(pictures, num_workers=0), 0)[0]
    assert set(batch) == {"image", "target", "index", "view"}
    assert batch["view"] == 0
    assert batch["image"].dtype == torch.uint8
    assert batch["image"].shape == (8, 3, 32, 32)
    assert batch["target"].dtype == batch["index"].dtype == torch.int64
    data = module(pictures, num_workers=0)
    targets = data.split("train").targets
    assert [targets[i] for i in batch["index"]] == batch["target"].tolist()


def test_mixed_targets_are_probabilities_that_fit_the_pictures(tmp_path: Path) -> None:
    """Pictures of one grey each: a mixed picture's mean tells the share that its target must say."""
    for c, grey in enumerate((0, 200)):
        for split in ("train", "val"):
            (tmp_path / split / f"c{c}").mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (40, 40), (grey,) * 3).save(
                    tmp_path / split / f"c{c}" / f"{i}.png"
                )
    for augment in (Augment(mixup=1.0), Augment(cutmix=1.0)):
        for batch in epoch_of(module(tmp_path, num_workers=0, augment=augment), 0):
            assert batch["target"].shape == (8, 2)
            torch.testing.assert_close(batch["target"].sum(1), torch.ones(8))
            share = batch["image"].float().mean((1, 2, 3)) / 200
            torch.testing.assert_close(batch["target"][:, 1], share, atol=0.01, rtol=0)


@pytest.mark.parametrize(("room", "worker", "times"), [(9, None, 3), (2, None, 4), (9, 1, 6)])
def test_small_sets_are_decoded_once_without_loader_workers(
    room: int, worker: object, times: int, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept changes no view."""
    from kd.data import samples
    from kd.data.transforms import train_transform

    split, read = module(pictures, num_workers=0).split("train"), list[int]()
    size = decode(split.read(3)).numel()
    monkeypatch.setattr(samples, "DECODED_BYTES", room * size)
    monkeypatch.setattr(samples, "get_worker_info", lambda: worker)
    views = samples.PictureSet(split, train_transform((32, 32), STRONG), 0)
    keys = [(i, view) for view in range(2) for i in (3, 1, 2)]
    wanted = [samples.PictureSet(split, views.transform, 0)[key] for key in keys]
    monkeypatch.setattr(
        samples, "decode", lambda data, most: (read.append(1), decode(data, most))[1]
    )
    found = views.__getitems__(keys[:3]) + views.__getitems__(keys[3:])
    assert len(read) == times
    for (picture, *label), (other, *own) in zip(found, wanted, strict=True):
        assert label == own and torch.equal(picture, other)


# -- sources --------


def test_food101_as_torchvision_lays_it_out(tmp_path: Path) -> None:
    """The download can't run here; the same class reads a folder in its layout."""
    root = tmp_path / "food-101"
    for name in ("apple_pie", "waffles"):
        (root / "images" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (8, 8)).save(root / "images" / name / f"{i}.jpg")
    (root / "meta").mkdir()
    for split, i in (("train", 0), ("test", 1)):
        write_json(
            root / "meta" / f"{split}.json", {c: [f"{c}/{i}"] for c in ("apple_pie", "waffles")}
        )
    source = Food101(str(tmp_path), download=False)
    assert source.load("train").targets == [0, 1]
    assert source.load("val").name(1).endswith("waffles/1.jpg")
    assert source.classes == ["apple_pie", "waffles"]
    for empty in ("none", "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        with refuses("Food101 in"):
            Food101(str(tmp_path / empty), download=False).load("train")
    assert not (tmp_path / "none").exists()
    assert not list((tmp_path / "there").iterdir())
    with refuses("Food101 in .*File exists"):  # it was no user's error
        Food101(str(root / "meta" / "train.json")).load("train")


def test_hugging_face_reads_a_local_folder(pictures: Path) -> None:
    pytest.importorskip("datasets")
    source = HuggingFace(str(pictures), val="validation")
    train = source.load("train")
    assert source.classes == list(CLASSES)
    assert decode(train.read(0)).shape == (3, 40, 44)
    assert len(source.load("val").targets) == 16
    assert not source.has("other")
    with refuses("split: no pictures of 'other' in .*, which has the splits train, val"):
        source.load("other")
    with refuses("data.source: .*Unknown split .holdin"):  # it was held out of train
        HuggingFace(str(pictures), val="holdin").load("val")


def test_a_row_without_a_label_is_named_and_a_column_of_splits_is_not_read(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for label, split in ((None, "val"), ("a", "train")):
        rows = []
        for i, (its_label, its_split) in enumerate(
            [("a", "train"), ("b", "train"), (label, split)]
        ):
            file = tmp_path / str(label) / "train" / f"{i}.png"
            file.parent.mkdir(exist_ok=True, parents=True)
            Image.new("RGB", (8, 8)).save(file)
            rows.append(
                json.dumps({"file_name": file.name, "label": its_label, "split": its_split})
            )
        (file.parent / "metadata.jsonl").write_text("\n".join(rows))
    with refuses(r"data.source.train: .*\[2\] \(train\) has no label"):
        HuggingFace(str(tmp_path / "None")).load("train")
    source = HuggingFace(str(tmp_path / "a"))
    assert len(source.load("train").targets) == 3 and not source.has("val")
    assert any("the column split is not read" in note for note in source.notes)


def test_a_folder_of_the_same_name_is_another_data_set(tmp_path: Path) -> None:
    """``datasets`` keeps the tables that it makes of a folder."""
    datasets = pytest.importorskip("datasets")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for count in (2, 3):
        folder = tmp_path / str(count) / "set"
        folder.mkdir(parents=True)
        columns = {"image": [str(tmp_path / "a.png")] * count, "label": ["a", "b", "a"][:count]}
        datasets.Dataset.from_dict(columns).to_parquet(str(folder / "train.parquet"))
        assert len(HuggingFace(str(folder)).load("train").targets) == count
    images = [None, *columns["image"], str(tmp_path / "a.png")]
    columns = {"image": images, "label": ["a", "b", "a", "a", "b"]}
    datasets.Dataset.from_dict(columns).to_parquet(str(folder / "train.parquet"))
    changed = HuggingFace(str(folder)).load("train")
    assert len(changed.targets) == 5, "the file has changed"
    with pytest.raises(OSError, match="its row has no picture"):
        changed.read(0)
    for split in (
        "val",
        "test",
    ):  # other pictures, with the same labels, each by its own list of classes
        names = sorted("ab", reverse=split == "val")
        rows = datasets.Dataset.from_dict(columns)
        rows = rows.cast_column("label", datasets.ClassLabel(names=names))
        rows.to_parquet(str(folder / f"{split}.parquet"))
    source = HuggingFace(str(folder))
    assert usual_split(Splits(source, DataSpec())) == "test"
    assert source.load("val").targets == source.load("train").targets
    (folder / "test.parquet").rename(folder / "val-2.parquet")
    with refuses("data.source.path: .*/val.parquet lists other classes than the first file"):
        HuggingFace(str(folder)).load("val")


def test_balanced_classes_come_equally_often(tmp_path: Path) -> None:
    root = draw_folder(tmp_path / "uneven", train=12, val=1)
    for path in sorted((root / "train" / "apple").iterdir())[3:]:
        path.unlink()
    data = module(root, num_workers=0, balance_classes=True)
    targets, seen = np.array(data.split("train").targets), []
    for epoch in range(8):
        order = data._batches(0, 1).order(epoch)
        assert len(order) == len(targets) == 39
        counts = Counter(targets[order].tolist())
        assert max(counts.values()) - min(counts.values()) <= 1
        seen += order.tolist()
    assert set(seen) == set(range(39))
    shown: dict[int, list[torch.Tensor]] = {}
    for batch in epoch_of(data, 0):
        assert [targets[i] for i in batch["index"]] == batch["target"].tolist()
        for i, image in zip(batch["index"].tolist(), batch["image"], strict=True):
            assert not any(
                torch.equal(image, other) for other in shown.setdefault(i, [])
            )  # repeated, as another view
            shown[i].append(image)
    assert max(map(len, shown.values())) > 1
    with refuses("data.balance_classes: needs one label a picture"):
        _ = module(root, balance_classes=True, unlabeled=str(root)).info


# -- sources without validation pictures --------


def test_a_part_of_train_is_held_out_where_there_is_no_val(
    recipe: Path, tmp_path: Path, prints: Command
) -> None:
    root = draw_folder(tmp_path / "own", train=10, val=1)
    (root / "train" / "apple" / "x.heic").write_bytes(b"")
    shutil.rmtree(root / "val")
    data = module(root, val_fraction=0.2)
    train, val = (data.split(name) for name in ("train", "val"))
    assert Counter(train.targets) == dict.fromkeys(range(4), 8)
    assert Counter(val.targets) == dict.fromkeys(range(4), 2)
    names = [{split.name(i) for i in range(len(split.targets))} for split in (train, val)]
    assert len(names[0] | names[1]) == 40
    again, other = (
        module(root, val_fraction=0.2, seed=0).split("val"),
        module(root, val_fraction=0.2, seed=1).split("val"),
    )
    assert again.keep.tolist() == val.keep.tolist() != other.keep.tolist()
    for wrong in (0, 1):
        with pytest.raises(ValueError, match="val_fraction must be > 0 and < 1"):
            module(root, val_fraction=wrong)

    out = prints("train", [f"recipe={recipe}", f"data.source.root={root}", "trainer.max_epochs=1"])
    assert "36 training and 4 validation pictures, 4 classes; left out: 1 of .heic" in out
    assert (
        "no validation pictures found: 4 training pictures are held out (data.val_fraction)" in out
    )
    with refuses("folder .*/valid not found"):
        DistillationDataModule(ImageFolder(str(root), val="valid")).prepare_data()


def test_other_sources_without_validation_pictures(tmp_path: Path, pictures: Path) -> None:
    rows = "".join(f"{p},{p.parent.name}\n" for p in sorted((pictures / "train").rglob("*.jpg")))
    (tmp_path / "m.csv").write_text("path,label\n" + rows)
    (tmp_path / "masks").mkdir()
    for folder in ("images", "masks"):
        (tmp_path / folder / "train").mkdir(parents=True)
        for i in range(10):
            Image.new("L", (8, 8)).save(tmp_path / folder / "train" / f"{i}.png")
    for source, sizes in (
        (Manifest(str(tmp_path / "m.csv")), (44, 4)),
        (SegmentationFolder(str(tmp_path), ["a", "b"]), (9, 1)),
    ):
        data = DistillationDataModule(source, img_size=8, batch_size=2, num_workers=0)
        data.prepare_data()
        assert (data.info.train, data.info.val) == sizes
        assert data.splits.holds_out


# -- damaged pictures --------


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_messages_name_the_split_of_a_damaged_picture(tmp_path: Path, kind: str) -> None:
    """By the check, when it is left out, and when it is damaged after the check; in the loader's workers too."""
    root = draw_folder(tmp_path / "damaged", train=4, val=4)
    source: Source = ImageFolder(str(root))
    if kind == "shards":
        for name in ("train", "val"):
            with tarfile.open(root / f"{name}.tar", "w") as tar:
                for i, path in enumerate(ImageFolder(str(root)).load(name).paths):
                    tar.add(path, f"{i:02d}.jpg")
                    (root / "label").write_text(Path(path).parent.name)
                    tar.add(root / "label", f"{i:02d}.txt")
        source = WebDataset(str(root / "train.tar"), str(root / "val.tar"), label="txt")
    more = draw_folder(tmp_path / "more", train=4, val=1) / "train"
    bad = {
        "train": root / "train/apple/00.jpg",
        "val": root / "val/bread/01.jpg",
        "unlabeled": more / "apple/00.jpg",
    }
    later = DistillationDataModule(
        source, img_size=32, batch_size=8, unlabeled=str(more), unlabeled_ratio=1.0, num_workers=1
    )
    later.prepare_data()
    for part, file in bad.items():
        whole = file.read_bytes()
        place, name = file, file.name
        if kind == "shards" and part != "unlabeled":
            place = root / f"{part}.tar"
            name = "00" if part == "train" else "05"
        content = place.read_bytes()
        assert content.count(whole) == 1
        place.write_bytes(content.replace(whole, whole[:20] + bytes(len(whole) - 20)))
        named = rf"{part}: \S*{name}\S* "
        options = {"img_size": 32, "batch_size": 8, "unlabeled": str(more)}
        key = "data.unlabeled" if part == "unlabeled" else "data.source"
        with refuses(rf"{key}: 1 damaged picture: {named}\("):
            DistillationDataModule(source, **options).prepare_data()
        skipping = DistillationDataModule(source, on_bad_image="skip", **options)
        skipping.prepare_data()
        assert len(skipping.splits.skipped) == 1 and re.match(named, skipping.splits.skipped[0])
        loader = later.val_dataloader() if part == "val" else None
        with pytest.raises(RuntimeError, match=rf"{named}can't be read: "):
            list(loader) if loader else epoch_of(later, 0)
        place.write_bytes(content)


def test_formats_and_colour_modes(tmp_path: Path) -> None:
    rgb = Image.fromarray(np.random.RandomState(0).randint(0, 255, (9, 7, 3), np.uint8))
    for name, mode in (
        ("a.png", "RGBA"),
        ("b.png", "L"),
        ("c.png", "P"),
        ("d.bmp", "RGB"),
        ("e.jpg", "CMYK"),
        ("f.webp", "RGB"),
        ("g.tiff", "RGB"),
    ):
        rgb.convert(mode).save(tmp_path / name)
        picture = decode((tmp_path / name).read_bytes())
        assert (picture.dtype, picture.shape) == (torch.uint8, (3, 9, 7)), name


def test_a_turned_photograph_is_set_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 4)).save(tmp_path / "t.jpg", exif=exif)
    assert decode((tmp_path / "t.jpg").read_bytes()).shape == (3, 8, 4)

"""The parts of the data room one by one, without a run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kd.data.datamodule import Position, check_same_samples
from kd.data.sources.base import Source, Subset, bytes_of, content, fingerprint, identity, size_of
from kd.data.sources.files import FileSplit, printable, said
from kd.data.sources.folder import ImageFolder, class_folders, labelled_folder
from kd.data.sources.labels import in_order
from kd.data.sources.manifest import Manifest
from kd.data.splits import held_out, info_of
from kd.data.targets import LabelSets, Masks, Targets
from kd.data.transforms import CORRUPTIONS, STRENGTHS, corrupted
from kd.errors import UserError
from kd.settings import Augment


def picture(path: Path, size: tuple[int, int] = (8, 6), color: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


@pytest.mark.parametrize(("counts", "fraction", "expected"), [
    ([10, 10], 0.1, [1, 1]), ([10, 40], 0.25, [2, 10]), ([2, 1], 0.1, [1, 0]), ([3, 3], 0.99, [2, 2]),
])  # fmt: skip
def test_of_each_class_a_share_is_held_out_but_never_its_last_picture(
    counts: list[int], fraction: float, expected: list[int]
) -> None:
    targets = [label for label, count in enumerate(counts) for _ in range(count)]
    chosen = held_out(targets, fraction, seed=3)
    assert [sum(targets[i] == label for i in chosen) for label in range(len(counts))] == expected
    assert np.array_equal(chosen, held_out(targets, fraction, seed=3)), "the same for every process"


def test_pictures_with_several_labels_are_held_out_from_all_alike() -> None:
    assert len(held_out([[0], [0, 1], [1], [0]], 0.5, seed=0)) == 2


class Known(Source):
    def __init__(self, classes: list[str], kind: Targets | None = None) -> None:
        self.classes, self.kind = classes, kind or Targets()


def info(source: Source, augment: Augment | None = None, balance: bool = False, unlabeled: int = 0,
         ratio: float | None = None, targets: list[int] | None = None):  # type: ignore[no-untyped-def]  # fmt: skip
    sizes = {"train": 4, "val": 2, "unlabeled": unlabeled}
    return info_of(
        source, sizes, targets or [0, 1, 1, 1], augment or Augment(), 0.875, ratio, balance
    )


def test_classes_are_counted_where_a_picture_has_one_label() -> None:
    assert info(Known(["a", "b", "c"])).counts == [1, 3, 0]
    assert info(Known(["a", "b"]), balance=True).counts is None, "all are seen equally often"
    assert info(Known(["a", "b"], LabelSets())).counts is None


@pytest.mark.parametrize(("source", "settings", "message"), [
    (Known(["a"]), {}, "data.source: needs two classes or more, got one"),
    (Known([]), {"unlabeled": 3, "ratio": 1.0}, "data.unlabeled"),
    (Known(["a", "b"], Masks()), {"augment": Augment(mixup=0.2)}, "data.augment.mixup"),
    (Known(["a", "b"], LabelSets()), {"augment": Augment(cutmix=0.2)}, "data.augment.cutmix"),
    (Known(["a", "b"], Masks()), {"balance": True}, "data.balance_classes"),
    (Known(["a", "b"]), {"balance": True, "unlabeled": 3, "ratio": 1.0, "augment": Augment(mixup=0.2)},
     "data.balance_classes"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_data_are_refused_by_key(
    source: Source, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        info(source, **settings)  # type: ignore[arg-type]


def test_a_position_without_a_run_is_empty_and_a_saved_one_is_restored() -> None:
    position = Position()
    assert position.state(None) == {}
    position.load({}, None)
    assert position.at is None
    position.load({"epoch": 2, "samples": 64}, None)
    assert position.at == (2, 64)


@pytest.mark.parametrize(("changed", "key"), [
    ({"seed": 1}, "seed"), ({"unlabeled_ratio": 2.0}, "data.unlabeled_ratio"),
    ({"balance_classes": True}, "data.balance_classes"), ({"content": "other", "train": 9}, "data.source"),
])  # fmt: skip
def test_a_resume_with_other_samples_names_the_key(changed: dict[str, object], key: str) -> None:
    before = {
        "seed": 0,
        "unlabeled_ratio": None,
        "balance_classes": False,
        "content": "x",
        "train": 10,
    }
    check_same_samples(before, before)
    check_same_samples({}, before)  # older runs did not say
    with pytest.raises(UserError, match=f"^{key}"):
        check_same_samples(before, before | changed)


def test_a_split_of_files_knows_sizes_stamps_and_a_subset_keeps_them(tmp_path: Path) -> None:
    paths = [picture(tmp_path / f"{i}.png", (8 + i, 8)) for i in range(3)]
    split = FileSplit(paths, [0, 1, 0])
    some = Subset(split, [2, 0])
    assert some.targets == [0, 0]
    assert some.name(0) == str(paths[2])
    assert some.read(0) == paths[2].read_bytes()
    assert size_of(some, 1) == split.size(0) == paths[0].stat().st_size
    assert some.stamp(0) == split.stamp(2) != split.stamp(0)
    assert split.store is None


def test_the_identity_of_a_split_follows_labels_and_content_not_the_folder(tmp_path: Path) -> None:
    here = FileSplit([picture(tmp_path / "a" / "x.png")], [0])
    there = FileSplit([picture(tmp_path / "b" / "x.png")], [0])
    assert identity(here) == identity(there)
    assert fingerprint(here) != fingerprint(there)
    assert identity(FileSplit(here.paths, [1])) != identity(here)
    assert content(FileSplit(here.paths, [1])) == content(here), "whatever the labels"


def test_names_and_left_out_files_are_printable() -> None:
    assert printable("caf\udce9.jpg") == "caf\\udce9.jpg"
    assert said({}) == ""
    assert said({".txt": 1, ".heic": 20}).startswith("; left out: 20 of .heic")


@pytest.mark.parametrize("given", [0, -1])
def test_a_bound_of_the_local_cache_is_positive(given: float) -> None:
    assert bytes_of(None) is None
    assert bytes_of(0.5) == 500_000_000
    with pytest.raises(ValueError, match="cache_gb must be > 0"):
        bytes_of(given)


def test_class_folders_are_sorted_and_hidden_ones_left_out(tmp_path: Path) -> None:
    for name in ("b", "a", ".cache"):
        picture(tmp_path / name / "1.png")
    assert class_folders(str(tmp_path), "data.source.root") == ["a", "b"]
    split = labelled_folder(str(tmp_path), ["a", "b"], "data.source.root")
    assert split.targets == [0, 1]
    with pytest.raises(
        UserError, match="data.source.root: 1 label not in the training pictures: 'b'"
    ):
        labelled_folder(str(tmp_path), ["a"], "data.source.root")
    with pytest.raises(UserError, match="data.source.root: there is no folder"):
        class_folders(str(tmp_path / "none"), "data.source.root")


@pytest.mark.parametrize("folder", ["val", "valid", "validation", "test"])
def test_validation_folders_by_their_usual_names(tmp_path: Path, folder: str) -> None:
    picture(tmp_path / "train" / "a" / "1.png")
    picture(tmp_path / folder / "a" / "2.png")
    source = ImageFolder(str(tmp_path))
    assert source.has("val")
    assert len(source.load("val").targets) == 1


def test_a_flat_folder_is_the_training_split(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / name / "1.png")
    source = ImageFolder(str(tmp_path))
    assert not source.has("val")
    assert source.load("train").targets == [0, 1]


def test_a_manifest_orders_its_classes_by_value_and_names_an_unknown_label(tmp_path: Path) -> None:
    picture(tmp_path / "1.png")
    (tmp_path / "train.csv").write_text("path,label\n1.png,10\n2.png,9\n")
    (tmp_path / "val.csv").write_text("path,label\n1.png,8\n")
    source = Manifest(str(tmp_path / "train.csv"), str(tmp_path / "val.csv"))
    assert source.load("train").targets == [1, 0]
    assert source.classes == in_order(["9", "10"]) == ["9", "10"]
    with pytest.raises(
        UserError, match=r"data.source.val: 1 label not in the training pictures: '8'"
    ):
        source.load("val")
    with pytest.raises(ValueError, match="delimiter must be one character"):
        Manifest("a.csv", delimiter="ab")


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_damage_grows_with_its_strength(name: str) -> None:
    pictures = torch.randint(
        0, 256, (2, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    damaged = [next(iter(corrupted([{"image": pictures}], name, s)))["image"] for s in STRENGTHS]  # type: ignore[list-item, typeddict-item]
    away = [(d.float() - pictures.float()).square().mean() for d in damaged]
    assert all(d.dtype == torch.uint8 and d.shape == pictures.shape for d in damaged)
    assert 0 < away[0] < away[1] < away[2]

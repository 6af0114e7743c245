"""What a source lacks is completed: held-out pictures, and settings that fit the data."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from kd.data.sources import FileSplit, ImageFolder
from kd.data.sources.arrays import Column
from kd.data.sources.base import Source, split_facts
from kd.data.splits import DataSpec, Splits, held_out, info_of
from kd.data.targets import LabelSets, Masks, Numbers, Targets
from kd.settings import Augment
from tests._helpers import draw_folder, refuses


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


def test_one_picture_of_each_class_leaves_none_to_validate(tmp_path: Path) -> None:
    draw_folder(tmp_path, train=1, val=1)
    shutil.rmtree(tmp_path / "val")
    data = Splits(ImageFolder(str(tmp_path)), DataSpec())
    with refuses("one picture of each of its 4 classes"):
        data.listed("val")


def test_pictures_that_are_held_out_later_are_hashed_anew(tmp_path: Path) -> None:
    data = Splits(ImageFolder(str(draw_folder(tmp_path, train=4))), DataSpec(check="off"))
    before = data.facts("train")
    data.validate_in_training(0.5)
    assert data.facts("train") == split_facts(data.split("train")) != before


def test_a_missing_number_is_no_other_label() -> None:
    data = Splits(Known([], Numbers()), DataSpec())
    data._splits["train"] = FileSplit(["a", "a"], Column(np.full((2, 1), np.nan)))
    data._digests["train"] = ["of a", "of a"]
    data._doubt_labels()
    assert not data.source.notes


class Known(Source):
    def __init__(self, classes: list[str], kind: Targets | None = None) -> None:
        self.classes, self.kind = classes, kind or Targets()


def info(source: Source, augment: Augment | None = None, balance: bool = False, unlabeled: int = 0,
         ratio: float | None = None, targets: list[int] | None = None):  # type: ignore[no-untyped-def]  # fmt: skip
    sizes = {"train": 4, "val": 2, "unlabeled": unlabeled}
    given = DataSpec(augment=augment, unlabeled="x", unlabeled_ratio=ratio, balance_classes=balance)
    return info_of(source, sizes, targets or [0, 1, 1, 1], given)


def test_classes_are_counted_where_a_picture_has_one_label() -> None:
    assert info(Known(["a", "b", "c"])).counts == [1, 3, 0]
    assert info(Known(["a", "b"]), balance=True).counts is None, "all are seen equally often"
    assert info(Known(["a", "b"], LabelSets())).counts is None


@pytest.mark.parametrize(("source", "settings", "message"), [
    (Known(["a"]), {}, "data.source: needs two classes or more, got one"),
    (Known([]), {"unlabeled": 3, "ratio": 1.0}, "data.unlabeled:"),
    (Known(["a", "b"]), {"unlabeled": 2, "ratio": 0.2}, "data.unlabeled_ratio: 0.2 takes 0 .* one at least"),
    (Known(["a", "b"]), {"unlabeled": 2, "ratio": 1.8, "augment": Augment(mixup=0.2)},
     "data.unlabeled_ratio: 1.8 takes 4 .* cutmix no more than there are, 2$"),
    (Known(["a", "b"], Masks()), {"augment": Augment(mixup=0.2)}, "data.augment.mixup"),
    (Known(["a", "b"], LabelSets()), {"augment": Augment(cutmix=0.2)}, "data.augment.cutmix"),
    (Known(["a", "b"], Masks()), {"balance": True}, "data.balance_classes"),
    (Known(["a", "b"]), {"balance": True, "unlabeled": 3, "ratio": 1.0, "augment": Augment(mixup=0.2)},
     "data.balance_classes"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_data_are_refused_by_key(
    source: Source, settings: dict[str, object], message: str
) -> None:
    with refuses(message):
        info(source, **settings)  # type: ignore[arg-type]

"""Pictures without labels, alone and beside labelled ones."""

import json
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from kd.cli import train_main
from kd.data.datamodule import DistillationDataModule
from kd.data.pack import pack
from kd.data.sampler import TrainBatches
from kd.data.sources import HuggingFace, ImageFolder, Manifest, Pictures, Shards
from kd.data.splits import files_of
from kd.settings import Augment
from kd.tasks import Classification
from tests._helpers import Command, draw_folder, refuses
from tests._runs import (
    assert_same_runs,
    resumed,
    run_folders,
    student_of,
    summary_of,
)


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 pictures at some depth, in folders whose names say nothing about splits."""
    root = draw_folder(tmp_path_factory.mktemp("more") / "a" / "b")
    (root / "train").rename(root / "first")
    (root / "val").rename(root / "second")
    return root / ".."


@pytest.mark.parametrize(("ratio", "per_epoch"), [(0.5, 30), (1.0, 40), (2.0, 60)])
def test_the_ratio_holds_and_every_picture_comes_equally_often(
    ratio: float, per_epoch: int
) -> None:
    batches = TrainBatches(20, 1, 0, unlabelled=15, ratio=ratio)
    seen: Counter[int] = Counter()
    for epoch in range(6):
        order = batches.order(epoch)
        assert len(order) == len(batches) == per_epoch
        assert sorted(i for i in order if i < 20) == list(range(20))
        seen.update(int(i) for i in order if i >= 20)
    assert sum(seen.values()) == 6 * (per_epoch - 20)
    assert max(seen.values()) - min(seen[i] for i in range(20, 35)) <= 1


@pytest.mark.parametrize(
    ("labelled", "unlabelled", "ratio"), [(20, 5, 0.25), (20, 15, 0.5), (21, 7, 0.3)]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_where_pairs_come_again_a_picture_has_one_partner_a_view(
    labelled: int, unlabelled: int, ratio: float, world_size: int
) -> None:
    """A cached answer belongs to (index, view): the mixture behind it must be one, in every epoch that shows it."""
    partner: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in range(world_size):
        batches = TrainBatches(
            labelled,
            4,
            0,
            rank,
            world_size,
            unlabelled=unlabelled,
            ratio=ratio,
            views=2,
            paired=True,
        )
        live = TrainBatches(
            labelled, 4, 0, rank, world_size, unlabelled=unlabelled, ratio=ratio, paired=True
        )
        assert [[i for i, _ in keys] for keys in live] == [[i for i, _ in keys] for keys in batches]
        for epoch in range(6):
            batches.set_epoch(epoch)
            order = batches.order(epoch)
            assert len(order) == batches.epoch_length()
            assert set(range(labelled)) <= set(order.tolist())
            for batch in batches:
                assert len(batch) == 4
                for first, second in zip(batch[::2], batch[1::2], strict=True):
                    assert partner.setdefault(first, second) == second
                    assert partner.setdefault(second, first) == first


def test_alone_only_they_are_seen_once_each() -> None:
    batches = TrainBatches(20, 1, 0, unlabelled=15)
    assert sorted(batches.order(3)) == list(range(20, 35))


def test_the_order_is_the_same_for_every_number_of_processes() -> None:
    one = [key for batch in TrainBatches(20, 4, 0, unlabelled=15, ratio=1.0) for key in batch]
    ranks = [list(TrainBatches(20, 2, 0, rank, 2, 15, 1.0)) for rank in (0, 1)]
    assert one == [key for pair in zip(*ranks, strict=True) for batch in pair for key in batch]


def test_a_picture_that_comes_again_in_an_epoch_shows_another_view() -> None:
    """As often as the ratio asks for; not where a cache wants the views again."""
    batches = TrainBatches(20, 4, 0, unlabelled=5, ratio=1.0)
    epochs = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        epochs.append(Counter(key for keys in batches for key in keys))
        turns = Counter(index for index, _ in epochs[-1])
        assert max(turns.values()) >= 3
        assert max(epochs[-1].values()) == 1
    assert not epochs[0] & epochs[1]
    assert not epochs[1] & epochs[2]
    cached = TrainBatches(20, 4, 0, unlabelled=5, ratio=1.0, views=2)
    assert {view for keys in cached for _, view in keys} == {0}


def test_mixed_batches_and_their_task_loss(pictures: Path, unlabelled: Path) -> None:
    data = DistillationDataModule(
        ImageFolder(str(pictures)), img_size=32, batch_size=32, num_workers=0, unlabeled=str(unlabelled),
        unlabeled_ratio=1.0,
    )  # fmt: skip
    assert data.info.train == 48 + 64
    assert data.info.unlabeled == 64
    batch = next(iter(data.train_dataloader()))
    known = batch["target"] >= 0
    assert torch.equal(known, batch["index"] < 48)
    assert 0 < known.sum() < 32
    task, logits = Classification(), torch.randn(32, 4, requires_grad=True)
    wanted = torch.nn.functional.cross_entropy(logits[known], batch["target"][known])
    torch.testing.assert_close(task.loss(logits, batch["target"]), wanted)
    nothing = task.loss(logits, torch.full((32,), -1))
    nothing.backward()
    assert nothing.item() == 0


def test_a_picture_mixed_with_an_unlabelled_one_has_no_label(
    pictures: Path, unlabelled: Path
) -> None:
    data = DistillationDataModule(
        ImageFolder(str(pictures)), img_size=32, batch_size=32, num_workers=0, unlabeled=str(unlabelled),
        unlabeled_ratio=1.0, augment=Augment(mixup=1.0),
    )  # fmt: skip
    batch = next(iter(data.train_dataloader()))
    sums = batch["target"].sum(1)
    for i in range(0, 32, 2):
        both = bool((batch["index"][i : i + 2] < 48).all())
        np.testing.assert_allclose(sums[i : i + 2], float(both), atol=1e-6)
    data.load_state_dict({"epoch": 1, "samples": 32, "order": "of pictures that are not mixed"})
    with refuses("^resume: .* data.augment.mixup and cutmix "):
        data.train_dataloader()


def test_runs(recipe: Path, unlabelled: Path, prints: Command) -> None:
    assert "training on the unlabelled pictures alone: no task loss" in prints(
        "train", [f"recipe={recipe}", f"data.unlabeled={unlabelled}", "trainer.max_epochs=1"]
    )
    alone = run_folders(recipe)[-1]
    header = (alone / "metrics.csv").read_text().splitlines()[0]
    assert "train/kd_loss" in header
    assert "task_loss" not in header
    assert summary_of(alone)["steps"] == 8
    beside = [
        f"recipe={recipe}",
        f"data.unlabeled={unlabelled}",
        "data.unlabeled_ratio=1",
        "data.num_workers=1",
    ]
    assert train_main([*beside, "trainer.max_epochs=1"]) == 0
    both = run_folders(recipe)[-1]
    summary = summary_of(both)
    assert summary["steps"] == 12
    assert summary["data"]["unlabeled"] == 64
    assert "train/task_loss" in (both / "metrics.csv").read_text()


# -- pictures to measure with are not trained on --------


@pytest.mark.parametrize(
    "names",
    [("train", "val"), ("Training", "Testing"), ("extra", "valid_set"), ("train2017", "dev")],
    ids="/".join,
)
@pytest.mark.parametrize("depth", ["", "a/b"])
@pytest.mark.parametrize("reader", ["data.unlabeled", "Pictures"])
def test_folders_of_other_splits_are_left_out(
    pictures: Path, tmp_path: Path, names: tuple[str, str], depth: str, reader: str
) -> None:
    """By both readers of unlabelled pictures, at any depth, with a line that counts them."""
    root = draw_folder(tmp_path / "more" / depth)
    for old, new in zip(("train", "val"), names, strict=True):
        (root / old).rename(root / new)
    if reader == "Pictures":
        data = DistillationDataModule(
            Pictures(str(tmp_path / "more")), img_size=32, batch_size=8, num_workers=0
        )
        assert (data.info.train, data.info.val) == (43, 5)
    else:
        data = DistillationDataModule(
            ImageFolder(str(pictures)), img_size=32, batch_size=8, num_workers=0,
            unlabeled=str(tmp_path / "more"),
        )  # fmt: skip
        assert data.info.unlabeled == 48
    (line,) = [note for note in data.source.notes if "left out" in note]
    assert "16 of 64 pictures" in line
    assert f"({Path(depth, names[1])})" in line


def test_a_folder_of_test_pictures_is_trained_on_where_it_is_named_itself(
    pictures: Path, tmp_path: Path
) -> None:
    root = draw_folder(tmp_path / "more")
    shutil.rmtree(root / "train")

    def unlabelled_of(folder: Path) -> int:
        return DistillationDataModule(
            ImageFolder(str(pictures)), img_size=32, batch_size=8, num_workers=0,
            unlabeled=str(folder),
        ).info.unlabeled  # fmt: skip

    assert unlabelled_of(root / "val") == 16
    with refuses(r"all 16 pictures below .* validation or test pictures \(val\)"):
        unlabelled_of(root)


@pytest.mark.parametrize("source_has_val", [True, False])
def test_validation_pictures_of_the_source_are_left_out(
    tmp_path: Path, source_has_val: bool
) -> None:
    """Below a name that says nothing, through a link, held out of the training pictures too."""
    root = draw_folder(tmp_path / "data")
    (root / "val").rename(root / "second")
    validation = {"val": "second"} if source_has_val else {}
    (root / "train" / "again.png").symlink_to(next(root.glob("second/apple/*")))
    (tmp_path / "link").symlink_to(root)
    data = DistillationDataModule(
        ImageFolder(str(root), train="train", **validation), img_size=32, batch_size=8,
        num_workers=0, unlabeled=str(tmp_path / "link"),
    )  # fmt: skip
    shown = files_of(data.split("val"))
    assert shown
    trained = files_of(data.splits.parts("train")[1])
    assert not trained & shown
    assert len(trained) == 64 - len(shown)
    data.splits.validate_in_training(0.5)
    assert not files_of(data.splits.parts("train")[1]) & files_of(data.split("val"))


def test_a_killed_run_goes_on_where_it_was(recipe: Path, unlabelled: Path) -> None:
    items = [f"recipe={recipe}", f"data.unlabeled={unlabelled}", "data.unlabeled_ratio=1", "checkpoint.every_n_steps=1",
             "trainer.max_epochs=1"]  # fmt: skip
    assert train_main(items) == 0
    stop = json.dumps({"class_path": "tests._stop.FailAtStep", "init_args": {"step": 5}})
    assert train_main([*items, f"trainer.callbacks+={stop}"]) == 1
    whole, part = run_folders(recipe)[-2:]
    resumed(part, "trainer.callbacks=null")
    assert_same_runs(part, whole)


# -- sources without any label --------


def test_sources_without_labels(unlabelled: Path, tmp_path: Path) -> None:
    """One set as a folder, a list, a pack and a Hugging Face set: the same pictures, a part of them held out."""
    files = sorted(str(p) for p in unlabelled.resolve().rglob("*.jpg"))
    (tmp_path / "m.csv").write_text("path\n" + "".join(f"{p}\n" for p in files))
    (tmp_path / "m.jsonl").write_text("".join(json.dumps({"path": p}) + "\n" for p in files))
    folder = Pictures(str(unlabelled.resolve()))
    pack(folder.load("train"), [], str(tmp_path / "pack"), "train")
    sources = [folder, Manifest(str(tmp_path / "m.csv")), Manifest(str(tmp_path / "m.jsonl")),
               Shards(str(tmp_path / "pack"))]  # fmt: skip
    shown = []
    for source in sources:
        data = DistillationDataModule(
            source, img_size=32, batch_size=8, num_workers=0, augment=Augment(mixup=0.8)
        )
        data.prepare_data()
        info = data.info
        assert (info.classes, info.labels, info.train, info.val, info.unlabeled) == (
            [],
            False,
            58,
            6,
            58,
        ), source
        shown.append(next(iter(data.train_dataloader()))["image"])
        assert (next(iter(data.val_dataloader()))["target"] == -1).all()
    assert all(torch.equal(images, shown[0]) for images in shown)
    if find_spec("datasets"):
        theirs = HuggingFace(str(unlabelled.resolve()), val=None, label_column=None)
        info = DistillationDataModule(theirs, img_size=32, batch_size=8, num_workers=0).info
        assert (info.classes, info.train, info.val) == ([], 58, 6)
    own = Pictures(str(unlabelled), val=str(unlabelled))
    data = DistillationDataModule(own, img_size=32, batch_size=8, num_workers=0)
    assert (data.info.train, data.info.val) == (64, 64)


def test_accumulated_batches_with_few_labels_learn_what_one_batch_does(
    recipe: Path, unlabelled: Path
) -> None:
    """2 batches of 4 = 1 batch of 8: each of two batches has other numbers of labelled pictures."""
    same = [
        f"recipe={recipe}", f"data.unlabeled={unlabelled}", "data.unlabeled_ratio=1",
        "optim.name=sgd", "optim.lr=0.02", "trainer.max_steps=5", "data.num_workers=1",
        "trainer.precision=32-true",
    ]  # fmt: skip
    assert train_main([*same, "data.batch_size=8"]) == 0
    assert train_main([*same, "data.batch_size=4", "trainer.accumulate_grad_batches=2"]) == 0
    whole, accumulated = (student_of(folder) for folder in run_folders(recipe))
    for name, weights in whole.items():
        torch.testing.assert_close(accumulated[name], weights, rtol=1e-3, atol=1e-5, msg=name)

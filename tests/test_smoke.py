"""What people type first: short runs neither refuse a fine teacher nor end without a figure."""

from pathlib import Path

import numpy as np
import pytest

from kd.cli import train_main
from kd.data.datamodule import DistillationDataModule
from kd.data.sampler import EvalBatches, TrainBatches
from kd.data.sources import ImageFolder
from tests._helpers import Command, write_recipe
from tests._runs import run_folders, summary_of

FOOD = [
    "recipe=foodtag_vit",
    "data.source.train_per_class=4",
    "data.source.val_per_class=8",
    "data.batch_size=8",
]


@pytest.mark.parametrize(
    "item", ["trainer.fast_dev_run=true", "trainer.limit_val_batches=2", "config=debug"]
)
def test_a_short_run_accepts_a_fine_teacher(item: str, tmp_path: Path, prints: Command) -> None:
    """The pictures are sorted by class: the first eight show one of the twenty."""
    out = prints(
        "train", [*FOOD, item, "preflight=stop", "trainer.max_epochs=1", f"runs_dir={tmp_path}"]
    )
    assert "preflight: teacher vit_tiny_patch16_224 is right on" in out
    assert "no better than guessing" not in out
    assert ("8 of 20 classes, too few to judge it" in out) == (item == "trainer.fast_dev_run=true")
    assert "an epoch is limited: " in out


@pytest.mark.parametrize("limit", [1, 3, 0.25])
def test_a_limited_validation_is_spread_over_the_whole_split(limit: float) -> None:
    length, size, ranks = 800, 10, 2
    shares = [EvalBatches(length, size, rank, ranks, limit, seed=3) for rank in range(ranks)]
    used = [index for share in shares for batch in list(share)[: share.used] for index, _ in batch]
    assert len(set(used)) == len(used) == shares[0].used * size * ranks
    gaps = np.diff([0, *sorted(used), length])
    assert gaps.max() <= 3 * length / len(used)
    alone = EvalBatches(length, size * ranks, 0, 1, limit, seed=3)
    assert set(used) == {index for batch in list(alone)[: alone.used] for index, _ in batch}
    assert set(used) != {
        i for batch in list(EvalBatches(length, 20, 0, 1, limit, 4))[: alone.used] for i, _ in batch
    }
    whole = [index for batch in shares[0] for index, _ in batch]
    assert sorted(whole + [index for batch in shares[1] for index, _ in batch]) == list(
        range(length)
    )


def test_a_whole_validation_stays_in_order() -> None:
    assert [i for batch in EvalBatches(20, 4, limit=5) for i, _ in batch] == list(range(20))


def test_without_a_preflight_the_same_epoch_is_exported(recipe: Path) -> None:
    """Of epochs within one standard error the one nearest to the teacher: its answers are kept either way."""
    items = [
        f"recipe={recipe}",
        "trainer.precision=32-true",
        "trainer.max_epochs=4",
        "optim.lr=0.01",
    ]
    for value in ("warn", "off"):
        assert train_main([*items, f"preflight={value}"]) == 0
    with_one, without = (summary_of(run) for run in run_folders(recipe))
    best = [summary["student"]["best_val"] for summary in (with_one, without)]
    assert "kl" in best[0]
    assert best[0] == best[1]
    assert with_one["teacher"]["val"] and without["teacher"]["val"] == {}


def test_overfitting_repeats_the_same_pictures(pictures: Path) -> None:
    data = DistillationDataModule(
        ImageFolder(str(pictures)), img_size=32, batch_size=8, num_workers=0
    )
    batches = data.train_dataloader().batch_sampler
    assert isinstance(batches, TrainBatches)
    first = list(batches)
    batches.set_epoch(1)
    assert list(batches) != first
    one = {"global_rank": 0, "world_size": 1, "accumulate_grad_batches": 1}
    data.trainer = type("Overfits", (), {"overfit_batches": 2, **one})()  # type: ignore
    batches = data.train_dataloader().batch_sampler
    assert isinstance(batches, TrainBatches)
    batches.set_epoch(5)
    assert list(batches) == first


def test_steps_below_an_epoch_end_with_a_validation(recipe: Path) -> None:
    items = [f"recipe={recipe}", "trainer.max_epochs=-1"]
    assert train_main([*items, "trainer.max_steps=3"]) == 0
    summary = summary_of(run_folders(recipe)[0])
    assert summary["steps"] == 3
    assert summary["student"]["best_val"]["acc1"] == summary["student"]["val"]["acc1"]


def test_a_recipes_warmup_is_shortened_with_the_run(
    tmp_path: Path, pictures: Path, teacher: Path, prints: Command
) -> None:
    """Six steps an epoch, three epochs, of which two are warm-up. Other lengths: tests/test_optim.py."""
    optim = {"lr": 0.001, "warmup_epochs": 2}
    recipe = write_recipe(
        tmp_path / "tiny.yaml", pictures, teacher, optim=optim, trainer__max_epochs=3
    )
    (told,) = [
        line
        for line in prints("train", [f"recipe={recipe}", "trainer.max_epochs=1"]).splitlines()
        if "warmup_epochs" in line
    ]
    assert told.startswith("optim.warmup_epochs: 2 would be all of the run's 6 steps")

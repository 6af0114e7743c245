"""kd-train with a cache of the teacher's answers: equal to live, resumable, refused where it can't serve."""

import json
import os
import signal
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
from pytorch_lightning import Trainer
from safetensors.torch import save_file

from kd.callbacks.preflight import Preflight
from kd.cli import cache_main, train_main
from kd.data.datamodule import DistillationDataModule
from kd.data.sampler import TrainBatches
from kd.data.sources import ImageFolder
from kd.data.sources.places import stamp_of_file
from kd.distill.step import as_teacher
from kd.fit_to_machine.measure import _epochs
from kd.module import distillation
from kd.report.records import read_run
from kd.teachers import CachedTeacher
from kd.teachers.answer import ALL, Wanted
from kd.teachers.answer_codec import Half
from kd.teachers.answer_store import AnswerStore, Kind
from tests._forks import run_ranks, start, status_of, wait_until
from tests._helpers import ARCH, TINY, Command, draw_folder, refuses, save_teacher, write_recipe
from tests._runs import (
    assert_same,
    assert_same_runs,
    callback,
    losses,
    resumed,
    run,
    run_folders,
    student_of,
    summary_of,
)

MIX = ["data.augment.mixup=0.8", "data.augment.cutmix=1"]


def report(folder: Path) -> dict[str, Any]:
    return summary_of(folder)["cache"]


def view_file(tmp_path: Path, view: int, kind: str = "") -> Path:
    """Of the kind of answer whose name starts so; of the first one."""
    return min((tmp_path / "answers").glob(f"{kind}*/view-{view:04d}.bin"))


# -- the order of views --------


@pytest.mark.parametrize("paired", [False, True])
def test_views_come_again_in_another_order(paired: bool) -> None:
    batches = TrainBatches(101, 10, 3, views=2, paired=paired)
    epochs = []
    for epoch in range(4):
        batches.set_epoch(epoch)
        epochs.append(list(batches))
    assert [{view for batch in e for _, view in batch} for e in epochs] == [{0}, {1}, {0}, {1}]
    assert epochs[0] != epochs[2]
    live = TrainBatches(101, 10, 3)
    for epoch in (0, 1):
        live.set_epoch(epoch)
        assert list(live) == epochs[epoch]  # the first time round is the run without a cache


@pytest.mark.parametrize("world_size", [1, 2])
def test_mixed_neighbours_stay_together(world_size: int) -> None:
    def pairs(epoch: int) -> set[tuple[int, int]]:
        found = set()
        for rank in range(world_size):
            batches = TrainBatches(64, 8, 0, rank, world_size, views=2, paired=True)
            batches.set_epoch(epoch)
            for batch in batches:
                index = [i for i, _ in batch]
                found |= set(zip(index[::2], index[1::2], strict=True))
        return found

    assert pairs(0) == pairs(2) == pairs(4) != pairs(1)


# -- equal to live --------


class Mixed(NamedTuple):
    """Runs of four epochs over two views of mixed pictures."""

    recipe: Path
    items: list[str]
    live: Path
    filling: Path
    reading: Path
    seen: list[tuple[bool, float]]
    """Of each training batch of ``filling``: whether its answers were read; their distance from the model's own."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, pictures: Path, teacher: Path) -> Mixed:
    """Without a cache; filling one; reading it with loader processes, where the teacher never runs."""
    home = tmp_path_factory.mktemp("mixed")
    recipe = write_recipe(home / "tiny.yaml", pictures, teacher)
    items = [
        *MIX,
        "data.augment.color_jitter=0.3",
        "trainer.max_epochs=4",
        "trainer.precision=32-true",
    ]
    cached = [*items, "model.teacher.cache_views=2", f"model.teacher.cache_dir={home / 'answers'}"]
    seen = []
    answer = CachedTeacher.answer

    def compare(self: Any, batch: Any, wanted: Any) -> Any:
        given = answer(self, batch, wanted)
        if "view" in batch:
            distance = (given.logits[ALL] - self.live(batch["image"])).abs().max()
            seen.append((bool(batch["records"][ALL]), float(distance)))
        return given

    live = run(recipe, *items)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedTeacher, "answer", compare)
        filling = run(recipe, *cached, "model.teacher.cache=on")
    reading = run(recipe, *cached, "data.num_workers=2", "model.teacher.cache=only")
    return Mixed(recipe, items, live, filling, reading, seen)


def test_the_first_views_are_the_live_run(mixed: Mixed) -> None:
    live, filling = losses(mixed.live), losses(mixed.filling)
    for step in range(12):
        assert filling[step] == pytest.approx(live[step], abs=2e-3)
    assert live != filling  # fp16's rounding is there


def test_reading_equals_filling_to_the_last_bit(mixed: Mixed) -> None:
    filling, reading = report(mixed.filling), report(mixed.reading)
    assert filling["answers_read"] == filling["answers_computed"] == 96
    assert (reading["answers_read"], reading["answers_computed"]) == (192, 0)
    assert_same_runs(mixed.filling, mixed.reading)


def test_repeated_epochs_read_what_the_teacher_would_answer_to_their_pictures(mixed: Mixed) -> None:
    """Mixed pictures too: an answer belongs to the very view that the student sees."""
    assert [was_read for was_read, _ in mixed.seen] == [False] * 12 + [True] * 12
    assert max(distance for _, distance in mixed.seen) < 5e-3


def test_top_k_learns_nearly_what_dense_does(mixed: Mixed, cache: list[str]) -> None:
    few = run(mixed.recipe, *mixed.items, *cache, "model.teacher.cache_topk=3")
    assert report(few)["format"] == "top-3"
    live, given = losses(mixed.live), losses(few)
    for step in range(12):  # one class is left over: exact, up to fp16
        assert given[step] == pytest.approx(live[step], abs=2e-3)


# -- features --------

KD = {"kd": {"class_path": "kd.losses.KDLoss", "init_args": {"temperature": 2.0}}}
HINT = {"class_path": "kd.losses.HintLoss"}
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "maps of several layers": (
        {**KD, "hint": HINT, "vitkd": {"class_path": "kd.losses.ViTKDLoss"}},
        {"hint": {"student": "norm", "teacher": "norm"},
         "vitkd": {"student": ["blocks.0", "norm"], "teacher": ["blocks.*"]}},
    ),
    "class token, no logits": (
        {"hint": HINT}, {"hint": {"student": "norm", "teacher": "norm", "tokens": "class"}},
    ),
    "all tokens of two losses": (
        {**KD, "hint": HINT, "rkd": {"class_path": "kd.losses.RKDLoss", "init_args": {"weight": 0.01}}},
        {"hint": {"student": "blocks.0", "teacher": "blocks.1", "tokens": "all"}},
    ),
}  # fmt: skip
"""Losses and taps."""


def feature_recipe(tmp_path: Path, pictures: Path, teacher: Path, kind: str) -> Path:
    losses_, taps = FEATURES[kind]
    changes = {"model__distill_losses": losses_, "model__taps": taps}
    return write_recipe(tmp_path / "features.yaml", pictures, teacher, **changes)


def test_cached_features_teach_what_live_ones_do(
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    cache: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Filling, then reading without the teacher; the size is told first."""
    recipe = feature_recipe(tmp_path, pictures, teacher, "maps of several layers")
    items = ["trainer.precision=32-true", *MIX]
    live = run(recipe, *items)
    capsys.readouterr()
    filling = run(recipe, *items, *cache)
    shapes = {f"{layer}:patch": [32, 4, 4] for layer in ("norm", "blocks.0", "blocks.1")}
    kept = 2 * 3 * 32 * 4 * 4
    header = read_run(live).headers[0]  # the report may advise a cache, and says what it needs
    assert (header["cacheable"], header["feature_bytes"]) == (True, kept)
    size = 16 + kept + 3 * 4  # logits with their largest, and features; each kind has its checksum
    said = capsys.readouterr().out
    assert f"cache: {size:,} bytes an answer (" in said
    assert (
        f"features {shapes}), {2 * 48 * size / 1e6:,.1f} MB for 2 view(s) of 48 pictures in "
        in said
    )
    assert report(filling)["features"] == shapes
    reading = run(recipe, *items, *cache, "model.teacher.cache=only")
    assert (report(reading)["answers_read"], report(reading)["answers_computed"]) == (96, 0)
    for step, value in losses(live).items():
        assert losses(filling)[step] == pytest.approx(value, abs=2e-3, rel=1e-3)
    assert losses(filling) == losses(reading) != losses(live)  # fp16's rounding is there
    assert_same(student_of(filling), student_of(reading))


def test_kd_cache_fills_features(
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    cache: list[str],
    prints: Command,
) -> None:
    recipe = feature_recipe(tmp_path, pictures, teacher, "all tokens of two losses")
    said = prints("cache", [f"recipe={recipe}", *cache, "data.batch_size=10"])
    assert said.index("bytes an answer") < said.index("cache: 96 answers computed")
    reading = run(recipe, *cache, "model.teacher.cache=only")
    assert report(reading)["answers_read"] == 96
    filling = run(recipe, *cache, f"model.teacher.cache_dir={tmp_path / 'others'}")
    for step, value in losses(filling).items():
        assert losses(reading)[step] == pytest.approx(value, abs=2e-3, rel=1e-3)


def test_a_headless_teachers_features_are_cached_and_have_no_largest_logits(
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    cache: list[str],
    refusal,
) -> None:
    recipe = feature_recipe(tmp_path, pictures, teacher, "class token, no logits")
    found = report(run(recipe, *cache, "model.teacher.head=false"))
    assert (found["format"], found["answers_computed"]) == ("features alone", 96)
    said = refusal("train", [f"recipe={recipe}", *cache, "model.teacher.cache_topk=2"])
    assert (
        "model.teacher.cache_topk: no loss reads logits, so none are stored; leave it out" in said
    )


def test_auto_counts_the_disk_of_features(
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    cache: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = feature_recipe(tmp_path, pictures, teacher, "maps of several layers")
    short = [
        "trainer.max_epochs=21",
        "trainer.limit_train_batches=1",
        "trainer.limit_val_batches=0",
    ]
    run(recipe, *cache, *short, "model.teacher.cache=auto", "model.teacher.cache_views=20")
    megabytes = 20 * 48 * (16 + 2 * 3 * 32 * 4 * 4 + 3 * 4) / 1e6
    assert f"; {megabytes:,.1f} MB of " in capsys.readouterr().out


def test_layers_that_work_on_windows_cant_be_kept(
    tmp_path: Path, pictures: Path, cache: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Swin's attention sees windows as the batch."""
    arch = {
        "patch_size": 4,
        "window_size": 4,
        "embed_dim": 24,
        "depths": [1, 1],
        "num_heads": [2, 2],
    }
    spec = {"arch": "swin_tiny_patch4_window7_224", "img_size": 32, "kwargs": arch}
    torch.manual_seed(0)
    model = timm.create_model(spec["arch"], num_classes=4, img_size=32, **arch)
    save_file(model.state_dict(), tmp_path / "swin.safetensors")
    recipe = write_recipe(
        tmp_path / "f.yaml", pictures, tmp_path / "swin.safetensors",
        model__teacher={**spec, "checkpoint": str(tmp_path / "swin.safetensors")},
        model__distill_losses={"sp": {"class_path": "kd.losses.SPLoss"}},
        model__taps={"sp": {"student": "norm", "teacher": "layers.0.blocks.0.attn"}},
    )  # fmt: skip
    assert train_main([f"recipe={recipe}", *cache]) == 2
    assert not (tmp_path / "answers").exists()
    said = capsys.readouterr().err
    assert (
        "keeps features by picture, but the layer 'layers.0.blocks.0.attn' of model.taps gives 8 rows for 2"
        in said
    )


def test_one_teachers_cache_serves_recipes_that_look_at_other_layers(
    tmp_path: Path, pictures: Path, teacher: Path, cache: list[str]
) -> None:
    """What one recipe has left is read by the next, which adds its own layer alone; labels play no part."""
    recipe = feature_recipe(tmp_path, pictures, teacher, "class token, no logits")
    first = report(run(recipe, *cache))
    assert first["answers_computed"] == 96
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "answers").glob("*/view-*.bin")}
    both = feature_recipe(tmp_path, pictures, teacher, "all tokens of two losses")
    more = json.dumps({"student": "norm", "teacher": "norm", "tokens": "class"})
    items = [*cache, f"model.taps.hint={more}"]
    second = run(both, *items)
    assert len(before) == 2
    assert all(file.stat().st_mtime_ns == at for file, at in before.items())
    assert sorted(p.name.rpartition("-")[0] for p in (tmp_path / "answers").iterdir()) == [
        "logits", "norm.class", "prelogits.patch",
    ]  # fmt: skip
    fresh = run(both, *items, f"model.teacher.cache_dir={tmp_path / 'fresh'}")
    for step, value in losses(fresh).items():  # the first recipe's batches were others
        assert losses(second)[step] == pytest.approx(value, abs=2e-3, rel=1e-3)
    for split, count in (("train", 12), ("val", 4)):
        files = sorted((pictures / split).rglob("*.jpg"))
        rows = [f"{file},{'zyxw'[i // count]}" for i, file in enumerate(files)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["path,label", *rows]))
    lists = [f"data.source.{split}={tmp_path / split}.csv" for split in ("train", "val")]
    relabelled = ["data.source=Manifest", *lists]
    recipe = feature_recipe(tmp_path, pictures, teacher, "class token, no logits")
    again = report(run(recipe, *cache, *relabelled, "model.teacher.cache=only"))
    assert (again["answers_read"], again["answers_computed"]) == (96, 0)


# -- killed, resumed, several processes --------


def test_a_fill_that_is_killed_goes_on(mixed: Mixed, cache: list[str], tmp_path: Path) -> None:
    """kill -9 in the middle of the first epoch; what was stored is used, the result is the undisturbed run's."""
    slow = callback("tests._stop.Slow", seconds=0.2)
    items = [*mixed.items, *cache]
    pid = start([f"recipe={mixed.recipe}", *items, slow], tmp_path / "log")
    views = (tmp_path / "answers").glob
    wait_until(lambda: any(any(file.read_bytes()) for file in views("*/view-0000.bin")))
    os.kill(pid, signal.SIGKILL)
    assert status_of(pid) == -signal.SIGKILL
    after = run(mixed.recipe, *items)
    assert report(after)["answers_computed"] < 96
    assert_same_runs(after, mixed.filling)


def test_resume_with_a_cache_equals_the_uninterrupted_run(mixed: Mixed, cache: list[str]) -> None:
    stop = callback("tests._stop.StopAfterEpoch", epoch=2)
    assert train_main([f"recipe={mixed.recipe}", *mixed.items, *cache, stop]) == 143
    part = run_folders(mixed.recipe)[-1]
    resumed(part, "trainer.callbacks=null")
    assert_same_runs(part, mixed.filling)


def test_kd_cache_fills_what_training_reads(
    recipe: Path,
    cache: list[str],
    prints: Command,
    tmp_path: Path,
) -> None:
    command = [f"recipe={recipe}", *cache, *MIX, "config=debug", "data.batch_size=10"]
    assert "cache: 96 answers computed in " in prints("cache", command)
    assert not (tmp_path / "runs").exists()
    view = view_file(tmp_path, 1)
    view.write_bytes(view.read_bytes()[:-100])  # torn: what is missing alone is computed
    assert int(prints("cache", command).split("cache: ")[1].split()[0]) <= 50
    folder = run(recipe, *cache, *MIX, "trainer.max_epochs=3", "model.teacher.cache=only")
    assert (report(folder)["answers_read"], report(folder)["answers_computed"]) == (144, 0)


def test_two_processes_fill_what_one_reads(recipe: Path, cache: list[str]) -> None:
    two = ["config=ddp_2cpu", "data.batch_size=4", "trainer.limit_val_batches=0"]
    run_ranks([f"recipe={recipe}", *two, *cache, *MIX], recipe.parent / "log")
    one = run(recipe, *cache, *MIX, "model.teacher.cache=only")
    assert report(one)["answers_read"] == 96


# -- auto --------


def test_auto_says_why(
    recipe: Path,
    cache: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prints: Command,
) -> None:
    auto = [*cache, "model.teacher.cache=auto"]
    folder = run(recipe, *auto)
    assert (
        "cache: off: 2 epoch(s) of 2 views (model.teacher.cache_views): no view comes again"
        in capsys.readouterr().out
    )
    assert report(folder) is None
    assert not (tmp_path / "answers").exists()
    heavy = [
        "model.teacher.kwargs.depth=24",
        f"model.teacher.checkpoint={save_teacher(tmp_path / 'd.safetensors', depth=24)}",
    ]
    folder = run(recipe, *auto, *heavy, "trainer.max_epochs=10")
    said = next(
        x for x in capsys.readouterr().out.splitlines() if x.startswith("cache: on: teacher ")
    )
    assert "10 epochs of 2 views, 0% cached already, would be" in said
    assert "MB free disk" in said
    assert report(folder)["answers_computed"] == 96
    # resumed as it was begun, though now it would be too short to pay
    assert "cache: on nevertheless, as in the resumed run" in prints(
        "train", [f"resume={folder}", "trainer.max_epochs=11", "model.teacher.cache_views=50"]
    )


def test_epochs_count_the_pictures_that_an_epoch_has(tmp_path: Path, pictures: Path) -> None:
    """48 labelled and 64 unlabelled pictures, half as many of these as of those an epoch: 9 steps of 8."""
    unlabelled = draw_folder(tmp_path / "more", train=16, val=0)
    settings = {"img_size": 32, "batch_size": 8, "num_workers": 0, "unlabeled": str(unlabelled)}
    beside = DistillationDataModule(ImageFolder(str(pictures)), unlabeled_ratio=0.5, **settings)
    alone = DistillationDataModule(ImageFolder(str(pictures)), **settings)
    assert (beside.info.train, beside.epoch_length, alone.epoch_length) == (112, 72, 64)
    quiet: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    for limits, epochs in (
        ({"max_steps": 90}, 10),
        ({"max_steps": 90, "limit_train_batches": 3}, 30),
        ({"max_steps": 90, "limit_train_batches": 0.5}, 23),
        ({"max_epochs": 7, "max_steps": 90}, 7),
    ):
        assert _epochs(Trainer(**limits, **quiet), beside) == epochs
    assert _epochs(Trainer(max_steps=80, **quiet), alone) == 10


# -- refused --------


def test_missing_answers_are_counted_by_the_first_bytes_of_records(
    recipe: Path, cache: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step no more is read: an epoch's answers may be larger than the memory."""
    run(recipe, *cache)
    counts, bytes_read = Preflight.on_fit_start, []

    def watched(*given: Any) -> None:
        pread, preadv = os.pread, os.preadv
        with monkeypatch.context() as patches:
            patches.setattr(os, "pread", lambda *a: bytes_read.append(a[1]) or pread(*a))
            patches.setattr(
                os, "preadv", lambda *a: bytes_read.append(sum(map(len, a[1]))) or preadv(*a)
            )
            counts(*given)

    monkeypatch.setattr(Preflight, "on_fit_start", watched)
    run(recipe, *cache, "model.teacher.cache=only")
    assert bytes_read == [4] * 48


def test_a_stale_cache_is_refused_before_the_start_is_fitted(
    recipe: Path,
    cache: list[str],
    refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fitting a start takes minutes, and a cache of other views is known to be one before."""
    cache = [*cache, "trainer.precision=32-true"]
    stamped: Counter[str] = Counter()

    def count(file: str) -> str:
        stamped[file] += 1
        return stamp_of_file(file)

    monkeypatch.setattr("kd.data.sources.files.stamp_of_file", count)
    run(recipe, *cache, "trainer.max_epochs=1")
    assert set(stamped.values()) == {1}  # not anew for the cache that is opened later
    said = refusal("train", [f"recipe={recipe}", *cache, "trainer.precision=bf16-mixed"])
    assert "was filled with other teacher: dtype is float32 there, bfloat16 here" in said

    def fit(*_: object) -> None:
        raise AssertionError("a start was fitted")

    monkeypatch.setattr(distillation, "by_the_first", fit)
    for item, message in (
        ("seed=1", "was filled with other transforms: seed is 0 there, 1 here"),
        ("data.augment.hflip=0", "was filled with other transforms: hflip is 0.5 there, 0.0 here"),
    ):
        assert message in refusal("train", [f"recipe={recipe}", *cache, item])


def test_missing_answers_are_said_with_the_settings_that_differ(
    recipe: Path, refusal, own_cache: Path
) -> None:
    words = ["model.teacher.cache_views=2", "trainer.precision=32-true", "trainer.max_epochs=1"]
    run(recipe, *words, "model.teacher.cache=on")
    only = [f"recipe={recipe}", *words, "model.teacher.cache=only"]
    said = refusal("train", [*only, "seed=1", "data.augment.hflip=0.2"])
    assert "48 of an epoch's answers are missing" in said
    assert "kd-cache fills it; those in " in said
    assert (
        " are of other settings: seed: seed is 0 there, 1 here; data.augment.hflip: hflip is"
        in said
    )


def test_losses_that_need_all_logits_are_those_of_a_live_teacher(
    recipe: Path, cache: list[str]
) -> None:
    items = [f"model.distill_losses.{loss}={loss}" for loss in ("DISTLoss", "HardKDLoss")]
    items += ["trainer.precision=32-true"]
    live, cached = run(recipe, *items), run(recipe, *items, *cache)
    for step, value in losses(live).items():
        assert losses(cached)[step] == pytest.approx(value, abs=5e-3)


def test_several_teachers_each_with_a_cache(
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    capsys: pytest.CaptureFixture[str],
    prints: Command,
    refusal,
) -> None:
    """Logits of the mean, features of one, of another input size; filled by kd-cache, then in the run."""
    spec = {"arch": ARCH, "img_size": 32, "kwargs": TINY, "cache": "on", "cache_views": 2}
    large = save_teacher(tmp_path / "b.safetensors", img_size=48)
    teachers = {
        "a": {**spec, "checkpoint": str(teacher)},
        "b": {**spec, "checkpoint": str(large), "img_size": 48},
    }
    recipe = write_recipe(
        tmp_path / "t.yaml", pictures, teacher, model__teacher=None, model__teachers=teachers,
        model__distill_losses={**KD, "hint": HINT}, model__teacher_of={"hint": "b"},
        model__taps={"hint": {"student": "norm", "teacher": "norm", "tokens": "class"}},
    )  # fmt: skip
    where = [f"model.teachers.{name}.cache_dir={tmp_path / name}" for name in "ab"]
    items = [*where, "trainer.precision=32-true"]
    live = run(
        recipe, *(f"model.teachers.{name}.cache=off" for name in "ab"), "trainer.precision=32-true"
    )
    filling = run(recipe, *items)
    assert {name: report(filling)[name]["answers_computed"] for name in "ab"} == {"a": 96, "b": 96}
    only = [f"model.teachers.{name}.cache=only" for name in "ab"]
    reading = run(recipe, *items, *only)
    assert {name: report(reading)[name]["answers_computed"] for name in "ab"} == {"a": 0, "b": 0}
    assert_same_runs(filling, reading)
    for step, value in losses(live).items():
        assert losses(filling)[step] == pytest.approx(value, abs=5e-3, rel=2e-2)
    capsys.readouterr()
    assert (
        cache_main(["--describe", str(tmp_path / "b"), f"recipe={recipe}", *items]) == 1
    )  # a's are elsewhere
    said = capsys.readouterr().out
    for part in (
        "norm.class",
        ": 2 view(s), 100% filled, 0.0 MB\n",
        'teacher: arch "vit_tiny_patch16_224", weights "',
        "img_size [48, 48]",
        'transform: img_size [32, 32], seed 0, engine "torch", ',
        'answers: features {"norm:class": [32]}, ',
        "model.teachers.b: norm:class: fits\n",
        "model.teachers.a: logits: does not fit: ",
        "model.teachers.a.checkpoint: weights is ",
    ):
        assert part in said
    both = ["--describe", str(tmp_path), f"recipe={recipe}", *items]
    assert cache_main(both) == 0
    assert cache_main([*both, "seed=1", "data.augment.hflip=0"]) == 1
    said = capsys.readouterr().out
    assert (
        "model.teachers.b: norm:class: does not fit: seed: seed is 0 there, 1 here; data.augment.hflip: hflip is"
        in said
    )
    others = [f"model.teachers.{name}.cache_dir={tmp_path / 'x' / name}" for name in "ab"]
    said = prints("cache", [f"recipe={recipe}", *others, "trainer.precision=32-true"])
    assert "cache of a: 96 answers computed" in said
    same = f"model.teachers.b.cache_dir={tmp_path / 'a'}"
    only_b = ["model.teachers.a.cache=off", "model.teachers.a.cache_dir=null", same]
    assert same.replace("=", ": ") in refusal("train", [f"recipe={recipe}", *items, *only_b])


@pytest.fixture()
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16k", "none", disk], check=False
        ).returncode
    ):
        pytest.skip("can't mount a small disk here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_is_told_before_the_first_step(recipe: Path, small_disk: Path, refusal) -> None:
    items = ["model.teacher.cache=on", f"model.teacher.cache_dir={small_disk / 'c'}"]
    assert "model.teacher.cache_dir: " in refusal(
        "train", [f"recipe={recipe}", *items, "model.teacher.cache_views=100"]
    )
    assert not (recipe.parent / "runs").exists()
    run(recipe, *items, "model.teacher.cache_views=2")  # 2 x 768 bytes: there is room


def ten_pictures(folder: Path) -> AnswerStore:
    """An empty store of the answers in four classes."""
    codec = Half((4,), relative=True)
    return AnswerStore(Kind({}, str(folder), codec.record_bytes, codec), 10, 1)


def test_a_store_that_can_no_longer_be_written_leaves_the_teacher_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ten_pictures(tmp_path / "c")
    os.close(store._files[0])
    store._files[0] = os.open(tmp_path / "c" / "view-0000.bin", os.O_RDONLY)
    asked = CachedTeacher(as_teacher(lambda _: torch.eye(4)), [store])
    for _ in range(2):
        batch = {"image": torch.zeros(4, 3, 8, 8), "index": torch.arange(4), "view": 0}
        assert torch.equal(asked.answer(batch, Wanted()).logits[ALL], torch.eye(4))
    assert capsys.readouterr().err.count("the teacher answers live") == 1


def test_an_answer_that_is_not_finite_is_named(tmp_path: Path) -> None:
    store = ten_pictures(tmp_path / "c")
    answers = torch.zeros(2, 4)
    answers[1, 2] = torch.nan
    asked = CachedTeacher(as_teacher(lambda _: answers), [store])
    with refuses("training picture 7 is not finite"):
        asked.answer(
            {"image": torch.zeros(2, 3, 8, 8), "index": torch.tensor([3, 7]), "view": 0}, Wanted()
        )
    assert not store.present(0, np.arange(10)).any()


# -- answers to other pictures, or of someone else's making --------


def test_what_changes_the_mixtures_or_the_pictures_is_noticed(
    recipe: Path,
    pictures: Path,
    tmp_path: Path,
    cache: list[str],
    capsys: pytest.CaptureFixture[str],
    refusal,
) -> None:
    more = draw_folder(tmp_path / "more", train=3, val=1)
    items = [*cache, f"data.unlabeled={more}", "data.unlabeled_ratio=0.25", "trainer.max_epochs=1"]
    assert report(run(recipe, *items))["answers_computed"] > 0
    assert report(run(recipe, *items))["answers_computed"] == 0
    assert train_main([f"recipe={recipe}", *items, "data.augment.mixup=0.8"]) == 2
    capsys.readouterr()
    picture = next((more / "train" / "apple").iterdir())
    os.utime(picture, (time.time() + 60, time.time() + 60))
    assert "was filled with other data: content is" in refusal(
        "train", [f"recipe={recipe}", *items]
    )

    mixed = [*items, "data.augment.mixup=0.8", f"model.teacher.cache_dir={tmp_path / 'mixed'}"]
    run(recipe, *mixed)
    assert "other transforms: unlabeled_ratio is 0.25 there, 0.125 here" in refusal(
        "train", [f"recipe={recipe}", *mixed, "data.unlabeled_ratio=0.125"]
    )


def test_poisoned_answers_are_asked_for_again(
    recipe: Path, tmp_path: Path, cache: list[str]
) -> None:
    first = run(recipe, *cache)
    for file in (tmp_path / "answers").glob("*/view-*.bin"):
        records = np.fromfile(file, np.uint8).reshape(48, -1)
        records[::2, 4:] = 0xFF
        for record in records[::2]:
            record[:4] = np.frombuffer(
                zlib.crc32(record[4:].tobytes()).to_bytes(4, "little"), np.uint8
            )
        records.tofile(file)
    again = run(recipe, *cache)
    assert losses(again) == losses(first)
    assert report(again)["answers_computed"] == 48


@pytest.mark.parametrize("only", [False, True])
def test_answers_that_came_after_the_fetch_are_read_and_the_model_does_not_run(
    tmp_path: Path, only: bool
) -> None:
    """Another process stores them between a batch's fetch, which misses one, and its answer."""

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model ran")

    store = ten_pictures(tmp_path / "answers")
    codec: Any = store.kind.codec
    teacher = CachedTeacher(as_teacher(refuse), [store], only)
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    batch: Any = {"image": images, "index": torch.arange(4), "view": 0}
    fetched = teacher.fetch(batch)
    logits = torch.randn(4, 4)
    store.put(0, np.arange(4), codec.encode(logits).numpy())

    answer = teacher.answer(fetched, Wanted())
    torch.testing.assert_close(answer.logits[ALL], logits, atol=1e-2, rtol=0)
    assert (teacher.read, teacher.computed) == (4, 0)

"""Views kept beside their answers (``model.teacher.cache_pixels``): nothing is decoded twice, nothing else changes."""

import os
import pickle
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from kd.cli import cache_main
from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.data.samples import PictureSet
from kd.data.sources import ImageFolder
from kd.data.targets import Masks
from kd.data.transforms import train_transform
from kd.report.facts import Facts
from kd.report.limits import data_bound
from kd.report.records import RunRecords
from kd.settings import Augment
from kd.teachers.answer_store import AnswerStore, Kind
from kd.teachers.cache_layout import Layout
from kd.teachers.reading import AddRecords, CachedViews, Reading
from tests._helpers import Command, draw_folder
from tests._runs import assert_same_runs, run, summary_of

SIZE, VIEWS = (32, 32), 2
JITTER = "data.augment.color_jitter=0.3"
MIX = ["data.augment.mixup=0.8", "data.augment.cutmix=1"]


def views_of(pictures: Path) -> PictureSet:
    split = DistillationDataModule(ImageFolder(str(pictures)), img_size=SIZE, batch_size=8).split(
        "train"
    )
    return PictureSet(split, train_transform(SIZE, Augment(color_jitter=0.3)), seed=3, size=SIZE)


def store_in(folder: Path, samples: int, masks: bool = False, **parts: Any) -> AnswerStore:
    size = 4 + (3 + masks) * SIZE[0] * SIZE[1]
    return AnswerStore(Kind({"data": parts}, str(folder), size), samples, VIEWS)


def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by a number for each view that is made from now on."""
    found: list[int] = []
    make = PictureSet.__getitem__
    monkeypatch.setattr(
        PictureSet, "__getitem__", lambda self, key: (found.append(1), make(self, key))[1]
    )
    return found


def test_a_kept_view_is_not_made_again(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views, calls = views_of(pictures), made(monkeypatch)
    kept = CachedViews(views, store_in(tmp_path / "p", len(views)))
    keys = [(5, 1), (0, 1), (47, 1)]
    first = kept.__getitems__(keys)
    assert len(calls) == 3
    again = kept.__getitems__([(9, 1), *keys])  # one of four is new
    assert len(calls) == 4
    for (image, target, key), (same, label, number), (anew, _, _) in zip(
        first, again[1:], views.__getitems__(keys), strict=True
    ):
        assert torch.equal(image, same)
        assert torch.equal(image, anew)
        assert (target, key) == (label, number)
    assert not torch.equal(kept[5, 0][0], kept[5, 1][0])  # another view


def test_other_processes_and_damaged_records(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader process that is started anew opens the files itself; a view that was cut or changed is made again."""
    views = views_of(pictures)
    store = store_in(tmp_path / "p", len(views))
    keys = [(i, 0) for i in range(8)]
    before = CachedViews(views, store).__getitems__(keys)
    other = pickle.loads(pickle.dumps(store))
    calls = made(monkeypatch)
    assert all(
        torch.equal(a[0], b[0])
        for a, b in zip(before, CachedViews(views, other).__getitems__(keys), strict=True)
    )
    assert not calls
    with (tmp_path / "p" / "view-0000.bin").open("r+b") as file:
        file.seek(2 * store.record_bytes + 100)
        file.write(b"\0\1\2\3\4\5\6\7")
        file.truncate(7 * store.record_bytes + 50)
    found = CachedViews(views, store_in(tmp_path / "p", len(views))).__getitems__(keys)
    assert len(calls) == 2
    assert all(torch.equal(a[0], b[0]) for a, b in zip(before, found, strict=True))


def test_a_mask_is_kept_with_its_view(tmp_path: Path) -> None:
    class Scenes:
        kind, size, split = Masks(), SIZE, None

        def __len__(self) -> int:
            return 4

        def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
            made = [torch.randint(256, (4, *SIZE), dtype=torch.uint8) for _ in keys]
            return [(x[:3], tv_tensors.Mask(x[3:]), key) for x, key in zip(made, keys, strict=True)]

    kept = CachedViews(Scenes(), store_in(tmp_path / "p", 4, masks=True))  # type: ignore[arg-type]
    image, mask, _ = kept[2, 1]
    again, same, _ = kept[2, 1]
    assert torch.equal(image, again)
    assert torch.equal(mask.as_subclass(torch.Tensor), same)


def test_records_come_with_the_batch_where_all_are_there(tmp_path: Path, pictures: Path) -> None:
    store = AnswerStore(Kind({"data": {}}, str(tmp_path), 12), 6, 1)
    store.put(0, np.arange(4), np.ones((4, 12), np.uint8))

    def batch_of(index: list[int]) -> Batch:
        return {"index": torch.tensor(index), "view": 0}

    add = Reading({"a": [store]})(views_of(pictures), batch_of)[1]
    assert isinstance(add, AddRecords)
    assert add([1, 3])["records"]["a"][0].shape == (2, 12)
    assert add([1, 5])["records"]["a"] == []


# -- a run -------------------------------------------------------------------------------------------------------------


def test_training_is_the_same_to_the_last_bit(
    recipe: Path,
    cache: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mixed pairs too: they are mixed from the kept pixels. Only the two views of each picture are ever made."""
    items = [*cache, *MIX, JITTER, "trainer.max_epochs=4", "trainer.limit_val_batches=0"]
    plain = run(recipe, *items)
    calls = made(monkeypatch)
    pixels = run(recipe, *items, "model.teacher.cache_pixels=true")
    assert len(calls) == 2 * 48
    assert_same_runs(plain, pixels)
    assert len(list((tmp_path / "answers").glob("pixels-*/view-*.bin"))) == 2


def test_processes_that_keep_the_same_views_at_once_keep_whole_ones(
    tmp_path: Path, pictures: Path
) -> None:
    views = views_of(pictures)
    keys = [(i, 0) for i in range(len(views))]
    shared = CachedViews(
        views, store_in(tmp_path / "p", len(views))
    )  # as loader processes inherit it
    children = []
    for turn in (1, -1):
        if not (child := os.fork()):
            with suppress(Exception):
                for key in keys[::turn]:
                    shared.__getitems__([key])
                os._exit(0)
            os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    store = store_in(tmp_path / "p", len(views))
    assert store.present(0, np.arange(len(views))).all()
    kept = CachedViews(views, store).__getitems__(keys)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(kept, views.__getitems__(keys), strict=True))


def test_other_pictures_and_other_views_have_other_pixels(tmp_path: Path, pictures: Path) -> None:
    def folder_of(root: Path, ignored: int | None = None, **augment: float) -> Path:
        source = ImageFolder(str(root))
        if ignored:
            source.kind, source.ignore_index = Masks(), ignored
        data = DistillationDataModule(
            source, img_size=SIZE, batch_size=8, augment=Augment(**augment)
        )
        teacher: Any = SimpleNamespace(spec=SimpleNamespace(cache_dir=str(tmp_path)))
        return Layout(data).pixels(teacher).folder

    other = draw_folder(tmp_path / "other", size=44)
    assert len({folder_of(pictures), folder_of(other), folder_of(pictures, hflip=0.0)}) == 3
    assert folder_of(pictures) == folder_of(pictures)
    assert folder_of(pictures, 255) != folder_of(pictures, 254), "the mask of one without a mask"


def test_the_training_process_reads_no_records(
    recipe: Path, cache: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loader processes do, which pin them; where a batch lacks some, the training process makes these."""
    assert cache_main([f"recipe={recipe}", *cache]) == 0
    monkeypatch.setattr("kd.teachers.cached.read_records", None)
    items = ["data.num_workers=1", "model.teacher.cache=only", "trainer.limit_val_batches=0"]
    found = run(recipe, *cache, *items)
    assert summary_of(found)["cache"]["answers_read"] == 96


def test_kd_cache_fills_and_describes_them(
    recipe: Path,
    cache: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prints: Command,
) -> None:
    answers = [f"recipe={recipe}", *cache]
    items = [*answers, "model.teacher.cache_pixels=true"]
    assert cache_main(answers) == 0
    assert cache_main(["--describe", str(tmp_path / "answers"), *items]) == 1
    assert "model.teacher: pixels: does not fit: " in capsys.readouterr().out
    assert "0.3 MB of them are the views' pixels" in prints("cache", items)
    said = prints("cache", ["--describe", str(tmp_path / "answers"), *items])
    assert ": 2 view(s), 100% filled, 0.3 MB\n" in said
    assert 'answers: format "pixels", masks false' in said
    assert "model.teacher: pixels: fits" in said
    calls = made(monkeypatch)
    run(
        recipe,
        *cache,
        "model.teacher.cache=only",
        "model.teacher.cache_pixels=true",
        "trainer.limit_val_batches=0",
    )
    assert not calls


def test_pixels_without_a_cache_or_room_are_refused(
    recipe: Path,
    tmp_path: Path,
    refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=100_000))
    items = ["model.teacher.cache=on", f"model.teacher.cache_dir={tmp_path / 'answers'}"]
    said = (
        refusal("train", [f"recipe={recipe}", *items, "model.teacher.cache_pixels=true"])
        .strip()
        .splitlines()[-1]
    )
    assert re.search(r"needs 0\.6 MB more for 4 view\(s\) of 48 pictures, the disk has 0\.1 MB \(fewer cache_views, "
                     r"cache_topk or cache_pixels=false\)", said)  # fmt: skip
    assert not (tmp_path / "answers").exists()


def facts(**header: Any) -> Facts:
    """A cached run of ten epochs and two views that waits 60 of each step's 100 ms for its batch."""
    told = {"device": "cuda", "cores": 4, "threads": 1, "num_workers": 3, "batch_size": 64, "world_size": 1,
            "processes": 1, "batches_per_epoch": 100, "max_epochs": 10, "cached": True, **header}  # fmt: skip
    total = {"steps": 999, "p": {"data": 999 * 60.0, "student": 999 * 40.0}}
    events = [{"name": "startup", "s": 36.0, "parts": {}}]
    config = {"model": {"teacher": {"cache": "on", "cache_views": 2}}}
    return Facts(
        RunRecords(Path("x"), config=config, headers={0: told}, totals={0: total}, events=events)
    )


def test_the_verdict_names_the_lever() -> None:
    limit = data_bound(facts())
    assert limit is not None
    assert limit.lever == "model.teacher.cache_pixels=true decodes nothing after 2 epochs: at most"
    assert limit.gain == pytest.approx(10 / (2 + 8 * 0.4))
    later = data_bound(facts(pixels=True))
    assert later is not None
    assert "cache_pixels" not in later.lever

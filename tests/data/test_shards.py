"""Packs of tar shards: the run over a pack is the run over its folder, on a disk and from an S3 server."""

import hashlib
import json
import multiprocessing
import os
import pickle
import re
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kd.cli import pack_main, train_main
from kd.data.pack import pack
from kd.data.pictures import decode
from kd.data.sources import ImageFolder, Shards, fingerprint, shards
from kd.data.sources.base import Split
from kd.data.sources.shards import PICTURE
from kd.storage.objects import file_system, tried
from tests._faults import Faults, before
from tests._files import write_json
from tests._helpers import Command, draw_folder, refuses
from tests._runs import (
    assert_same_runs,
    losses,
    resumed,
    run,
    run_folders,
    summary_of,
)


def packed(recipe: Path, out: Any, *items: str) -> list[str]:
    assert pack_main([f"recipe={recipe}", f"out={out}", *items]) == 0
    return ["data.source=Shards", f"data.source.root={out}"]


def test_a_pack_is_read_as_its_folder_is(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = packed(recipe, tmp_path / "pack")
    assert "train: 48 pictures" in capsys.readouterr().out
    items = ["data.num_workers=2", "data.augment.mixup=0.8"]
    folder, shards = run(recipe, *items), run(recipe, *items, *source)
    assert_same_runs(folder, shards)


def test_resume_over_a_pack_is_exact(recipe: Path, tmp_path: Path) -> None:
    items = [*packed(recipe, tmp_path / "pack"), "trainer.max_epochs=3"]
    whole = run(recipe, *items)
    stop = json.dumps({"class_path": "tests._stop.StopAfterEpoch", "init_args": {"epoch": 1}})
    assert train_main([f"recipe={recipe}", *items, f"trainer.callbacks+={stop}"]) == 143
    part = run_folders(recipe)[-1]
    resumed(part, "trainer.callbacks=null")
    assert losses(part) == losses(whole)


def packed_in_megabytes(folder: Path) -> Split:
    """The training pictures that ``pack`` holds in shards of a MB."""
    source = ImageFolder(str(draw_folder(folder / "data", size=400)))
    split = source.load("train")
    pack(split, source.classes, str(folder / "pack"), "train", shard_mb=1)
    return split


def test_shards_are_plain_tar_files_of_limited_size(tmp_path: Path) -> None:
    """WebDataset's layout: 00000007.jpg beside 00000007.cls."""
    split = packed_in_megabytes(tmp_path)
    shards = sorted((tmp_path / "pack").glob("train-*.tar"))
    assert len(shards) > 1
    seen = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                seen[member.name] = content.read()
    read = Shards(str(tmp_path / "pack")).load("train")
    for i in range(48):
        assert seen[f"{i:08d}.jpg"] == split.read(i) == read.read(i)
        assert int(seen[f"{i:08d}.cls"]) == split.targets[i] == read.targets[i]


def test_a_pack_over_an_older_one_that_stops_midway_is_unfinished(tmp_path: Path) -> None:
    """The older index would name places in the new shards, which hold other pictures there."""
    source = ImageFolder(str(draw_folder(tmp_path / "data")))
    split = source.load("train")
    pack(split, source.classes, str(tmp_path / "pack"), "train", short_side=8)
    Path(split.name(40)).write_bytes(b"no picture")
    with refuses("can't be read"):
        pack(split, source.classes, str(tmp_path / "pack"), "train")
    with refuses("is not a finished pack: no train.json"):
        Shards(str(tmp_path / "pack")).load("train")


def test_pictures_are_resized_once(recipe: Path, tmp_path: Path) -> None:
    packed(recipe, tmp_path / "small", "short_side=20")
    packed(recipe, tmp_path / "whole", "short_side=1000")
    small, whole = (Shards(str(tmp_path / name)).load("train") for name in ("small", "whole"))
    assert decode(small.read(0)).shape == (3, 20, 22)
    assert decode(whole.read(0)).shape == (3, 40, 44)
    assert fingerprint(small) != fingerprint(whole)
    big = torch.nn.functional.interpolate(
        decode(small.read(0))[None].float(), (40, 44), mode="bilinear"
    )
    assert (big[0] - decode(whole.read(0)).float()).abs().mean() < 40  # the same picture, blurred


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "train.json").unlink(), "is not a finished pack: no train.json"),
        (lambda p: (p / "train.json").write_text("{"), "train.json is damaged"),
        (
            lambda p: (p / "val-00000.tar").write_bytes(b""),
            "val-00000.tar has 0 bytes, its index says",
        ),
        (lambda p: (p / "train-00000.tar").unlink(), "train-00000.tar has 0 bytes, its index says"),
    ],
    ids=["unfinished", "index", "truncated", "missing"],
)
def test_a_damaged_pack_is_named(
    recipe: Path, tmp_path: Path, damage: Any, message: str, refusal: Command
) -> None:
    source = packed(recipe, tmp_path / "pack")
    damage(tmp_path / "pack")
    assert message in refusal("train", [f"recipe={recipe}", *source])


OUTSIDE = "../../outside.tar"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("shards", [OUTSIDE], "train.json is damaged: shards: each must match pattern"),
        ("shards", ["/etc/passwd.tar"], "shards: each must match pattern"),
        ("shards", ["x.tar\n"], "shards: each must match pattern"),
        ("shards", [7], "shards: each must be a valid string"),
        ("shards", "x.tar", "shards: must be a valid array"),
        ("classes", ["a", None], "classes: each must be a valid string"),
        ("index", "0" * 64, "it is not the one that train.json was written with"),
        ("classes", [], "target 0 must be a class id, -1 to -1, got 1"),
        (3, (-1, 512, 10, 1), "sample 3 lies at no place"),
        (3, (0, -512, 10, 1), "sample 3 lies at no place"),
        (3, (0, 512, 0, 1), "sample 3 lies at no place"),
        (3, (5, 512, 10, 1), "sample 3 lies at no place in 1 shard(s)"),
        (3, (0, 2**60, 10, 1), "sample 3 lies at no place"),
        (3, (0, 512, 2**31 - 1, 1), "sample 3 lies at no place"),
        (2, (0, 512, 10, -1), "target 2 must be a class id, 0 to 3, got -1"),
        (2, (0, 512, 10, 4), "target 2 must be a class id"),
        ("pictures", 0, "train.index is damaged"),
    ],
)
@pytest.mark.parametrize("url", ["", "file://"])
def test_an_index_that_lies_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Any, value: Any, message: str, url: str
) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "cache" / "deep"))
    (tmp_path / "pack").mkdir()
    (tmp_path / "outside.tar").write_bytes(bytes(10**6))
    table = np.zeros(0 if key == "pictures" else 47, PICTURE)
    table["offset"], table["size"], table["target"] = 512, 100, 1
    if isinstance(key, int):
        table[key] = value
    (tmp_path / "pack" / "train.index").write_bytes(table.tobytes())
    digest = hashlib.sha256(table.tobytes()).hexdigest()
    head: dict[Any, Any] = {
        "classes": list("abcd"),
        "shards": ["train-00000.tar"],
        "index": digest,
    }
    if key in head:
        head[key] = value
    write_json(tmp_path / "pack" / "train.json", head)
    with refuses(re.escape(message)):
        Shards(f"{url}{tmp_path}/pack").load("train").read(0)
    assert not (tmp_path / "cache").exists()


def test_the_newest_shards_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads from more shards than it may hold open ended in an OSError."""
    monkeypatch.setattr(shards, "MOST_OPEN", 2)
    split = packed_in_megabytes(tmp_path)
    read: Any = Shards(str(tmp_path / "pack")).load("train")
    assert len(read.shards) > 3
    before = len([*Path("/proc/self/fd").iterdir()])
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read.read, range(48))) == [split.read(i) for i in range(48)]
    assert len([*Path("/proc/self/fd").iterdir()]) == before + 2
    again = pickle.loads(pickle.dumps(read))
    assert again.read(3) == split.read(3)


def test_a_shard_of_noise_is_named_before_training(
    recipe: Path, tmp_path: Path, refusal: Command
) -> None:
    source = packed(recipe, tmp_path / "pack")
    shard = tmp_path / "pack" / "train-00000.tar"
    before = fingerprint(Shards(str(tmp_path / "pack")).load("train"))
    shard.write_bytes(os.urandom(shard.stat().st_size))
    assert fingerprint(Shards(str(tmp_path / "pack")).load("train")) != before
    error = refusal("train", [f"recipe={recipe}", *source])
    assert "48 damaged pictures" in error
    assert "not a picture, or its header is damaged" in error


def test_wrong_use_of_kd_pack(recipe: Path, tmp_path: Path, refusal: Command) -> None:
    for items, message in (
        (["short_side=big"], "short_side: must be a whole number, got 'big'"),
        (["data.source.root=/nowhere"], "data.source.root: folder /nowhere not found"),
    ):
        assert message in refusal("pack", [f"recipe={recipe}", f"out={tmp_path / 'p'}", *items])
    assert "out: /proc/nothing can't be written" in refusal(
        "pack", [f"recipe={recipe}", "out=/proc/nothing"]
    )
    assert pack_main([f"recipe={recipe}"]) == 2
    assert pack_main(["--help"]) == 0


def test_from_an_object_store(
    recipe: Path, s3: str, tmp_path: Path, refusal: Command, own_cache: Path
) -> None:
    source = packed(recipe, f"{s3}/mini")
    folder, remote = run(recipe), run(recipe, *source, "data.num_workers=2")
    assert losses(folder) == losses(remote)
    copies = tmp_path / "cache" / "fetched" / "s3" / "food" / "mini"
    assert sorted(p.name for p in copies.glob("*.tar")) == ["train-00000.tar", "val-00000.tar"]
    assert "is not a finished pack: no train.json" in refusal(
        "train", [f"recipe={recipe}", "data.source=Shards", f"data.source.root={s3}/nothing"]
    )
    with refuses("data.source.root: "):
        Shards("s3://no-such-bucket/x").load("train")


def read_all(url: str, backwards: bool, out: Any) -> None:
    split = Shards(url).load("train")
    out.put(
        sorted(zlib.crc32(split.read(i)) for i in (reversed(range(48)) if backwards else range(48)))
    )


def test_shards_come_whole_through_faults_and_once_for_all_processes(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """Errors, cut connections and slow answers, while two processes read the same pack."""
    source = ImageFolder(str(draw_folder(tmp_path / "data", size=400)))
    monkeypatch.setattr("kd.storage.objects.PAUSE_S", 0.01)
    split = source.load("train")
    size = pack(split, source.classes, f"{s3}/large", "train", shard_mb=1)
    assert size > 3e6
    faults = Faults()
    with before(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]), faults) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        file_system(s3)[0].clear_instance_cache()
        remote = Shards(f"{s3}/large").load("train")
        assert remote.read(47) == split.read(47)
        assert len(faults.seen) == 1  # one shard is copied, not the pack
        faults.often = 2
        processes = multiprocessing.get_context("fork")
        out = processes.Queue()
        for backwards in (False, True):
            processes.Process(target=read_all, args=(f"{s3}/large", backwards, out)).start()
        read = [out.get(timeout=300) for _ in range(2)]
    assert read[0] == read[1] == sorted(zlib.crc32(split.read(i)) for i in range(48))
    assert sum(faults.failed.values()) >= 2, faults.failed
    copies = [*(tmp_path / "cache").rglob("*.tar")]
    assert len(faults.seen) == len(copies) + sum(faults.failed.values()) - faults.failed["slow"]
    assert sum(copy.stat().st_size for copy in copies) > size
    assert not [*(tmp_path / "cache").rglob("*.part")]


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_copy_of_a_shard_that_has_changed_is_fetched_once_more(
    damage: str, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    source = ImageFolder(str(draw_folder(tmp_path / "data", train=1, val=1)))
    pack(source.load("train"), source.classes, f"{s3}/{damage}", "train")
    picture = Shards(f"{s3}/{damage}").load("train").read(0)
    (copy,) = (tmp_path / "cache" / "fetched").rglob("*.tar")
    whole = copy.read_bytes()
    if damage == "gone":
        copy.unlink()
    else:
        copy.write_bytes(whole[: len(whole) // 2] if damage == "cut" else bytes(len(whole)))
    split, faults = Shards(f"{s3}/{damage}").load("train"), Faults()
    with before(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]), faults) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        file_system(s3)[0].clear_instance_cache()
        assert [split.read(0) for _ in range(3)] == [picture] * 3
        assert len(faults.seen) == 1
    assert copy.read_bytes() == whole


def test_a_store_that_stays_away_ends_in_a_line(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setattr("kd.storage.objects.PAUSE_S", 0.0)
    source = ImageFolder(str(draw_folder(tmp_path / "data", train=1, val=1)))
    pack(source.load("train"), source.classes, f"{s3}/gone", "train")
    split = Shards(f"{s3}/gone").load("train")
    files, path = file_system(f"{s3}/gone")
    files.rm(f"{path}/train-00000.tar")
    with refuses(r"data\.source\.root: s3://food/gone/train-00000\.tar not found"):
        split.read(0)
    with pytest.raises(OSError, match="food can't be read, 6 times: no way"):
        tried(lambda: (_ for _ in ()).throw(RuntimeError("no way")), "food can't be read")


def test_answers_beside_a_pack_are_read_by_whoever_has_it(
    recipe: Path,
    s3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prints: Command,
    refusal: Command,
) -> None:
    """Written once; read from the store and from a copy on a disk, to the bit of the cache that they are of."""
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "one"))
    views = ["model.teacher.cache_views=2", "trainer.precision=32-true"]
    items = [*packed(recipe, f"{s3}/mini"), *views]
    assert f"read them with model.teacher.cache=only model.teacher.cache_dir={s3}/mini" in prints(
        "cache", [f"recipe={recipe}", *items, f"out={s3}/mini"]
    )
    own = run(recipe, *items, "model.teacher.cache=on")
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "other machine"))
    only = ["model.teacher.cache=only", f"model.teacher.cache_dir={s3}/mini"]
    streamed = run(recipe, *items, *only)
    files, path = file_system(f"{s3}/mini")
    files.get(path, str(tmp_path / "copy"), recursive=True)
    names = [p.name for p in (tmp_path / "copy").rglob("*.bin")]
    assert sorted(names) == ["view-0000.bin", "view-0001.bin"]
    local = ["data.source=Shards", f"data.source.root={tmp_path / 'copy'}", *views]
    copied = run(recipe, *local, only[0], f"model.teacher.cache_dir={tmp_path / 'copy'}")
    assert losses(own) == losses(streamed) == losses(copied)
    for folder in (streamed, copied):
        found = summary_of(folder)["cache"]
        assert (found["answers_read"], found["answers_computed"]) == (96, 0)
    said = prints("cache", ["--describe", f"{s3}/mini", f"recipe={recipe}", *items, *only])
    assert ": 2 view(s), 100% filled" in said
    assert "model.teacher: logits: fits" in said
    for bad, message in (
        ([*items, *only, "seed=3"], "kd-cache --describe PLACE recipe=NAME says what differs"),
        ([*items, *only, "model.teacher.cache_views=3"], "holds 2 view(s), got 3"),
        (
            [*local, only[0], f"model.teacher.cache_dir={tmp_path / 'copy'}", "seed=3"],
            "says what differs",
        ),
    ):
        assert message in refusal("train", [f"recipe={recipe}", *bad])
    assert "is read-only; kd-cache out= writes there" in refusal(
        "cache", [f"recipe={recipe}", *items, *only]
    )


def test_a_teachers_checkpoint_from_an_object_store(
    recipe: Path, teacher: Path, s3: str, tmp_path: Path, refusal: Command, own_cache: Path
) -> None:
    files, path = file_system(f"{s3}/teacher.safetensors")
    files.put_file(str(teacher), path)
    here, there = run(recipe), run(recipe, f"model.teacher.checkpoint={s3}/teacher.safetensors")
    assert losses(here) == losses(there)
    (kept,) = (tmp_path / "cache" / "fetched").rglob("*.safetensors")
    assert kept.read_bytes() == teacher.read_bytes()
    assert f"model.teacher.checkpoint: {s3}/nothing.safetensors not found" in refusal(
        "train", [f"recipe={recipe}", f"model.teacher.checkpoint={s3}/nothing.safetensors"]
    )

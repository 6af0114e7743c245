"""Folders and manifests by URL: what is read from an S3 server is what is read from a disk."""

import json
import multiprocessing
import os
import pickle
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kd.cli import main, pack_main, train_main
from kd.data.engines.device import CutSet
from kd.data.scan import scan, usual
from kd.data.sources import (
    Food101,
    ImageFolder,
    Manifest,
    Pictures,
    SegmentationFolder,
    Source,
    fingerprint,
    identity,
)
from kd.data.sources.base import split_facts
from kd.data.sources.unlabelled import unlabelled_folder
from kd.data.splits import load_probe
from kd.errors import UserError
from kd.settings import Augment, Probe
from kd.storage.objects import file_system
from tests._faults import Faults, before
from tests._helpers import draw_folder
from tests._runs import assert_same, losses, run, run_folders, student_of


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "machine"))
    monkeypatch.setattr("kd.storage.objects.PAUSE_S", 0.0)


def put(folder: Path, url: str) -> str:
    files, path = file_system(url)
    files.put(f"{folder}/", f"{path}/", recursive=True)
    return url


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, *faults: Faults) -> Iterator[None]:
    """The server behind others that fail."""
    with ExitStack() as opened, monkeypatch.context() as patch:
        for one in faults:
            port = opened.enter_context(
                before(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]), one)
            )
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        file_system("s3://food")[0].clear_instance_cache()
        yield
    file_system("s3://food")[0].clear_instance_cache()


def test_a_run_by_url_is_the_run_on_a_disk(
    recipe: Path, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through errors, cut connections and slow answers; nothing that is here is fetched again."""
    pictures = draw_folder(tmp_path / "mini", train=4, val=1)
    url = put(pictures, f"{s3}/mini")
    few = ["data.batch_size=4", f"data.source.root={pictures}"]
    by_url, cached = (
        [few[0], f"data.source.root={url}", "data.num_workers=2"],
        "model.teacher.cache=on",
    )
    lists, gets = Faults(part="list-type"), Faults(part=".jpg")
    with failing(monkeypatch, lists, gets):
        lists.often, gets.often = 2, 4
        ImageFolder(url).load("train")
        remote = run(recipe, *by_url, cached)
        assert any(lists.failed.values())
        assert all(gets.failed.values()), gets.failed
        assert 0 < len(lists.seen) < 12  # not by each loader's process
        lists.often = gets.often = 0
        gets.seen.clear()
        again = run(recipe, *by_url, cached)
        assert not gets.seen
    disk = run(recipe, *few, cached)
    assert losses(remote) == losses(again) == losses(disk)
    assert_same(student_of(remote), student_of(disk))
    found = [
        json.loads((folder / "summary.json").read_text())["cache"] for folder in (remote, again)
    ]
    assert [cache["answers_computed"] for cache in found] == [32, 0]
    for place, root in (("a", url), ("b", pictures)):
        assert (
            pack_main([f"recipe={recipe}", f"data.source.root={root}", f"out={tmp_path / place}"])
            == 0
        )
    assert (tmp_path / "a/train-00000.tar").read_bytes() == (
        tmp_path / "b/train-00000.tar"
    ).read_bytes()
    assert main("eval", [str(disk), f"folder={url}/val"]) == 0
    # a run begun here goes on there, and one whose pictures have changed does not
    assert train_main([f"resume={disk}", f"data.source.root={url}", "trainer.max_epochs=3"]) == 0
    files, path = file_system(f"{url}/train/apple/00.jpg")
    before_, data = split_facts(ImageFolder(url).load("train")).content, files.cat_file(path)
    files.pipe_file(path, data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])  # of the same size
    assert split_facts(ImageFolder(url).load("train")).content != before_
    changed = run(recipe, *by_url, cached)
    assert json.loads((changed / "summary.json").read_text())["cache"]["answers_computed"] == 32


def draw_all(root: Path) -> None:
    """A folder with what else may lie in one, lists of its pictures, and scenes with masks."""
    draw_folder(root / "data", train=2, val=1)
    (apple := root / "data/train/apple").joinpath("deep er/est").mkdir(parents=True)
    for name in (
        "deep er/est/ä #1%41?.jpg",
        "B.JPG",
        ".hidden.jpg",
        "00.jpg.txt",
        "notes",
        "x.heic",
    ):
        shutil.copy(apple / "00.jpg", apple / name)
    for name in (".thumbs", "dates/.thumbs"):
        (root / "data/train" / name).mkdir()
        shutil.copy(apple / "00.jpg", root / "data/train" / name)
    names = sorted(
        file.relative_to(root).as_posix() for file in (root / "data").glob("*/[abc]*/0*.jpg")
    )
    (root / "lists").mkdir()
    for split in ("train", "val"):
        rows = [f"../{name},{name.split('/')[2]}\n" for name in names if f"/{split}/" in name]
        (root / "lists" / f"{split}.csv").write_text("path,label\n" + "".join(rows))
    for number, split in enumerate(("train", "train", "val")):
        for kind, mode in (("images", "RGB"), ("masks", "L")):
            (folder := root / "scenes" / kind / split).mkdir(parents=True, exist_ok=True)
            Image.new(mode, (8, 6), number and 1).save(folder / f"{number}.png")


def sources(root: str, lists: str = "") -> list[Source]:
    return [
        ImageFolder(f"{root}/data/"), Pictures(f"{root}/data/train/", f"{root}/data/val"),
        Manifest(f"{lists or root}/lists/train.csv", f"{lists or root}/lists/val.csv"),
        SegmentationFolder(f"{root}/scenes", ["ground", "sky"]),
    ]  # fmt: skip


def sums(pickled: bytes, out: Any) -> None:
    split = pickle.loads(pickled)
    split.fetch(range(4))
    out.put(sorted(zlib.crc32(split.read(i)) for i in range(len(split.targets))))


def test_each_source_finds_by_url_what_it_finds_on_a_disk(s3: str, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    draw_all(root)
    put(root, url := f"{s3}/all")
    (here := tmp_path / "here" / "lists").mkdir(parents=True)  # lists on this disk that name URLs
    for name in ("train.csv", "val.csv"):
        (here / name).write_text((root / "lists" / name).read_text().replace("../", f"{url}/"))
    both = zip([*sources(str(root)), sources(str(root))[2]], [*sources(url), sources(url, str(here.parent))[2]],
               strict=True)  # fmt: skip
    for on_disk, by_url in both:
        assert by_url.has("train") and by_url.has("val") and not by_url.has("test")
        for name in ("train", "val"):
            a, b = on_disk.load(name), by_url.load(name)
            assert on_disk.classes == by_url.classes
            assert a.targets == b.targets
            assert [Path(a.name(i)).parts[-2:] for i in range(len(a.targets))] == [
                Path(b.name(i)).parts[-2:] for i in range(len(b.targets))
            ]
            assert [a.read(i) for i in range(len(a.targets))] == [
                b.read(i) for i in range(len(b.targets))
            ]
            assert [str(a.target(i)) for i in range(len(a.targets))] == [
                str(b.target(i)) for i in range(len(b.targets))
            ]
            assert getattr(a, "left_out", None) == getattr(b, "left_out", None)
            assert identity(a) == identity(b)
            assert usual(a) == usual(b) == "all"
            assert scan(a, name) == scan(b, name)
            assert not scan(a, name).damaged
    assert len(Manifest(f"{url}/lists/train.csv").load("train").targets) == 6
    files, path = file_system(f"{url}/data/train/cake")
    files.pipe_file(f"{path}//00.jpg", b"empty part")  # beside cake/00.jpg
    odd = ImageFolder(f"{url}/data", cache_gb=1e-6).load("train")
    assert usual(odd) == "off"
    assert [odd.read(i) for i in range(len(odd.paths)) if "cake//" in odd.name(i)] == [
        b"empty part"
    ]
    files.rm(f"{path}//00.jpg")
    cuts = [
        CutSet(ImageFolder(f"{place}/data").load("train"), (8, 8), Augment(), 0).__getitems__(
            [(3, 0), (1, 1)]
        )
        for place in (root, url)
    ]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*cuts, strict=True))
    found = [load_probe(Probe(f"{place}/data"))[1].targets for place in (root, url)]
    assert found[0] == found[1]
    assert len(unlabelled_folder(f"{url}/data", print).targets) == len(
        unlabelled_folder(str(root / "data"), print).targets
    )
    shutil.rmtree(tmp_path / "machine")
    # another process, and a cache that holds two pictures
    processes = multiprocessing.get_context("fork")
    pickled = pickle.dumps(ImageFolder(f"{url}/data", cache_gb=4e-6).load("train"))
    process = processes.Process(target=sums, args=(pickled, out := processes.Queue()))
    process.start()
    split = ImageFolder(str(root / "data")).load("train")
    assert out.get(timeout=300) == sorted(
        zlib.crc32(split.read(i)) for i in range(len(split.targets))
    )
    process.join()
    assert (
        0
        < sum(file.stat().st_size for file in (tmp_path / "machine" / "pictures").glob("*/??/*"))
        <= 4000
    )
    files, path = file_system(f"{url}/data/train/bread/01.jpg")
    listed = ImageFolder(f"{url}/data").load("train")
    place = next(i for i in range(len(listed.targets)) if listed.name(i).endswith("/bread/01.jpg"))
    files.pipe_file(path, b"longer" * 1000)
    shutil.rmtree(tmp_path / "machine")
    with pytest.raises(OSError, match="received [0-9]+ bytes, [0-9]+ are listed"):
        listed.read(place)
    assert ImageFolder(f"{url}/data").load("train").read(place) == b"longer" * 1000
    assert fingerprint(ImageFolder(f"{url}/data").load("train")) != fingerprint(listed)


def test_mistakes_by_url_are_told_in_a_line(
    recipe: Path,
    s3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pictures = draw_folder(tmp_path / "mini", train=2, val=1)
    put(pictures / "train" / "apple", f"{s3}/one/train/apple")
    put(pictures, f"{s3}/mini")
    files, _ = file_system(s3)
    files.pipe_file("food/none/train/apple/notes.txt", b"no picture")
    files.pipe_file("food/mini/train/apple/99.jpg", b"no picture")
    files.pipe_file(
        "food/gone.csv",
        b"path,label\n" + b"".join(b"mini/gone%d.jpg,%d\n" % (i, i % 4) for i in range(8)),
    )
    for source, message in (
        (
            Pictures("s3://no-such-bucket/x"),
            "data.source.root: folder s3://no-such-bucket/x not found",
        ),
        (ImageFolder(f"{s3}/none"), "data.source.root: no pictures below s3://food/none/train"),
        (Pictures(f"zip://x::{s3}/a.zip"), "must be the URL of one place"),
        (Pictures("nix://x"), "data.source.root: must be a URL of s3"),
        (Pictures(f"{s3}/mini", f"{s3}/no"), "data.source.val: folder s3://food/no not found"),
        (
            ImageFolder(f"{s3}/mini", val=f"{s3}/one"),
            "data.source.val: must be a folder below s3://food/mini, got s3://",
        ),
        (
            ImageFolder(str(pictures), val=f"{s3}/mini/val"),
            "data.source.val: must be a folder below",
        ),
        (
            Pictures("https://127.0.0.1/x"),
            "https://127.0.0.1/x: a web server does not list its files",
        ),
        (Food101(s3), "data.source.data_dir: must be a folder of this machine, got s3://food"),
        (Manifest(f"{s3}/no.csv"), "data.source.train: s3://food/no.csv not found"),
        (
            SegmentationFolder(f"{s3}/no", ["a", "b"]),
            "data.source.root: folder s3://food/no not found",
        ),
    ):
        with pytest.raises(UserError) as told:
            source.load("val" if "val" in message else "train")
        assert message in str(told.value)
    folder, lists = "data.source.root=", '{"class_path": "Manifest", "init_args": {"train": "%s"}}'
    for item, message in (
        (f"{folder}{s3}/nothing", "data.source.root: folder s3://food/nothing not found"),
        (f"{folder}{s3}/one", "needs two classes or more, got one ('apple')"),
        (
            f"data.source={lists % f'{s3}/gone.csv'}",
            "s3://food/mini/gone1.jpg (s3://food/mini/gone1.jpg not found)",
        ),
        (
            f"{folder}{s3}/mini",
            "data.source: 1 damaged picture: train: s3://food/mini/train/apple/99.jpg (not a picture",
        ),
    ):
        assert train_main([f"recipe={recipe}", item]) == 2, item
        assert message in capsys.readouterr().err, item
    assert not run_folders(recipe)
    for name, value in (("AWS_ACCESS_KEY_ID", None), ("AWS_EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    files.clear_instance_cache()
    with pytest.raises(
        UserError, match=f"data.unlabeled: {s3}/x can't be listed, 6 times: Unable to locate cred"
    ):
        unlabelled_folder(f"{s3}/x", print)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match="data.source.train: .* needs the extra stream"):
        Manifest(f"{s3}/x.csv").load("train")
    with pytest.raises(ValueError, match="cache_gb must be > 0, got 0"):
        Pictures(f"{s3}/x", cache_gb=0)

"""Folders and manifests by URL: what is read from an S3 server is what is read from a disk."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from kd.cli import main, pack_main
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
from tests._helpers import Command, draw_folder, refuses
from tests._runs import assert_same, losses, resumed, run, run_folders, student_of, summary_of


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
        assert any(gets.failed.values()), gets.failed
        assert 0 < len(lists.seen) < 12  # not by each loader's process
        lists.often = gets.often = 0
        gets.seen.clear()
        again = run(recipe, *by_url, cached)
        assert not gets.seen
    disk = run(recipe, *few, cached)
    assert losses(remote) == losses(again) == losses(disk)
    assert_same(student_of(remote), student_of(disk))
    found = [summary_of(folder)["cache"] for folder in (remote, again)]
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
    resumed(disk, f"data.source.root={url}", "trainer.max_epochs=3")
    files, path = file_system(f"{url}/train/apple/00.jpg")
    before_, data = split_facts(ImageFolder(url).load("train")).content, files.cat_file(path)
    files.pipe_file(path, data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])  # of the same size
    assert split_facts(ImageFolder(url).load("train")).content != before_
    changed = run(recipe, *by_url, cached)
    assert summary_of(changed)["cache"]["answers_computed"] == 32


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
            assert identity(a) == identity(b)
            assert usual(a) == usual(b) == "all"
            assert scan(a, name) == scan(b, name)
            assert not scan(a, name).damaged
    assert len(Manifest(f"{url}/lists/train.csv").load("train").targets) == 6
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
    copied = [path for path in (tmp_path / "machine" / "fetched").rglob("*") if path.is_file()]
    assert {path.suffix.lower() for path in copied} == {".jpg", ".png", ""}  # the last is the lock


def test_a_copy_follows_what_the_store_has(s3: str, tmp_path: Path) -> None:
    """A file of the same size, one that has gone, one that somebody has changed here."""
    url = put(draw_folder(tmp_path / "mini", train=2, val=1), f"{s3}/follows")
    before_ = ImageFolder(url).load("train")
    names = [before_.name(i) for i in range(len(before_.targets))]
    kept, print_before = before_.read(0), fingerprint(before_)
    assert fingerprint(ImageFolder(url).load("train")) == print_before
    Path(names[0]).write_bytes(kept + b"by hand")
    assert ImageFolder(url).load("train").read(0) == kept
    files, path = file_system(f"{url}/train/apple/00.jpg")
    files.pipe_file(path, kept[:-3] + bytes([kept[-3] ^ 1]) + kept[-2:])
    files.rm_file(file_system(f"{url}/train/apple/01.jpg")[1])
    after = ImageFolder(url).load("train")
    assert after.read(0) == files.cat_file(path) != kept
    assert [after.name(i) for i in range(len(after.targets))] == [names[0], *names[2:]]
    assert fingerprint(after) != print_before


def test_a_disk_without_room_is_named_before_anything_is_fetched(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put(draw_folder(tmp_path / "mini", train=2, val=1), f"{s3}/room")
    room = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr("kd.storage.objects.shutil.disk_usage", lambda path: room)
    with refuses(r"^data.source.root: .* has room for 0 MB"):
        ImageFolder(url).load("train")
    assert not [*(tmp_path / "machine").rglob("*.jpg")]


def test_mistakes_by_url_are_told_in_a_line(
    recipe: Path,
    s3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Command,
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
            "data.source.root: s3://no-such-bucket/x: no pictures below it",
        ),
        (ImageFolder(f"{s3}/none"), "data.source.root: s3://food/none: no pictures below it"),
        (Pictures(f"zip://x::{s3}/a.zip"), "must be a URL of s3, "),
        (Pictures("nix://x"), "data.source.root: must be a URL of s3"),
        (Pictures(f"{s3}/mini", f"{s3}/no"), "data.source.val: s3://food/no: no pictures below it"),
        (
            ImageFolder(f"{s3}/mini", val=f"{s3}/one"),
            f"data.source.val: folder {s3}/one not found; {s3}/mini has train, val",
        ),
        (
            Pictures("https://127.0.0.1/x"),
            "https://127.0.0.1/x: a web server does not list its files",
        ),
        (Food101(s3), "data.source.data_dir: must be a folder of this machine, got s3://food"),
        (Manifest(f"{s3}/no.csv"), "data.source.train: s3://food/no.csv not found"),
        (
            SegmentationFolder(f"{s3}/no", ["a", "b"]),
            "data.source.root: s3://food/no: no pictures below it",
        ),
    ):
        with pytest.raises(UserError) as told:
            source.load("val" if "val" in message else "train")
        assert message in str(told.value)
    folder, lists = "data.source.root=", '{"class_path":"Manifest","init_args":{"train":"%s"}}'
    for item, message in (
        (f"{folder}{s3}/nothing", "data.source.root: s3://food/nothing: no pictures below it"),
        (
            f"{folder}{s3}/mini data.source.cache_gb=1",
            "pictures and packs by URL are copied whole to this disk",
        ),
        (f"{folder}{s3}/one", "needs two classes or more, got one ('apple')"),
        (
            f"data.source={lists % f'{s3}/gone.csv'}",
            "none of the 8 files exists",
        ),
        (
            f"{folder}{s3}/mini",
            "/fetched/s3/food/mini/train/apple/99.jpg (not a picture",
        ),
    ):
        assert message in refusal("train", [f"recipe={recipe}", *item.split(" ")]), item
    assert not run_folders(recipe)
    for name, value in (("AWS_ACCESS_KEY_ID", None), ("AWS_EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    files.clear_instance_cache()
    with refuses(f"data.unlabeled: {s3}/x can't be listed, 6 times: Unable to locate cred"):
        unlabelled_folder(f"{s3}/x", print)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with refuses("data.source.train: .* needs the extra stream"):
        Manifest(f"{s3}/x.csv").load("train")

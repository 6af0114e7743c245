"""Tar shards as others make them: read as they lie, the run over them is the run over their folder."""

import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kd.cli import main
from kd.data.scan import scan
from kd.data.sources import ImageFolder, WebDataset
from kd.errors import UserError
from tests._files import read_json
from tests._helpers import CLASSES, refuses
from tests._runs import assert_same_runs, run

Members = dict[str, bytes]


def shard(file: Path, samples: Sequence[Members], mode: str = "w") -> Path:
    """A tar file of samples: contents by name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode) as tar:
        for members in samples:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return file


def shards(folder: Path, pictures: Path, kind: str) -> Path:
    """The drawn pictures in shards of 10, in the folder's own order, so that a run sees them in the same one."""
    source = ImageFolder(str(pictures))
    for name in ("train", "val"):
        split, samples = source.load(name), list[Members]()
        for i, target in enumerate(split.targets):
            label = {
                "cls": {"cls": str(target).encode()},
                "json": {"json": json.dumps({"label": CLASSES[target], "width": 44}).encode()},
                "txt": {"txt": f"{CLASSES[target]}\n".encode()},
            }[kind]
            members = {"JPG" if i % 2 else "jpg": split.read(i), **label, "extra.npy": b"x"}
            samples.append(
                {f"./a.b/{i:04d}.{ending}": content for ending, content in members.items()}
            )
        for n in range(0, len(samples), 10):
            shard(folder / f"{name}-{n // 10:03d}.tar", samples[n : n + 10])
    return folder


def test_foreign_shards_are_read_as_their_folder_is(
    recipe: Path, pictures: Path, tmp_path: Path
) -> None:
    """By a pattern of braces and a folder; with labels as numbers, in JSON and as text."""
    made = {kind: shards(tmp_path / kind, pictures, kind) for kind in ("cls", "json", "txt")}
    ways = {
        "cls": (
            f"{made['cls']}/train-{{000..004}}.tar",
            f"{made['cls']}/val-*.tar",
            "cls",
            list(CLASSES),
        ),
        "json": (
            f"{made['json']}/train-*.tar",
            f"{made['json']}/val-{{000..001}}.tar",
            "json.label",
        ),
    }
    for way in ways.values():
        source = WebDataset(*way)
        for name in ("train", "val"):
            split, folder = source.load(name), ImageFolder(str(pictures)).load(name)
            assert (split.targets, source.classes) == (folder.targets, list(CLASSES))
            assert [split.read(i) for i in range(len(split.targets))] == [
                folder.read(i) for i in range(len(folder.paths))
            ]
    for file in made["txt"].glob("val-*.tar"):
        (tmp_path / "val").mkdir(exist_ok=True)
        file.rename(tmp_path / "val" / file.name)
    items = ["data.num_workers=1", "trainer.max_epochs=1"]
    folder = run(recipe, *items)
    foreign = run(recipe, *items, "data.source=WebDataset", f"data.source.train={made['txt']}",
                  f"data.source.val={tmp_path / 'val'}", "data.source.label=txt")  # fmt: skip
    assert_same_runs(folder, foreign)
    pattern = f"data.source.train={made['cls']}/train-{{000..004}}.tar"
    assert main("eval", [str(foreign), "data.source=WebDataset", pattern, "split=train",
                         "data.source.label=cls", f"data.source.classes=[{', '.join(CLASSES)}]"]) == 0  # fmt: skip
    assert read_json(foreign / "eval_train.json")["pictures"] == 48


def test_shards_without_the_label_name_what_they_have(tmp_path: Path, pictures: Path) -> None:
    split = ImageFolder(str(pictures)).load("train")
    samples = [
        {f"{i}.jpg": split.read(i % 48), f"{i}.txt": f"picture {i}".encode()} for i in range(100)
    ]
    samples += [{"x.heic": b"", "x.txt": b"a"}, {"y.txt": b"1"}]
    folder = shard(tmp_path / "captions" / "0.tar", samples).parent
    with refuses(
        r"has 'cls' \(they have jpg, txt\); data.source.label=cls, txt, json.FIELD or none says which"
    ):
        WebDataset(str(folder)).load("train")
    source = WebDataset(str(folder), label="none")
    found = source.load("train")
    assert (source.classes, set(found.targets), len(found.targets)) == ([], {-1}, 100)
    assert found.left_out == {".heic": 1, "no picture": 1}
    assert not source.has("val")


def test_a_folder_of_other_splits_is_not_trained_on(tmp_path: Path, pictures: Path) -> None:
    """All its shards were: pictures of validation and test, without a word."""
    picture = ImageFolder(str(pictures)).load("train").read(0)
    for name in ("val-0", "val-1", "test-0"):
        shard(tmp_path / f"{name}.tar", [{"a.jpg": picture, "a.cls": b"0"}])
    message = "has shards of test, val; patterns say which are read: data.source.train="
    with refuses(message):
        WebDataset(str(tmp_path)).load("train")
    pattern = WebDataset(str(tmp_path / "val-*.tar"))
    assert len(pattern.load("train").targets) == 2


def test_a_shard_whose_name_is_not_utf_8_is_refused_in_a_line(
    tmp_path: Path, pictures: Path
) -> None:
    picture = ImageFolder(str(pictures)).load("train").read(0)
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.tar"))
    shard(file, [{"a.jpg": picture, "a.cls": b"0"}])
    split = WebDataset(str(file)).load("train")
    assert split.read(0) == picture
    assert scan(split, "train").damaged == {
        0: "its name is not UTF-8"
    }  # in a line, as of any picture


def test_what_can_not_be_read_is_named(tmp_path: Path, pictures: Path) -> None:
    picture = ImageFolder(str(pictures)).load("train").read(0)
    good = {"a.jpg": picture, "a.cls": b"0"}
    whole = shard(tmp_path / "whole.tar", [good, {"b.jpg": picture, "b.cls": b"1" * 5000}])
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[: 512 + len(picture) // 2])
    cases = [
        (tmp_path / "none", f"data.source.train: {tmp_path}/none not found"),
        (tmp_path / "n-{3..1}.tar", "data.source.train: no tar files: "),
        ("s3://bucket/a.tar", "is not on a disk; copy the shards there"),
        (tmp_path / "cut.tar", "is truncated"),
        (shard(tmp_path / "packed.tar", [good], "w:gz"), "is not an uncompressed tar file"),
        (shard(tmp_path / "none.tar", [{"a.cls": b"0"}]), "no pictures in 1 shard(s)"),
        (shard(tmp_path / "twice.tar", [good, good]), "holds a.jpg twice"),
        (
            shard(tmp_path / "long.tar", [{**good, "a.cls": b"7" * 2**21}]),
            "is no label: 2,097,152 bytes",
        ),
        (
            shard(tmp_path / "two.tar", [{**good, "a.png": picture}]),
            "a in " + str(tmp_path / "two.tar"),
        ),
        (shard(tmp_path / "some.tar", [good, {"b.jpg": picture}]), "data.source.train: b.jpg in"),
        (
            shard(tmp_path / "list.tar", [{"a.jpg": picture, "a.json": b'{"label": [1, 2]}'}]),
            "holds no single label",
        ),
    ]
    for place, told in cases:
        with pytest.raises(UserError) as error:
            label = "json.label" if str(place).endswith("list.tar") else "cls"
            WebDataset(str(place), label=label).load("train")
        assert told in str(error.value)
        assert "\n" not in str(error.value)
    for arguments, told in (
        (
            {"label": "txt"},
            f"data.source.label: no sample of {whole} has 'txt' (they have cls, jpg)",
        ),
        (
            {"classes": ["one"]},
            f"1 label not in the training pictures: '{60 * '1'}' (1 picture, for example b",
        ),
    ):
        with pytest.raises(UserError) as error:
            WebDataset(str(whole), **arguments).load("train")
        assert told in str(error.value)

"""The same oddity in the data gets the same answer from each reader, and each reader is in the table."""

import inspect
import io
import json
import tarfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

import kd.data.sources
from kd.data.datamodule import DistillationDataModule
from kd.data.pack import pack
from kd.data.sources import (
    HuggingFace,
    ImageFolder,
    Manifest,
    SegmentationFolder,
    Shards,
    Source,
    WebDataset,
    identity,
)
from tests._helpers import refuses


class Picture(NamedTuple):
    """One picture of a data set to be written: the folder or value that names its split, its label, its content."""

    split: str
    label: str
    number: int
    ending: str = ".png"


def png(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = (
        np.random.default_rng(number).integers(0, 255, (8, max(8, number - 90), 3)).astype(np.uint8)
    )
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write_files(root: Path, pictures: list[Picture]) -> list[str]:
    """Writes ``root/pictures/N.png``; returns the paths as lists name them."""
    (root / "pictures").mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (root / "pictures" / f"{picture.number}{picture.ending}").write_bytes(png(picture.number))
    return [f"pictures/{picture.number}{picture.ending}" for picture in pictures]


# -- one writer for each reader --------
def folder(root: Path, pictures: list[Picture], empty: str = "") -> Source:
    for i, picture in enumerate(pictures):
        place = root / picture.split / picture.label
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i}{picture.ending}").write_bytes(png(picture.number))
    if empty:
        (root / pictures[0].split / empty).mkdir()
    return ImageFolder(str(root))


def table(root: Path, pictures: list[Picture], empty: str = "") -> Source:
    paths = write_files(root, pictures)
    rows = [f'"{path}","{p.label}","{p.split}"\n' for path, p in zip(paths, pictures, strict=True)]
    rows += [f'"pictures/none.heic","{empty}","{pictures[0].split}"\n'] if empty else []
    (root / "all.csv").write_text("path,label,split\n" + "".join(rows))
    return Manifest(str(root / "all.csv"))


def json_lines(root: Path, pictures: list[Picture], empty: str = "") -> Source:
    paths = write_files(root, pictures)
    rows = [
        {"path": path, "label": number_or(p.label), "split": p.split}
        for path, p in zip(paths, pictures, strict=True)
    ]
    rows += (
        [{"path": "pictures/none.heic", "label": empty, "split": pictures[0].split}]
        if empty
        else []
    )
    (root / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Manifest(str(root / "all.jsonl"))


def hugging_face(root: Path, pictures: list[Picture], empty: str = "") -> Source:
    datasets = pytest.importorskip("datasets")
    paths = [str(root / path) for path in write_files(root, pictures)]
    (root / "set").mkdir()
    for split in dict.fromkeys(p.split for p in pictures):
        chosen = [i for i, p in enumerate(pictures) if p.split == split]
        columns = {
            "image": [paths[i] for i in chosen],
            "label": [pictures[i].label for i in chosen],
        }
        rows = datasets.Dataset.from_dict(columns)
        if empty:
            names = sorted({p.label for p in pictures} | {empty})
            rows = rows.cast_column("label", datasets.ClassLabel(names=names))
        rows.to_parquet(str(root / "set" / f"{split}.parquet"))
    return HuggingFace(str(root / "set"))


def web_data_set(root: Path, pictures: list[Picture], empty: str = "") -> Source:
    (root / "shards").mkdir(parents=True)
    for split in dict.fromkeys(p.split for p in pictures):
        with tarfile.open(root / "shards" / f"{split}-0000.tar", "w") as tar:
            for i, p in enumerate(pictures):
                if p.split == split:
                    members = {
                        f"{i}{p.ending}": png(p.number),
                        f"{i}.json": json.dumps({"label": p.label}).encode(),
                    }
                    for name, content in members.items():
                        member = tarfile.TarInfo(name)
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
    names = sorted({p.label for p in pictures} | {empty}) if empty else None
    patterns = [f"{root}/shards/{pictures[i].split}-*.tar" for i in (0, 2)]
    return WebDataset(*patterns, label="json.label", classes=names)


def shards(root: Path, pictures: list[Picture], empty: str = "") -> Source:
    source = table(root, pictures, empty)
    for split in ("train", "val"):
        part = source.load(split)
        names = sorted([*source.classes, empty]) if empty else source.classes
        part.targets = [names.index(source.classes[target]) for target in part.targets]  # type: ignore[attr-defined]
        pack(part, names, str(root / "pack"), split, source=source)
    return Shards(str(root / "pack"))


def segmentation(root: Path, pictures: list[Picture], empty: str = "") -> Source:
    for i, picture in enumerate(pictures):
        for kind, ending in (("images", picture.ending), ("masks", ".png")):
            (root / kind / picture.split).mkdir(parents=True, exist_ok=True)
            (root / kind / picture.split / f"{i}{ending}").write_bytes(png(picture.number))
    return SegmentationFolder(str(root), ["a", "b"])


Writer = Callable[..., Source]
WRITERS: dict[str, Writer] = {
    writer.__name__: writer
    for writer in (folder, table, json_lines, hugging_face, web_data_set, shards, segmentation)
}  # fmt: skip
READERS = {ImageFolder, Manifest, HuggingFace, WebDataset, Shards, SegmentationFolder}
WITHOUT = {
    "Food101": "torchvision lists its files", "FoodTagMini": "kd draws it", "FoodTagCalories": "kd draws it",
    "Pictures": "has no labels; its splits are folders of their own",
}  # fmt: skip
LISTS = {"table", "json_lines"}
DECLARED = {"hugging_face", "web_data_set", "shards"}
"""Readers of which this test's data sets list their classes with ids: a class without a picture keeps its id."""


def number_or(label: str) -> str | int:
    return int(label) if label.isdigit() else label


def answer(source: Source) -> tuple[list[str], list[str], list[str]]:
    """Classes, and the labels of the training and of the validation pictures in order of label."""
    train, val = source.load("train"), source.load("val")
    labels = [sorted(source.classes[target] for target in split.targets) for split in (train, val)]
    return source.classes, labels[0], labels[1]


def plain_set(
    train: str = "train", val: str = "val", labels: tuple[str, ...] = ("cat", "dog")
) -> list[Picture]:
    """Two pictures of each label to train on, one to validate."""
    splits = [train, train, val]
    return [Picture(splits[i % 3], labels[i // 3], i) for i in range(3 * len(labels))]


def test_each_reader_is_in_the_table() -> None:
    modules = [
        import_module(f"kd.data.sources.{m.name}") for m in iter_modules(kd.data.sources.__path__)
    ]
    classes = {kind for module in modules for kind in vars(module).values()
               if inspect.isclass(kind) and issubclass(kind, Source) and kind is not Source
               and kind.__module__.startswith("kd.data.sources")}  # fmt: skip
    names = {kind.__name__ for kind in classes - READERS if not kind.__name__.startswith("_")}
    unknown = names - {*WITHOUT}
    assert not unknown, "write a data set for it here, or say in WITHOUT why it reads none"


LABELLED = sorted({*WRITERS} - {"segmentation"})


@pytest.mark.parametrize("names", [("Training", "Testing"), ("train_set", "val_set"), ("seg_train", "seg_test"),
                                   ("trn", "dev"), ("Train", "Test")])  # fmt: skip
@pytest.mark.parametrize("reader", sorted(WRITERS))
def test_other_names_of_splits(reader: str, names: tuple[str, str], tmp_path: Path) -> None:
    source = WRITERS[reader](tmp_path, plain_set(*names))
    assert source.has("val")
    if reader == "segmentation":
        assert [len(source.load(split).targets) for split in ("train", "val")] == [4, 2]
    else:
        assert answer(source) == (["cat", "dog"], ["cat", "cat", "dog", "dog"], ["cat", "dog"])


@pytest.mark.parametrize("reader", sorted(WRITERS))
def test_pictures_of_a_test_split_are_not_trained_on(reader: str, tmp_path: Path) -> None:
    pictures = [*plain_set(), Picture("test", "cat", 50), Picture("test", "dog", 51)]
    source = WRITERS[reader](tmp_path, pictures)
    assert [len(source.load(split).targets) for split in ("train", "val")] == [4, 2]


@pytest.mark.parametrize("reader", LABELLED)
def test_a_class_without_a_picture(reader: str, tmp_path: Path) -> None:
    source = WRITERS[reader](tmp_path, plain_set(), empty="aardvark")
    classes, train, _ = answer(source)
    assert classes == (["aardvark", "cat", "dog"] if reader in DECLARED else ["cat", "dog"])
    assert train == ["cat", "cat", "dog", "dog"]
    counted = getattr(source.load("train"), "left_out", {})
    assert any("aardvark" in note for note in source.notes) or counted == {".heic": 1}


@pytest.mark.parametrize("reader", LABELLED)
def test_blanks_around_labels(reader: str, tmp_path: Path) -> None:
    pictures = plain_set()
    pictures[1] = pictures[1]._replace(label="cat ")
    pictures[3] = pictures[3]._replace(label=" dog")
    if reader == "folder":
        assert {p.label for p in pictures} == {"cat", "cat ", "dog", " dog"}
    assert answer(WRITERS[reader](tmp_path, pictures))[:2] == (
        ["cat", "dog"],
        ["cat", "cat", "dog", "dog"],
    )


@pytest.mark.parametrize(
    "reader", sorted({*LABELLED} - {"shards"})
)  # kd-pack refuses it, as it reads the list
def test_a_label_that_only_validation_has(reader: str, tmp_path: Path) -> None:
    pictures = [*plain_set(), Picture("val", "owl", 60)]
    with refuses(r"1 label not in the training pictures: 'owl' \(1 picture, for example "):
        WRITERS[reader](tmp_path, pictures).load("val")


@pytest.mark.parametrize("reader", LABELLED)
def test_numbers_as_text(reader: str, tmp_path: Path) -> None:
    source = WRITERS[reader](tmp_path, plain_set(labels=("1", "2")))
    assert answer(source)[:2] == (["1", "2"], ["1", "1", "2", "2"])
    assert any("'1' is class 0" in note for note in source.notes)


@pytest.mark.parametrize("reader", LABELLED)
@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (("cat", "nan"), "'nan' is a class"),
        (("0.25", "1.5"), "each number is a class: '0.25', '1.5'"),
    ],
    ids=["missing", "fractions"],
)
def test_labels_that_may_be_none(
    reader: str, labels: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    source = WRITERS[reader](tmp_path, plain_set(labels=labels))
    source.load("train")
    assert any(words in note for note in source.notes), source.notes


@pytest.mark.parametrize("reader", sorted(WRITERS))
def test_linked_folders(reader: str, tmp_path: Path) -> None:
    WRITERS[reader](tmp_path / "real", plain_set())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    again = WRITERS[reader](tmp_path / "other", plain_set())
    place = {"root": "root", "path": "path"}
    for name in place:
        if hasattr(again, name):
            setattr(again, name, str(getattr(again, name)).replace("/other", "/link"))
    for name in ("lists", "places"):
        if hasattr(again, name):
            setattr(
                again,
                name,
                json.loads(json.dumps(getattr(again, name)).replace("/other", "/link")),
            )
    assert [len(again.load(split).targets) for split in ("train", "val")] == [4, 2]


@pytest.mark.parametrize("reader", sorted(WRITERS))
def test_a_picture_that_was_edited_makes_another_split(reader: str, tmp_path: Path) -> None:
    """By the file's name alone in a list; elsewhere by its size. It is the same wherever the files lie."""
    identities = []
    for number in ("9", "99", "099"):
        pictures = [Picture("train", "cat", int(number)), *plain_set()]
        identities.append(identity(WRITERS[reader](tmp_path / number, pictures).load("train")))
    assert identities[0] != identities[1] == identities[2]


def test_a_linked_folder_within_a_class_is_read_once(tmp_path: Path) -> None:
    source = folder(tmp_path / "set", plain_set())
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "x.png").write_bytes(png(99))
    for name, target in (
        ("more", tmp_path / "more"),
        ("up", tmp_path / "set"),
        ("again", tmp_path / "more"),
    ):
        (tmp_path / "set" / "train" / "cat" / name).symlink_to(target)
    assert answer(source)[1] == ["cat", "cat", "cat", "dog", "dog"]


@pytest.mark.parametrize("reader", LABELLED)
def test_one_picture_with_two_labels(reader: str, tmp_path: Path) -> None:
    """A list refuses a path with two labels; elsewhere the same bytes with two labels are reported."""
    source = (
        WRITERS[reader](tmp_path, [*plain_set(), Picture("train", "dog", 0)])
        if reader != "shards"
        else None
    )
    if source is None:
        pytest.skip("packed from a list, which refuses it")
    if reader in LISTS:
        with refuses(r"lists .*0.png twice, with different labels \('cat', 'dog'\)"):
            source.load("train")
    else:
        DistillationDataModule(source, img_size=8).prepare_data()
        assert [
            note
            for note in source.notes
            if "1 training pictures are listed before with another label" in note
        ]


@pytest.mark.parametrize(
    "reader", sorted({*WRITERS} - {"shards", "hugging_face"})
)  # these hold bytes, not files
def test_files_that_are_no_pictures_are_counted(reader: str, tmp_path: Path) -> None:
    pictures = [*plain_set(), Picture("train", "dog", 70, ".npz")]
    split = WRITERS[reader](tmp_path, pictures).load("train")
    assert split.left_out == {".npz": 1}  # type: ignore[attr-defined]
    assert len(split.targets) == 4


@pytest.mark.parametrize("reader", sorted(WRITERS))
def test_the_users_folder(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = WRITERS[reader](tmp_path / "set", plain_set())
    monkeypatch.setenv("HOME", str(tmp_path))
    below = {
        name: value
        for name in ("root", "path", "lists", "places")
        if (value := vars(source).get(name))
    }
    (value,) = below.values()
    given = value["train"] if isinstance(value, dict) else value
    given = (given[0] if isinstance(given, list) else given).replace(str(tmp_path), "~")
    arguments = {
        "segmentation": {"class_names": ["a", "b"]},
        "web_data_set": {"label": "json.label", "val": given.replace("/train-", "/val-")},
    }
    again = type(source)(given, **arguments.get(reader, {}))
    assert [len(again.load(split).targets) for split in ("train", "val")] == [4, 2]

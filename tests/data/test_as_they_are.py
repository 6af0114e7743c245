"""Data as people have them: layouts of other programs, lists with other columns, splits that share pictures."""

import json
import shutil
from pathlib import Path

import pytest

from kd.cli import train_main
from kd.data.datamodule import DistillationDataModule
from kd.data.info import LISTS
from kd.data.scan import Check, scan
from kd.data.sources import ImageFolder, Manifest, Source, manifest
from kd.run.request import translate
from kd.storage.elsewhere import LARGEST
from tests._helpers import CLASSES, draw_folder, refuses
from tests._runs import run, summary_of

# -- folders --------


@pytest.mark.parametrize("name", ["valid", "validation", "test"])
def test_validation_folders_of_other_names_are_found(name: str, tmp_path: Path) -> None:
    draw_folder(tmp_path, train=3, val=1).joinpath("val").rename(tmp_path / name)
    data = DistillationDataModule(ImageFolder(str(tmp_path)), img_size=32)
    assert (data.info.train, data.info.val, data.splits.holds_out) == (12, 4, False)
    assert data.source.describe() == f"ImageFolder {tmp_path}, validated with {name}"


def test_of_several_validation_folders_the_test_split_is_the_last_choice(tmp_path: Path) -> None:
    root = draw_folder(tmp_path, train=3, val=1)
    shutil.copytree(root / "val" / "apple", root / "test" / "apple")
    assert len(ImageFolder(str(root)).load("val").targets) == 4
    (root / "val").rename(root / "valid")
    assert len(ImageFolder(str(root)).load("val").targets) == 4
    assert len(ImageFolder(str(root), val="test").load("val").targets) == 1


def test_a_flat_folder_of_classes_is_split(tmp_path: Path) -> None:
    root = draw_folder(tmp_path, train=10, val=1) / "train"
    data = DistillationDataModule(ImageFolder(str(root)), img_size=32, val_fraction=0.2)
    assert (data.info.classes, data.info.train, data.info.val) == ([*CLASSES], 32, 8)
    assert data.splits.holds_out


# -- lists --------


def listed(
    folder: Path, name: str, content: str | bytes, **arguments: object
) -> tuple[list[str], list[str]]:
    """Paths below the folder, and their labels."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    source = Manifest(str(folder / name), **arguments)
    split = source.load("train")
    labels = [
        ";".join(source.classes[i] for i in t) if isinstance(t, list) else source.classes[t]
        for t in split.targets
    ]
    return [str(Path(path).relative_to(folder)) for path in split.paths], labels


TWO = (["a.jpg", "b/c.jpg"], ["x", "y"])


@pytest.mark.parametrize(
    ("name", "content", "arguments"),
    [
        ("bom.csv", b"\xef\xbb\xbfpath,label\na.jpg,x\nb/c.jpg,y\n", {}),
        ("bom.jsonl", b'\xef\xbb\xbf{"path": "a.jpg", "label": "x"}\n{"path": "b/c.jpg", "label": "y"}\n', {}),
        ("semicolon.csv", "id;path;label\n1;a.jpg;x\n2;b/c.jpg;y\n", {"delimiter": ";"}),
        ("tab.tsv", "path\tlabel\na.jpg\tx\nb/c.jpg\ty\n", {}),
        ("named.csv", "filename,class\na.jpg,x\nb/c.jpg,y\n", {"path_column": "filename", "label_column": "class"}),
        ("bare.txt", "a.jpg x\nb/c.jpg y\n", {"path_column": 0, "label_column": 1}),
        ("turned.csv", "x,0,a.jpg\ny,0,b/c.jpg\n", {"path_column": 2, "label_column": 0}),
        ("bar.txt", "path^label\na.jpg^x\nb/c.jpg^y\n", {"delimiter": "^"}),
        ("array.json", json.dumps([{"path": "a.jpg", "label": "x"}, {"path": "b/c.jpg", "label": "y"}]), {}),
    ],
)  # fmt: skip
def test_lists_of_many_kinds(
    name: str, content: str | bytes, arguments: dict, tmp_path: Path
) -> None:
    assert listed(tmp_path, name, content, **arguments) == TWO


def test_semicolons_part_labels_in_a_list_without_a_header(tmp_path: Path) -> None:
    found = listed(
        tmp_path, "m.csv", "a.jpg,x;y\nb.jpg,y\n", path_column=0, label_column=1, multi_label=True
    )
    assert found == (["a.jpg", "b.jpg"], ["x;y", "y"])


def test_a_list_of_another_encoding_or_with_a_quote_that_stays_open_is_none(tmp_path: Path) -> None:
    with refuses("data.source.train: .*is no list of pictures"):
        listed(tmp_path, "m.csv", b"path,label\n\xff.jpg,x\n")
    with refuses(
        "data.source.train: .*/m.csv can't be read from line 3 on: unexpected end of data"
    ):
        listed(tmp_path, "m.csv", 'path,label\na.jpg,x\nb.jpg,"y\nc.jpg,x\n')


@pytest.mark.parametrize(("cells", "arguments", "labels"), [
    (["x;y", "y"], {}, ["x;y", "y"]), (["x|y", "y"], {"label_separator": "|"}, ["x;y", "y"]),
    (["x y", "y"], {"label_separator": " "}, ["x;y", "y"]), (["x, y", "y"], {"label_separator": ", "}, ["x;y", "y"]),
    (["[\"x\", 3]", "['y']"], {}, ["x;3", "y"]),
])  # fmt: skip
def test_several_labels_in_a_cell(
    cells: list[str], arguments: dict, labels: list[str], tmp_path: Path
) -> None:
    rows = "".join(f"{i}.jpg\t{cell}\n" for i, cell in enumerate(cells))
    found = listed(tmp_path, "m.tsv", f"path\tlabel\n{rows}", multi_label=True, **arguments)
    assert found[1] == labels


def test_a_column_of_splits_is_named(tmp_path: Path) -> None:
    rows = "".join(f"{i}.jpg,x,{value}\n" for i, value in enumerate(["train", "Testing"]))
    (tmp_path / "m.csv").write_text(f"path,label,subset\n{rows}")
    source = Manifest(str(tmp_path / "m.csv"), split_column="subset")
    assert source.has("val")
    assert [len(source.load(split).targets) for split in ("train", "val")] == [1, 1]
    assert len(Manifest(str(tmp_path / "m.csv"), split_column="none").load("train").targets) == 2


def test_a_split_that_a_list_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("path,label\na.jpg,x\n")
    source: Source = Manifest(str(tmp_path / "m.csv"))
    assert not source.has("val")
    with refuses(r"have the splits train, got 'test' \(data.source.test=FILE"):
        source.load("test")


# -- data.source=PATH --------


def source_of(*items: str) -> list[str]:
    request = translate([*items, "name=x"])
    request.resolved()
    return [item for item in request.overrides if item.startswith("data.source")]


def test_a_path_in_place_of_a_source_is_read_as_what_it_is(tmp_path: Path) -> None:
    folder = f"data.source.root={tmp_path}"
    assert source_of("recipe=foodtag_vit", f"data.source={tmp_path}") == [
        "data.source=ImageFolder",
        folder,
    ]
    assert source_of("recipe=foundation_vit", f"data.source={tmp_path}") == [folder]
    assert source_of("recipe=foodtag_vit", "data.source=s3://food") == [
        "data.source=ImageFolder", "data.source.root=s3://food"
    ]  # fmt: skip
    for ending in LISTS:
        file = f"{tmp_path}/m{ending}"
        found = source_of(
            "recipe=foundation_vit", f"data.source={file}", "data.source.label_column=class"
        )
        assert found == [
            "data.source=Manifest",
            f"data.source.train={file}",
            "data.source.label_column=class",
        ]
    (tmp_path / "train.json").touch()
    assert source_of("recipe=foodtag_vit", f"data.source={tmp_path}") == [
        "data.source=Shards",
        folder,
    ]
    assert {*manifest.DELIMITERS} < {*LISTS}
    with refuses(f"data.source: folder {tmp_path}/none not found"):
        source_of("recipe=foodtag_vit", f"data.source={tmp_path}/none")


def test_a_list_in_the_place_of_training_folders_is_a_manifests(tmp_path: Path) -> None:
    items = ["data.source.val=v.csv", "data.source.train=t.csv"]
    assert source_of("recipe=grocery_vit", *items)[0] == "data.source=Manifest"
    assert (
        source_of("recipe=grocery_vit", *items, "data.source=WebDataset")[0]
        != "data.source=Manifest"
    )
    assert source_of("recipe=grocery_vit", "data.source.train=train")[0] != "data.source=Manifest"


def test_a_data_sets_yaml_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("path: .\ntrain: images\nnames:\n  0: apple\n")
    with refuses("data.source: no class '/.*'; give the pictures' folder"):
        source_of("recipe=grocery_vit", f"data.source={tmp_path}/data.yaml")


@pytest.mark.parametrize(
    "key",
    ["data.source", "data.augment", "model.task", "model.distill_losses", "model.teacher.builder", "model.taps",
     "trainer.logger", "trainer.callbacks", "trainer.strategy", "optim.kwargs"],
)  # fmt: skip
def test_a_file_in_place_of_a_class_is_refused_unread(
    key: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "passwords"
    secret.write_text("swordfish: 1\n")
    assert train_main([f"recipe={recipe}", f"{key}={secret}"]) == 2
    told = capsys.readouterr()
    assert "swordfish" not in told.out + told.err
    assert told.err.startswith(f"kd-train: {key}: ") and told.err.count("\n") == 1


def test_a_file_named_like_a_number_is_none_of_its_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "10").touch()
    config = translate(["recipe=foodtag_vit", "trainer.max_epochs=10"]).resolved()
    assert config["trainer"]["max_epochs"] == 10


# -- pictures of both splits --------


def test_training_pictures_among_those_of_validation_are_counted(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = draw_folder(tmp_path / "data", train=4, val=2)
    copy = root / "val" / "cake" / "copied.jpg"
    shutil.copy(root / "train" / "bread" / "01.jpg", copy)
    folder = run(recipe, f"data.source.root={root}", "trainer.max_epochs=1")
    told = f"warning: 1 of 9 validation pictures are training pictures too, for example {copy} ({root}/train/bread/01.jpg)"
    assert told in capsys.readouterr().out
    assert summary_of(folder)["data"]["shared"] == 1


@pytest.mark.parametrize("check", ["all", "headers", "off"])
def test_a_list_with_the_same_pictures_for_both_is_refused(check: Check, tmp_path: Path) -> None:
    root = draw_folder(tmp_path / "data", train=2, val=1)
    rows = "".join(f"train/{name}/00.jpg,{name}\n" for name in CLASSES)
    (root / "m.csv").write_text(f"path,label\n{rows}")
    source = Manifest(str(root / "m.csv"), str(root / "m.csv"))
    data = DistillationDataModule(source, img_size=32, check=check)
    with refuses(r"data.source: all 4 validation pictures are training pictures \(.*00.jpg\)"):
        data.prepare_data()


@pytest.mark.parametrize("check", ["all", "headers"])
def test_a_shared_picture_is_named_where_a_damaged_one_before_it_is_left_out(
    check: Check, tmp_path: Path
) -> None:
    root = draw_folder(tmp_path / "data", train=2, val=1)
    (root / "val" / CLASSES[0] / "00.jpg").write_bytes(b"no picture")
    both = f"train/{CLASSES[1]}/00.jpg,{CLASSES[1]}\n"
    (root / "train.csv").write_text(f"path,label\ntrain/{CLASSES[0]}/00.jpg,{CLASSES[0]}\n{both}")
    (root / "val.csv").write_text(f"path,label\nval/{CLASSES[0]}/00.jpg,{CLASSES[0]}\n{both}"
                                  f"val/{CLASSES[1]}/00.jpg,{CLASSES[1]}\n")  # fmt: skip
    source = Manifest(str(root / "train.csv"), str(root / "val.csv"))
    data = DistillationDataModule(source, img_size=32, check=check, on_bad_image="skip")
    data.prepare_data()
    picture = str(root / "train" / CLASSES[1] / "00.jpg")
    assert data.splits.shared == [(picture, picture)]


def test_a_path_of_both_splits_is_found_where_one_of_them_alone_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kd.data.scan.ALL_UP_TO", 4)  # of more pictures the headers are read
    root = draw_folder(tmp_path / "data", train=2, val=1)
    rows = [f"train/{name}/{number}.jpg,{name}\n" for number in ("00", "01") for name in CLASSES]
    (root / "train.csv").write_text("path,label\n" + "".join(rows))
    (root / "val.csv").write_text("path,label\n" + "".join(rows[:4]))
    source = Manifest(str(root / "train.csv"), str(root / "val.csv"))
    data = DistillationDataModule(source, img_size=32)
    with refuses("data.source: all 4 validation pictures are training pic"):
        data.prepare_data()


def test_copies_among_pictures_that_are_held_out_are_counted_and_taken(tmp_path: Path) -> None:
    root = draw_folder(tmp_path / "data", train=4, val=1)
    for file in [*(root / "train").rglob("*.jpg")]:
        shutil.copy(file, file.with_stem(f"{file.stem}_again"))
    data = DistillationDataModule(ImageFolder(str(root / "train")), img_size=32)
    for _ in range(2):  # the second time from what the first one has noted
        data.prepare_data()
        assert len(data.splits.shared) == 4
        assert all(
            a.replace("_again", "") == b.replace("_again", "") for a, b in data.splits.shared
        )
        data = DistillationDataModule(ImageFolder(str(root / "train")), img_size=32)


def test_a_note_of_millions_of_pictures_is_read_back(tmp_path: Path, own_cache: Path) -> None:
    """With 20 bytes a picture it is larger than most files that are read whole may be."""
    split = ImageFolder(str(draw_folder(tmp_path / "data", train=1, val=1))).load("train")
    scan(split, "train")
    (note,) = (tmp_path / "cache" / "scans").glob("*.json")
    known = {"damaged": {}, "digests": ["as noted"] * 4}
    note.write_text(json.dumps(known) + " " * LARGEST)
    assert scan(split, "train").digests == known["digests"]

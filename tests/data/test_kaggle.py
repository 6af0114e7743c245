"""A table beside a folder of pictures, as competitions have it."""

from pathlib import Path

import pytest

from kd.cli import main
from kd.data.sources import Manifest
from kd.data.splits import DataSpec, Splits
from tests._helpers import Command, draw_folder, refuses, write_recipe


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """``train.csv`` with the columns ``id`` and ``kind``, and pictures in ``images/train/<class>/``."""
    draw_folder(tmp_path / "images", train=2, val=1)
    files = sorted((tmp_path / "images" / "train").rglob("*.*"))
    rows = [f"{file.relative_to(tmp_path / 'images')},{file.parent.name}" for file in files]
    (tmp_path / "train.csv").write_text("\n".join(["id,kind", *rows]))
    return tmp_path / "train.csv"


@pytest.fixture
def table_of_ids(table: Path) -> Path:
    """The same table with each picture's name without its ending."""
    table.write_text(table.read_text().replace(".jpg,", ","))
    return table


def by_id(table: Path, ending: str = ".jpg") -> Manifest:
    folder = str(table.parent / "images")
    columns = {"path_column": "id", "label_column": "kind", "ending": ending}
    return Manifest(str(table), image_dir=folder, **columns)  # type: ignore[arg-type]


def test_a_list_in_the_working_folder_beside_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0", "1"):
        (tmp_path / f"{name}.jpg").touch()
    (tmp_path / "train.json").write_text('[{"path": 0, "label": "a"}, {"path": 1, "label": "b"}]')
    monkeypatch.chdir(tmp_path)
    assert Manifest("train.json", ending=".jpg").load("train").paths == ["0.jpg", "1.jpg"]


def test_a_file_whose_name_has_no_ending_stays(table_of_ids: Path) -> None:
    for picture in (table_of_ids.parent / "images" / "train").rglob("*.jpg"):
        picture.with_suffix("").write_bytes(picture.read_bytes())
    source = by_id(table_of_ids, "")
    assert all(not Path(path).suffix for path in source.load("train").paths)
    assert not source.notes


def test_an_id_without_a_file_is_named_as_a_damaged_picture(table_of_ids: Path) -> None:
    picture = min((table_of_ids.parent / "images" / "train").rglob("*.jpg"))
    picture.unlink()
    first, *others = table_of_ids.read_text().splitlines()
    table_of_ids.write_text("\n".join([first, *reversed(others)]))
    with refuses(f"1 damaged picture: [a-z]+: {picture} "):
        Splits(by_id(table_of_ids), DataSpec()).prepare()


def test_a_trained_student_answers_for_a_table_of_ids(
    table_of_ids: Path, tmp_path: Path, refusal: Command
) -> None:
    """Training, evaluation and answers for a table without labels, as one types them in a competition."""
    recipe = write_recipe(
        tmp_path / "r.yaml", tmp_path, None, trainer__max_steps=1, data__batch_size=2
    )
    columns = [
        "data.source.path_column=id",
        "data.source.label_column=kind",
        "data.source.ending=.jpg",
    ]
    pictures = [f"data.source.image_dir={tmp_path}/images", *columns]
    words = [f"recipe={recipe}", f"data.source={table_of_ids}", *pictures, "name=ids"]
    assert main("train", words) == 0
    run = str(tmp_path / "runs" / "tiny" / "ids")
    assert main("eval", [run]) == 0
    rows = [line.replace(",", ",0.5,") for line in table_of_ids.read_text().splitlines()[1:]]
    ids = [row.partition(",")[0] for row in rows]
    test = tmp_path / "test.csv"
    test.write_text("\n".join(["id,age,shop", *rows]))
    out = tmp_path / "answers.csv"
    assert main("predict", [run, str(test), f"out={out}"]) == 0
    files = [line.partition(",")[0] for line in out.read_text().splitlines()[1:]]
    assert files == [f"{tmp_path}/images/{name}.jpg" for name in ids]

    elsewhere = f"data.source.image_dir={tmp_path}"
    assert "data.source.image_dir=FOLDER" in refusal("predict", [run, str(test), elsewhere])

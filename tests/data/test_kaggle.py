"""A table beside a folder of pictures, as competitions have it."""

from pathlib import Path

import pytest

from kd.data.sources import Manifest
from kd.data.splits import Splits
from kd.errors import UserError
from kd.settings import DataSettings
from tests._helpers import draw_folder, run_cli, write_recipe


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """``train.csv`` with the columns ``id`` and ``kind``, and pictures in ``images/train/<class>/``."""
    draw_folder(tmp_path / "images", train=2, val=1)
    files = sorted((tmp_path / "images" / "train").rglob("*.*"))
    rows = [f"{file.relative_to(tmp_path / 'images')},{file.parent.name}" for file in files]
    (tmp_path / "train.csv").write_text("\n".join(["id,kind", *rows]))
    return tmp_path / "train.csv"


def test_a_table_beside_a_folder_of_pictures(table: Path) -> None:
    columns = {"path_column": "id", "label_column": "kind"}
    source = Manifest(str(table), image_dir=str(table.parent / "images"), **columns)  # type: ignore[arg-type]
    split = source.load("train")
    assert len(split.targets) == len(table.read_text().splitlines()) - 1
    assert Path(split.paths[0]).is_file()


def test_paths_that_start_elsewhere_are_no_damaged_pictures(table: Path) -> None:
    source = Manifest(str(table), path_column="id", label_column="kind")
    count = len(table.read_text().splitlines()) - 1
    with pytest.raises(UserError) as raised:
        Splits(source, DataSettings()).split("train")
    message = str(raised.value)
    assert f"none of the {count} files exists: relative paths start at {table.parent} (" in message
    assert "data.source.image_dir=FOLDER says where they start" in message


@pytest.fixture
def table_of_ids(table: Path) -> Path:
    """The same table with each picture's name without its ending."""
    table.write_text(table.read_text().replace(".jpg,", ","))
    return table


def by_id(table: Path, ending: str = ".jpg") -> Manifest:
    folder = str(table.parent / "images")
    columns = {"path_column": "id", "label_column": "kind", "ending": ending}
    return Manifest(str(table), image_dir=folder, **columns)  # type: ignore[arg-type]


def test_ids_without_an_ending_are_completed(table_of_ids: Path) -> None:
    with pytest.raises(UserError, match="/00\\); data.source.ending=.jpg completes them"):
        Splits(by_id(table_of_ids, ""), DataSettings()).split("train")
    split = Splits(by_id(table_of_ids), DataSettings()).split("train")
    names = [split.name(i) for i in range(len(split.targets))]
    assert names and all(Path(name).is_file() for name in names)


def test_a_list_in_the_working_folder_beside_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0001", "0002"):
        (tmp_path / f"{name}.jpg").touch()
    (tmp_path / "train.csv").write_text("path,label\n0001,a\n0002,b\n")
    monkeypatch.chdir(tmp_path)
    assert Manifest("train.csv", ending=".jpg").load("train").paths == ["0001.jpg", "0002.jpg"]


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
    with pytest.raises(UserError, match=f"1 damaged picture: [a-z]+: {picture} "):
        Splits(by_id(table_of_ids), DataSettings()).prepare()


def test_a_trained_student_answers_for_a_table_of_ids(table_of_ids: Path, tmp_path: Path) -> None:
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
    trained = run_cli(*words)
    assert trained.returncode == 0, trained.stderr
    run = str(tmp_path / "runs" / "tiny" / "ids")
    measured = run_cli(run, program="eval")
    assert measured.returncode == 0, measured.stderr

    rows = [line.replace(",", ",0.5,") for line in table_of_ids.read_text().splitlines()[1:]]
    ids = [row.partition(",")[0] for row in rows]
    test = tmp_path / "test.csv"
    test.write_text("\n".join(["id,age,shop", *rows]))
    out = tmp_path / "answers.csv"
    answered = run_cli(run, str(test), f"out={out}", program="predict")
    assert answered.returncode == 0, answered.stderr
    files = [line.partition(",")[0] for line in out.read_text().splitlines()[1:]]
    assert files == [f"{tmp_path}/images/{name}.jpg" for name in ids]

    elsewhere = run_cli(run, str(test), f"data.source.image_dir={tmp_path}", program="predict")
    assert elsewhere.returncode == 2
    assert "data.source.image_dir=FOLDER" in elsewhere.stderr

"""The pictures that words of a command line name."""

from pathlib import Path

import pytest

from kd.errors import UserError
from kd.run.needs import check_pictures
from kd.ship.predict_words import find_pictures


def test_a_folder_gives_the_pictures_that_a_training_reads_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "val"
    read = ("b.jpg", "a.PNG", "deep/c.jpg")
    for name in (*read, ".hidden.jpg", ".ipynb_checkpoints/b.jpg", "@eaDir/b.jpg", "x.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "d.jpg").touch()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    names = ("a.PNG", "b.jpg", "deep/c.jpg", "linked/d.jpg")
    assert find_pictures([str(folder)]) == [f"{folder}/{name}" for name in names]


MANIFEST = {"class_path": "kd.data.sources.Manifest", "init_args": {"image_dir": "s3://food/all"}}


def test_pictures_by_url_are_refused_in_a_line_that_says_what_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    table = tmp_path / "test.csv"
    table.write_text("path\na.jpg\ns3://food/b.jpg\n")
    on_this_disk = "pictures must be on this disk, got s3://food"
    with pytest.raises(
        UserError, match=f"^{table}: {on_this_disk}/b.jpg; copy them, data.source.i"
    ):
        find_pictures([str(table)])
    table.write_text("path\na.jpg\n")
    with pytest.raises(
        UserError, match=f"^{table}: {on_this_disk}/all/a.jpg; copy them, data.sour"
    ):
        find_pictures([str(table)], MANIFEST)
    for word in ("s3://food/b.jpg", "s3://food/test.csv", "s3://food"):
        allowed = "files, folders, patterns or lists on this disk"
        with pytest.raises(UserError, match=f"^pictures must be {allowed}, got {word}$"):
            check_pictures([str(table), word])

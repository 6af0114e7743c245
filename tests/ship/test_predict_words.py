"""The pictures that words of a command line name."""

from pathlib import Path

from kd.ship.predict_words import find_pictures
from tests._helpers import refuses


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


def test_pictures_beside_a_run_by_url_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "test.csv"
    table.write_text("path\na.jpg\n")
    on_this_disk = "pictures must be on this disk, got s3://food"
    with refuses(f"^{table}: {on_this_disk}/all/a.jpg; copy them, data.sour"):
        find_pictures([str(table)], MANIFEST)

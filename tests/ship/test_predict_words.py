"""The pictures that words of a command line name."""

from pathlib import Path

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

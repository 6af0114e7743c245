"""The run's folder: which names are beside it."""

from pathlib import Path

from kd.callbacks.run_folder import RunFolder


def test_a_folder_called_latest_stays_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine.txt").write_text("mine")
    folder = RunFolder(tmp_path, "", path=tmp_path / "000")
    folder._point_latest()
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest" / "mine.txt").read_text() == "mine"

"""Where a run at a URL has its folder."""

from kd.storage.run_urls import on_disk


def test_on_disk() -> None:
    assert on_disk("runs/food", "runs_dir").as_posix() == "runs/food"

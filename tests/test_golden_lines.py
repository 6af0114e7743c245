"""What commands make of their words: each row of a golden table, whose changes are read as a diff of its file.

``python scripts/settings_equal.py --golden`` writes the answers anew; a row more is a line ``{"words": ...}`` more, with
``"files"``, texts by name, where the words need some. ``refused`` is what ends in one line before a run begins, some of
it only when its models are built; ``mistakes`` are the most usual ones; ``options`` say where work begins, too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import settings_equal
from tests._helpers import place_of_examples

NEEDS_NO_GPU = ("trainer.accelerator=gpu", "16-mixed")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with what the rows name."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("golden") / "here"
        folder.mkdir()
        patch.chdir(folder)
        place_of_examples(Path.cwd())
        yield Path.cwd()


def written(folder: Path) -> dict[Path, int]:
    """When each file was written; a run's lock is taken, which says nothing."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.stat().st_mtime_ns for path in files}


def check(row: dict[str, Any], here: Path) -> None:
    """The row's command answers as it is written."""
    if torch.cuda.is_available() and any(word in row["words"] for word in NEEDS_NO_GPU):
        pytest.skip("the line says that there is no GPU")
    assert settings_equal.told(row, here) == row


@pytest.mark.parametrize("row", settings_equal.rows("refused"), ids=lambda row: row["words"][:80])
def test_a_line_is_refused_and_nothing_is_written(row: dict[str, Any], here: Path) -> None:
    """By the command that has the row's words, in one line, without a traceback."""
    before = written(here)
    check(row, here)
    for name in row.get("files", {}):
        (here / name).unlink()
    assert row["says"].startswith(row["words"].split()[0] + ": ")
    assert "\n" not in row["says"] and "KD_TRACEBACK" not in row["says"]
    assert written(here) == before


@pytest.mark.parametrize(
    "row",
    [*settings_equal.rows("mistakes"), *settings_equal.rows("options")],
    ids=lambda row: row["words"][:80],
)
def test_a_line(row: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands stop where they would begin their work."""
    settings_equal.stop_at_work(monkeypatch.setattr)
    assert {"says", "does"} & row.keys()
    check(row, here)

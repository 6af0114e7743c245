"""What commands make of their words: each row of a golden table, whose changes are read as a diff of its file.

``python scripts/settings_equal.py --golden`` writes the answers anew; a row more is a line ``{"words": ...}`` more.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import settings_equal

NEEDS_NO_GPU = "trainer.accelerator=gpu"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with what the rows name; where commands begin their work, they stop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("golden"))
        settings_equal.place_of_examples(Path.cwd())
        settings_equal.stop_at_work(patch.setattr)
        yield Path.cwd()


@pytest.mark.parametrize("table", ["mistakes", "options"])
def test_the_golden_table_has_answers(table: str) -> None:
    assert all({"says", "does"} & row.keys() for row in settings_equal.rows(table))


@pytest.mark.parametrize(
    "row",
    [*settings_equal.rows("mistakes"), *settings_equal.rows("options")],
    ids=lambda row: row["words"],
)
def test_a_line(row: dict[str, Any], here: Path) -> None:
    if NEEDS_NO_GPU in row["words"] and torch.cuda.is_available():
        pytest.skip("the line says that there is no GPU")
    assert {"words": row["words"], **settings_equal.told(row["words"], here)} == row

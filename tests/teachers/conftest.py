"""What the tests of cached answers share."""

from pathlib import Path

import pytest


@pytest.fixture()
def cache(tmp_path: Path) -> list[str]:
    """A cache of two views in a folder of the test's own."""
    return [
        "model.teacher.cache=on",
        f"model.teacher.cache_dir={tmp_path / 'answers'}",
        "model.teacher.cache_views=2",
    ]

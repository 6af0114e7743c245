"""Recipes and overlays by their names."""

from pathlib import Path

import pytest

from kd.run import paths
from kd.run.paths import part_of


def test_a_recipes_other_name_has_its_parts() -> None:
    assert part_of("tune", "distill") == part_of("tune", "grocery_vit") != []


def test_an_empty_recipe_is_listed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``touch recipes/mine.yaml`` must not end ``kd-train --list``."""
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "other.yaml").write_text("# what it does\nseed: 0\n")
    monkeypatch.setattr(paths, "shipped", lambda kind: tmp_path)
    assert paths.names("recipes") == {"mine": "", "other": "what it does"}

"""Recipes and overlays by their names."""

from pathlib import Path

import pytest

from kd.run import paths
from kd.run.paths import holds_settings, part_of


def test_a_recipes_other_name_has_its_parts() -> None:
    assert part_of("tune", "distill") == part_of("tune", "grocery_vit") != []


def test_an_empty_recipe_is_listed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``touch recipes/mine.yaml`` must not end ``kd-train --list``."""
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "other.yaml").write_text("# what it does\nseed: 0\n")
    monkeypatch.setattr(paths, "shipped", lambda kind: tmp_path)
    assert paths.names("recipes") == {"mine": "", "other": "what it does"}


def test_words_beside_a_truth_value_are_no_settings() -> None:
    """A file that is called ``warn`` must not end ``kd-train preflight=warn``."""
    assert not holds_settings("preflight") and not holds_settings("data.check")
    assert holds_settings("data.source") and holds_settings("model.taps")

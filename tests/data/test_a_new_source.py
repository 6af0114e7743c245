"""A source of kd's is one file: whatever the rest of kd must know of it, it asks of the class."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kd.config import parts
from kd.data import sources
from kd.data.sources import FileSplit, Source
from kd.errors import UserError
from kd.machine import shipped
from kd.run.needs import check_needs
from kd.run.pictures import list_to_train
from kd.run.request import translate
from tests._helpers import refuses

NAMES = (
    "HuggingFace",
    "ImageFolder",
    "Manifest",
    "Pictures",
    "SegmentationFolder",
    "Shards",
    "WebDataset",
)
"""Sources that only their own files may name (and those of ``Manifest`` and ``ImageFolder`` that say what a list, or a
folder, means)."""
ALLOWED = {
    "run/shorthand.py": {"Manifest", "ImageFolder", "Shards"},  # what a list or a folder is
    "ship/predict_words.py": {"Manifest"},  # reads lists too
    "data/splits.py": {"ImageFolder"},  # the probe's folder
}


class Listed(Source):
    """Pictures below a folder, whose file names begin with their labels."""

    listed_early = True
    takes_folder = True
    needs: Any = ("kd", "hf")

    def __init__(self, root: str) -> None:
        self.root = root

    def load(self, split: str) -> FileSplit:
        files = sorted(Path(self.root, split).glob("*.png"))
        if not files:
            raise UserError(f"{self.key}: no pictures below {self.root}/{split}")
        self.classes = ["a", "b"]
        return FileSplit(map(str, files), [self.classes.index(file.name[0]) for file in files])


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """As ``scripts/parts.py`` lists it, and a file of its own."""
    module = ModuleType("kd.data.sources.listed")
    module.Listed = Listed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = f"{module.__name__}.Listed"
    entry = {"root": {"type": "str", "text": "The folder."}}
    added = parts.Listed(path, "source", frozenset([path]), "", True, parts.keys_in(entry))
    known = (*parts.classes(), added)
    monkeypatch.setattr(parts, "classes", lambda: known)
    parts.listed_class.cache_clear()
    yield path
    parts.listed_class.cache_clear()


def test_a_source_is_listed_checked_and_trained_on_by_its_own_file(
    registered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "recipe=grocery_vit",
        "preflight=warn",
        f"data.source={registered}",
        f"data.source.root={tmp_path}",
    ]
    config = translate(words).resolved()
    with refuses(f"data.source.root: no pictures below {tmp_path}/train"):
        list_to_train(config)
    for split in ("train", "val"):
        for name in "aabb":
            file = tmp_path / split / f"{name}{len([*tmp_path.rglob('*.png')])}.png"
            file.parent.mkdir(exist_ok=True)
            file.touch()
    splits = list_to_train(config)
    assert splits is not None
    assert splits.info().counts == [2, 2]
    monkeypatch.setattr(Listed, "needs", ("no_such_package", "hf"))
    with refuses("data.source: Listed needs the extra hf"):
        check_needs(config)


def test_no_other_file_names_a_source() -> None:
    root = shipped("recipes").parent / "kd"
    for file in root.rglob("*.py"):
        place = file.relative_to(root).as_posix()
        if place.startswith(("data/sources/", "_", "ship/export/", "models/")):
            continue
        text = "\n".join(line for line in file.read_text().splitlines() if "``" not in line)
        named = {
            name
            for name in NAMES
            if f'"{name}"' in text or f"import {name}" in text or f"sources.{name}" in text
        }
        assert named <= ALLOWED.get(place, set()), f"{place} names {named}"
    assert {*NAMES} <= {*sources.__all__}


def test_the_pages_say_how() -> None:
    text = (shipped("recipes").parent / "CONTRIBUTING.md").read_text()
    assert all(
        json.dumps(name)[1:-1] in text
        for name in ("needs", "listed_early", "takes_folder", "check_there")
    )

"""Each command lists its pictures once: on a network's disk a list of many takes minutes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kd.cli import main
from kd.data.sources import folder
from tests._helpers import ARCH, TINY, write_recipe


@pytest.mark.parametrize("command", ["eval", "export", "pack", "train"])
def test_a_command_lists_each_class_folder_once(
    command: str,
    finished: Path,
    pictures: Path,
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``train`` fine-tunes: a batch size that fits the pictures needs their number before they are trained on."""
    counts: Counter[str] = Counter()
    list_folder = folder.pictures_below

    def counted(path: str) -> Any:
        counts[path] += 1
        return list_folder(path)

    monkeypatch.setattr(folder, "pictures_below", counted)
    recipe = write_recipe(tmp_path / "own.yaml", pictures, None, trainer__max_epochs=1)
    tuned = {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(teacher)}
    words = {
        "eval": [str(finished)],
        "export": [str(finished), "to=torch_export", f"out={tmp_path / 'export'}"],
        "pack": [f"recipe={recipe}", f"out={tmp_path / 'packed'}"],
        "train": [f"recipe={recipe}", f"model.student={json.dumps(tuned)}"],
    }
    assert main(command, words[command]) == 0
    assert set(counts.values()) == {1}, counts

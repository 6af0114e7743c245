"""What ``kd-size`` has found for a recipe, and which of its candidates a run has trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kd.storage.elsewhere import json_of, text_of

FILE = "sizes.json"
SAME = ("arch", "img_size", "kwargs")  # of two students of one size
SETTINGS = (*SAME, "checkpoint", "pretrained", "inherit")  # which distinguish candidates


def folder_of_sizes(runs_dir: Path, recipe: str) -> Path:
    """Where ``kd-size`` keeps its results for a recipe: beside ``runs_dir``."""
    return runs_dir.parent / "sizes" / recipe


def candidate_of(
    run: Path, config: Mapping[str, Any]
) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """The newest ``sizes.json`` that has a run's student among its candidates: file, content and candidate; None without.

    Files that can't be read are passed over.
    """
    student = (config.get("model") or {}).get("student") or {}
    place = run.resolve()
    folder = folder_of_sizes(place.parent.parent, place.parent.name)
    for file in sorted(folder.glob(f"*/{FILE}"), reverse=True):
        try:
            sizes = json_of(text_of(file))
            for candidate in sizes["candidates"]:
                if all(candidate.get(key) == student.get(key) for key in SAME):
                    return file, sizes, candidate
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def card_of(run: Path, config: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The choice of ``kd-size`` as a card of the page: a title, the chosen candidate's name, and a note of its budget and
    folder; None where the run has another size, or none was chosen.
    """
    match = candidate_of(run, config)
    if match is None:
        return None
    file, sizes, candidate = match
    if sizes.get("choice") != candidate["name"]:
        return None
    budget = [f"{key} <= {value:g}" for key, value in (sizes.get("budget") or {}).items()]
    note = f"{', '.join(budget) or 'no budget'}; {file.parent}"
    return "chosen by kd-size", str(sizes["choice"]), note

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
    """The newest ``sizes.json`` that has a run's student among its candidates: file, content and candidate."""
    student = (config.get("model") or {}).get("student") or {}
    place = run.resolve()
    for file in sorted(
        folder_of_sizes(place.parent.parent, place.parent.name).glob(f"*/{FILE}"), reverse=True
    ):
        try:
            found = json_of(text_of(file))
            rows = [
                row
                for row in found["candidates"]
                if all(row.get(key) == student.get(key) for key in SAME)
            ]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if rows:
            return file, found, rows[0]
    return None


def card_of(run: Path, config: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The choice of ``kd-size`` as a card of the page: title, size, budget and folder; None where the run has
    another size.
    """
    found = candidate_of(run, config)
    if found is None or found[1].get("choice") != found[2]["name"]:
        return None
    file, content, _ = found
    wanted = ", ".join(
        f"{key} <= {value:g}" for key, value in (content.get("budget") or {}).items()
    )
    return "chosen by kd-size", str(content["choice"]), f"{wanted or 'no budget'}; {file.parent}"

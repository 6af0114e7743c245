"""One page about a run, or about two: ``report.html`` and ``comparison.html``. One file each, no network."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kd.report.comparison import comparison, label
from kd.report.facts import Facts
from kd.report.records import Run
from kd.report.sections import report

PAGE = Path(__file__).parent / "page.html"


def write_report(run: Run, file: Path) -> Path:
    """Writes the page of one run."""
    title = f"{run.summary.get('recipe', 'run')} {run.folder.name}"
    return _write(file, {"title": title, "sections": report(Facts(run))})


def write_comparison(before: Run, after: Run, file: Path, between: Sequence[Run] = ()) -> Path:
    """Writes the page that compares two runs, or more with those ``between``."""
    facts = [Facts(run) for run in (before, *between, after)]
    title = " and ".join(label(f) for f in facts)
    return _write(file, {"title": title, "sections": comparison(facts)})


def page(content: dict[str, Any]) -> str:
    """The page of a title and its sections."""
    text = json.dumps(finite(content), separators=(",", ":")).replace("<", "\\u003c")  # no text opens markup
    return PAGE.read_text(encoding="utf-8").replace("{{DATA}}", text)


def _write(file: Path, content: dict[str, Any]) -> Path:
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(page(content), encoding="utf-8")
    fresh.replace(file)  # a browser that reloads never sees half a page
    return file


def finite(value: object) -> object:
    """JSON has no NaN: ``None`` instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value


def images_per_s(run: Run) -> float | None:
    """Of all processes, from the mean step; validation is left out."""
    return Facts(run).images_per_s

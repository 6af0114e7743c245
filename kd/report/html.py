"""Pages that open without a network: one file each, the same page for runs, comparisons, searches and scaling."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kd.report.comparison import comparison, label
from kd.report.records import RunRecords
from kd.report.rules import Explained
from kd.report.sections import report
from kd.storage.shown import in_html
from kd.storage.writing import write_text

PAGE = Path(__file__).parent / "page.html"


def write_report(explained: Explained, file: Path) -> Path:
    """Writes the page of one run to ``file``; returns it."""
    run = explained.run
    return write_page(
        file, f"{run.summary.get('recipe', 'run')} {run.folder.name}", report(explained)
    )


def write_comparison(runs: Sequence[RunRecords], file: Path) -> Path:
    """Writes the page that compares two runs or more; the first is the one that the others are held against."""
    explained = [Explained(run) for run in runs]
    return write_page(
        file, " and ".join(label(one.facts) for one in explained), comparison(explained)
    )


def write_page(file: Path, title: str, sections: Sequence[dict[str, Any] | None]) -> Path:
    """Writes a page; a browser that reloads never sees half of it. Sections that are ``None`` are left out."""
    write_text(
        file, page({"title": title, "sections": [section for section in sections if section]})
    )
    return file


def page(content: dict[str, Any]) -> str:
    """One HTML page that needs no network, from its title and sections."""
    text = in_html(finite(content))
    return PAGE.read_text(encoding="utf-8").replace("{{DATA}}", text)


def finite(value: object) -> object:
    """A copy of plain values with None in place of NaN and infinity, which JSON lacks."""
    # JSON has no NaN
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value

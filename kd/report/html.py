"""Pages that open without a network: one file each, the same page for runs, comparisons, searches and scaling."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path

from kd.report.charts import Section
from kd.report.comparison import comparison, label
from kd.report.learning import headline
from kd.report.records import read_run
from kd.report.rules import Explained, attempt
from kd.report.sections import report, status
from kd.report.tables import Part
from kd.storage.elsewhere import Json
from kd.storage.shown import in_html
from kd.storage.writing import write_json, write_text

PAGE = Path(__file__).parent / "page.html"
RELOAD_S = 10
"""Seconds from one reload of a running run's page to the next."""


def write_report(explained: Explained, file: Path) -> Path:
    """Writes the page of one run to ``file``; returns it."""
    run = explained.run
    title = label(explained.facts)
    return write_page(file, title, report(explained), reloads=status(run) == "running")


def write_explained(folder: Path, summary: Json) -> None:
    """Adds headline, verdict, findings and images a second to a run's summary; writes ``summary.json`` and ``report.html``.

    Called at a run's end by the process of rank 0. Errors are printed on stderr and never raised: a report that can't
    be made must not fail the run.

    Args:
        folder: of the run, with its records.
        summary: the content of ``summary.json``; changed in place.
    """
    try:
        explained = Explained(read_run(folder))
        summary["verdict"] = explained.verdict
        summary["findings"] = [asdict(finding) for finding in explained.findings]
        first_sentence = attempt("headline", [], partial(headline, explained.facts))
        if first_sentence is not None:
            summary["headline"] = first_sentence["text"]
        images_per_s = explained.facts.images_per_s
        if images_per_s is not None:  # the page's number: pictures over the mean step
            summary["images_per_s"] = round(images_per_s, 1)
        write_json(folder / "summary.json", summary)
        write_report(explained, folder / "report.html")
        for failure in explained.failures:
            print(f"report: {failure}", file=sys.stderr)
    except Exception as problem:
        print(f"no report: {type(problem).__name__}: {problem}", file=sys.stderr)


def write_comparison(explained: Sequence[Explained], file: Path) -> Path:
    """Writes the page that compares two runs or more with the first of them; returns ``file``."""
    return write_page(
        file, " and ".join(label(one.facts) for one in explained), comparison(explained)
    )


def write_page(
    file: Path, title: str, sections: Sequence[Section | Part | None], reloads: bool = False
) -> Path:
    """Writes a page in one piece, so that a browser that reloads never sees half of it; returns ``file``.

    Args:
        file: the page.
        title: for people.
        sections: in order; None is left out. Their ``kind`` decides how the page draws them.
        reloads: the page reloads itself every :data:`RELOAD_S` seconds.
    """
    content = {
        "title": title,
        "sections": [_drawn(section) for section in sections if section],
        "every": RELOAD_S if reloads else None,
    }
    write_text(file, page(content))
    return file


def _drawn(section: Section | Part) -> Section:
    """A section as the page draws it, by its ``kind``."""
    return section if isinstance(section, dict) else asdict(section)


def page(content: Json) -> str:
    """One HTML page that needs no network: ``page.html`` with ``content`` as JSON in it.

    Args:
        content: ``title``, ``sections`` and ``every``, the seconds between two reloads; None: it does not reload.
    """
    text = in_html(finite(content))
    title = escape(f"{content['title']} - kd")
    return PAGE.read_text(encoding="utf-8").replace("{{TITLE}}", title).replace("{{DATA}}", text)


def finite(value: object) -> object:
    """A copy of plain values with None in place of NaN and infinity, which JSON lacks; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value

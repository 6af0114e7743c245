"""What was proven of a run's student and of its exports, for the page and the card."""

from typing import Any

from kd.report.charts import Section, table
from kd.report.records import RunRecords
from kd.storage.of_weights import evaluations, exports


def certificates_of(run: RunRecords) -> list[tuple[str, list[str]]]:
    """What was compared (a split, or ``export NAME``), and the certificate's lines, a sentence each.

    Of each ``eval_*.json`` and of the exports that were kept, of the present weights; what was not certified is left out.

    Args:
        run: read from its folder.
    """
    found = []
    of_exports = exports(run.folder, run.notes.append)
    measured = evaluations(run.folder, run.notes.append)
    measured |= {f"export {name}": export for name, export in of_exports.items()}
    for name, figures in measured.items():
        lines = _lines(figures)
        if lines:
            found.append((name, lines))
    return found


def _lines(measured: dict[str, Any]) -> list[str]:
    """The certificate's text in the figures of an evaluation or an export; empty without one."""
    certificate = measured.get("certificate")
    text = None
    if isinstance(certificate, dict):
        text = certificate.get("text")
    if isinstance(text, list):
        return [str(line) for line in text]
    return []


def certified(run: RunRecords) -> list[Section]:
    """The table of the page; none where nothing was certified."""
    rows = []
    for name, lines in certificates_of(run):
        for number, line in enumerate(lines):
            rows.append(["" if number else name, line])
    if not rows:
        return []
    note = "By kd-eval RUN margin=POINTS and kd-export margin=POINTS, on the same pictures for both models."
    return [table("Not worse, and by how much", ["pictures", "what is proven"], rows, note=note)]

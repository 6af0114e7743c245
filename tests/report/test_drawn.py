"""The first of the drawn runs of ``scripts/reports_equal.py``, which compares all 3,000."""

import pytest

from scripts import reports_equal


def test_the_same_is_said_of_drawn_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits, findings, predictions and pages; ``--write`` keeps what is changed on purpose."""
    monkeypatch.setattr("time.time", lambda: reports_equal.NOW)
    kept, codes = reports_equal.read_kept()
    for number in range(100):
        _, said = reports_equal.said_of(number)
        assert reports_equal.line_of(number, said, codes) == kept[str(number)]

"""Limits and findings as values."""

from kd.report.limits import Finding


def test_findings_of_the_same_words_are_equal() -> None:
    assert (
        Finding("A", "because", "do")
        == Finding("A", "because", "do")
        != Finding("B", "because", "do")
    )

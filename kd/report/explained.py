"""A run, explained: its records are read once, and each number is computed once, for whoever asks."""

from functools import cached_property
from typing import Any

from kd.report.facts import Facts
from kd.report.limits import Finding, Limit
from kd.report.records import Run
from kd.report.rules import findings_of
from kd.report.verdict import limits_of, verdict_of


class Explained:
    """What limits a run, and what is unusual about it."""

    def __init__(self, run: Run) -> None:
        self.run, self.facts = run, Facts(run)

    @cached_property
    def limits(self) -> list[Limit]:
        return limits_of(self.facts)

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """The headline as ``summary.json`` holds it: bound, text, lever, predicted_speedup, phases_ms."""
        return verdict_of(self.facts, self.limits)

    @cached_property
    def findings(self) -> list[Finding]:
        return findings_of(self.facts, self.limits)

"""What a rule says where it fires."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A rule that fired."""

    rule: str  # its name
    text: str  # the evidence
    lever: str  # what to do

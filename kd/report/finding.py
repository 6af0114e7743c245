"""What a rule says where it fires."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A rule that fired.

    Attributes:
        rule: its name.
        text: the evidence.
        lever: what to do.
    """

    rule: str
    text: str
    lever: str

"""Classes that a file from elsewhere may name."""

from kd.run.trust import refused


def test_refused() -> None:
    assert (
        refused("mine.nets.Tiny").partition("; ")[2]
        == "if you trust it: trust=mine.nets, or --trust"
    )

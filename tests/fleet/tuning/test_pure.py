"""Helpers that are pure functions, one call each."""

from kd.fleet.tuning.space import Space, item, parse, short


def test_parse() -> None:
    assert parse("optim.lr", "log:1e-5..1e-3") == Space("optim.lr", None, low=1e-05, high=0.001, log=True)
    assert parse("data.batch_size", "[16, 32]").choices == (16, 32)


def test_item() -> None:
    assert item("optim.lr", 1e-05) == "optim.lr=1.0e-05"
    assert item("data.size", [1, 2]) == "data.size=[1, 2]"
    assert item("a", "B") == "a=B"


def test_short() -> None:
    assert short(0.00123456) == "0.001235"
    assert short("KDLoss") == "KDLoss"
    assert short(True) == "True"

"""What jsonargparse reports, as one line that names the key."""

from kd.run.messages import missing, one_line


def test_one_line() -> None:
    assert (
        one_line("Parser key \"optim.lr\":\n  Expected a <class 'float'>. Got value: abc")
        == "optim.lr: must be a number, got 'abc'"
    )


def test_the_parsers_words_become_one_line() -> None:
    assert one_line("unrecognized arguments: --optim.lrr").startswith(
        "no key 'optim.lrr'; did you mean"
    )
    assert one_line("a\n  b") == "a b"
    assert len(one_line("x" * 1000)) == 300
    assert missing("the following arguments are required: data.source") == "needs data.source"

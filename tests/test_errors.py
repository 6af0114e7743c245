"""Errors in one line."""

from kd.errors import did_you_mean, first_line, plain, reason


def test_did_you_mean() -> None:
    assert did_you_mean("onx", ["onnx", "hub"]) == "; did you mean 'onnx'?"


def test_first_line() -> None:
    assert first_line(KeyError()) == "KeyError"
    assert first_line(OSError("full\nsecond line")) == "full"


def test_reason() -> None:
    lost = RuntimeError(
        "[gloo/tcp/pair.cc:545] Read error [10.0.0.2]:485: Connection reset by peer. GLHF!"
    )
    assert reason(lost).startswith(
        "lost the connection to another process (killed, or its machine is gone): [10.0.0.2]"
    )
    assert reason(KeyError("a")) == "KeyError: 'a'"


def test_plain() -> None:
    assert (
        plain(OSError(36, "File name too long", "a" * 300))[:40]
        == "File name too long: aaaaaaaaaaaaaaaaaaaa"
    )

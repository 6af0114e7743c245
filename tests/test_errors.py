"""Errors in one line."""

import pytest
from torch._utils import ExceptionWrapper

from kd.errors import UserError, causes, did_you_mean, first_line, plain, reason


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


def test_an_error_that_is_its_own_cause_ends() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert list(causes(first)) == [first, second]


def test_an_error_of_a_loader_worker_has_its_kind_once() -> None:
    """As torch sends it from the worker and raises it again."""
    lines = {
        "ValueError: bad picture": ValueError("bad picture"),
        "data.source.labels: a word": UserError("data.source.labels: a word"),
    }
    for line, error in lines.items():
        try:
            raise error
        except ValueError:
            sent = ExceptionWrapper(where="in DataLoader worker process 0")
        with pytest.raises(ValueError) as caught:
            sent.reraise()
        assert reason(caught.value) == line


def test_only_a_broken_pipe_is_a_worker_that_exited() -> None:
    """Too many open files come through the same code."""
    for error, has_exited in ((EOFError(), True), (OSError(24, "Too many open files"), False)):
        code = compile("raise error", "/torch/utils/data/dataloader.py", "exec")
        inner = compile("exec(code)", "/lib/multiprocessing/connection.py", "exec")
        with pytest.raises(type(error)) as caught:
            exec(inner, {"code": code, "error": error})
        assert ("exited unexpectedly" in reason(caught.value)) is has_exited

"""Errors in one line."""

import os
import signal
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.callbacks.preemption import Preemption
from kd.errors import UserError, causes, first_line, plain, reason


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


def wrapped(*texts: str) -> Exception:
    """Errors raised from each other, the outermost first."""
    error: Exception | None = None
    for text in reversed(texts):
        outer = RuntimeError(text)
        outer.__cause__ = error
        error = outer
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (["can't build"], "RuntimeError: can't build"),
        (["can't build", "no key\n'widht'"], "RuntimeError: can't build (from RuntimeError: no key 'widht')"),
        (["it has: no file", "no file", "disk gone"], "RuntimeError: it has: no file (from RuntimeError: disk gone)"),
        (["a", "b", "c", "d", "e"], "RuntimeError: a" + "".join(f" (from RuntimeError: {x})" for x in "bcd")),
    ],
)  # fmt: skip
def test_an_error_is_shown_with_its_causes_in_one_line(texts: list[str], line: str) -> None:
    assert plain(wrapped(*texts)) == reason(wrapped(*texts)) == line


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
        "OSError: two lines of it": OSError("two lines\nof it\n"),
    }
    for line, error in lines.items():
        try:
            raise error
        except (ValueError, OSError):
            sent = ExceptionWrapper(where="in DataLoader worker process 0")
        with pytest.raises(type(error)) as caught:
            sent.reraise()
        assert reason(caught.value) == line


def broken_in_a_loader(error: Exception) -> Exception:
    """The error as it is raised where a loader reads what a worker sends."""
    code = compile("raise error", "/torch/utils/data/dataloader.py", "exec")
    inner = compile("exec(code)", "/lib/multiprocessing/connection.py", "exec")
    with pytest.raises(type(error)) as caught:
        exec(inner, {"code": code, "error": error})
    return caught.value


def test_only_a_broken_pipe_is_a_worker_that_exited() -> None:
    """Too many open files come through the same code."""
    for error, has_exited in ((EOFError(), True), (OSError(24, "Too many open files"), False)):
        raised = broken_in_a_loader(error)
        assert ("exited unexpectedly" in reason(raised)) is has_exited


def test_a_workers_pipe_that_breaks_after_a_signal_is_a_part_of_it(tmp_path: Path) -> None:
    """A scheduler's signal reaches the workers too, and torch may not see yet that one is dead."""
    preemption = Preemption(LastCheckpoint(tmp_path))
    broken = broken_in_a_loader(EOFError())
    preemption.on_train_start(None, None)  # type: ignore[arg-type]
    assert preemption.interruption(broken) is None
    os.kill(os.getpid(), signal.SIGTERM)
    stop, other = preemption.interruption(broken), preemption.interruption(ValueError("bad"))
    preemption.close(None)  # type: ignore[arg-type]
    assert stop is not None and stop.signal_number == signal.SIGTERM
    assert other is None

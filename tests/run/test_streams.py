"""Output whose reader has gone."""

import errno
import io
import os
from pathlib import Path

import pytest

from kd.run.streams import Unbroken, unbroken_output


class Closed(io.TextIOWrapper):
    """A pipe whose reader has gone."""

    number = errno.EPIPE

    def write(self, text: str) -> int:
        raise OSError(self.number, "gone")


def test_a_stream_without_a_reader_turns_silent_and_a_full_disk_does_not() -> None:
    reading, writing = os.pipe()
    stream = Closed(os.fdopen(writing, "wb"))
    silent = Unbroken(stream)
    assert silent.write("text") == 4
    assert (
        Path(os.devnull).stat().st_ino == os.fstat(writing).st_ino
    )  # also for whoever else holds it
    stream.number = errno.ENOSPC
    with pytest.raises(OSError, match="gone"):
        silent.write("text")
    os.close(reading)


def test_the_streams_are_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    with unbroken_output():
        print("said")
    assert capsys.readouterr().out == "said\n"

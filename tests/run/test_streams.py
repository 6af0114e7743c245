"""Output whose reader has gone."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from kd.progress import bar
from kd.report.terminal import print_table
from kd.run.streams import UP, Unbroken, unbroken_output


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
    with unbroken_output("train"):
        print("said")
    assert capsys.readouterr().out == "said\n"


def test_names_from_files_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever prints: a print that nobody thought of is covered, a library's too."""
    with unbroken_output("train"):
        print("cat\x1b[2J\u202e\r.jpg\tok")
        sys.stderr.writelines(["a\x9b2J\n", "b\x07\n"])
        print("\x1b]0;title\x07", file=sys.stderr)
        print_table("[red]x\x1b[2J", ["[b]a", ""], [["[link=http://x]\x1b[A", ":smile:\n"]], ())
    out, err = capsys.readouterr()
    assert not [letter for letter in out + err if letter not in "\n\t" and not letter.isprintable()]
    assert r"cat\x1b[2J\u202e\r.jpg" in out and r"a\x9b2J" in err and r"\x1b]0;title\x07" in err
    assert "[link=http://x]" in out and ":smile:" in out and "[b]a" in out


def test_bars_are_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar returns to its line's start, and is wiped before a line is printed; what it shows obeys nothing."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    terminal = sys.stderr
    with unbroken_output("train"):
        for _ in bar(range(2), label="a\x1b[2J\r"):
            tqdm.write("line\x1b[2J", file=sys.stderr)
        drawing = terminal.getvalue()
    assert "\ra\\x1b[2J:" in drawing and "\x1b" not in drawing.replace(UP, "")
    assert "\r     " in drawing.split("line\\x1b[2J")[0]  # wiped

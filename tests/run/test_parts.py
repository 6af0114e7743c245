"""Small parts of the way from a command line to a run."""

import errno
import io
import os
from pathlib import Path

import pytest

from kd.errors import UserError
from kd.run import keys
from kd.run.checks import check_student
from kd.run.messages import missing, one_line
from kd.run.own_keys import positive, take, take_all, truth, whole_number, whole_numbers
from kd.run.request import Request
from kd.run.streams import Unbroken, unbroken_output
from kd.run.typed import check_values


def test_a_command_takes_its_own_keys_and_leaves_the_rest() -> None:
    request = Request(overrides=["batch=1", "data.img_size=8", "batch=4,2"])
    assert take(request, "batch", "seconds") == {"batch": "4,2"}
    assert request.overrides == ["data.img_size=8"]
    assert take_all(request, "batch") == {}
    request.overrides.append("optim.lr=1")
    with pytest.raises(UserError, match=r"no key 'optim.lr' \(it takes batch=, data\.\*\)"):
        take_all(request, "batch")


def test_numbers_and_truths_of_a_command() -> None:
    own = {"batch": "[8, 1,8]", "threads": "0", "int8": "True"}
    assert whole_numbers(own, "batch", "1") == [1, 8] and whole_numbers({}, "batch", "3") == [3]
    assert whole_number(own, "threads", 1, low=0) == 0 and whole_number({}, "threads", 5) == 5
    assert truth(own, "int8") and not truth({}, "int8")
    assert positive("seconds", "0.5") == 0.5
    for call, message in (
        (lambda: whole_number(own, "threads", 1), "threads: must be a whole number >= 1, got '0'"),
        (
            lambda: whole_number({"port": "²"}, "port", 1, 1, 9),
            "port: must be a whole number from 1 to 9, got '²'",
        ),
        (
            lambda: whole_numbers({"batch": "1,none"}, "batch", "1"),
            "batch: must be whole numbers > 0",
        ),
        (lambda: truth({"int8": "yes"}, "int8"), "int8: must be true or false, got 'yes'"),
        (lambda: positive("seconds", "nan"), "seconds: must be a number > 0, got 'nan'"),
        (lambda: positive("hours", "2e6"), "hours: must be a number > 0 and < 1e+06, got '2e6'"),
        (lambda: positive("wait", "-1", or_zero=True), "wait: must be a number >= 0, got '-1'"),
    ):
        with pytest.raises(UserError) as told:
            call()
        assert message in str(told.value)


def test_the_parsers_words_become_one_line() -> None:
    assert one_line("unrecognized arguments: --optim.lrr").startswith(
        "no key 'optim.lrr'; did you mean"
    )
    assert one_line("a\n  b") == "a b"
    assert len(one_line("x" * 1000)) == 300
    assert missing("the following arguments are required: data.source") == "needs data.source"


def test_names_of_runs_and_of_students() -> None:
    check_values([("name", "first-try")], keys.schema())
    check_student("low", {"optim.lr": 0.1, "model.student": {"arch": "resnet18"}})
    for call, message in (
        (lambda: check_values([("name", "../x")], keys.schema()), "name: begins with a letter"),
        (
            lambda: check_student("a", {"model.teacher.arch": "b"}),
            "students.a: may differ in model.student",
        ),
        (lambda: check_student("a/b", {}), "students: a name is made of letters"),
    ):
        with pytest.raises(UserError, match=message):
            call()


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

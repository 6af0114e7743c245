"""A command's own key=value items."""

from pathlib import Path

import pytest

from kd.errors import UserError
from kd.run.own_keys import (
    out_path,
    positive,
    take,
    take_all,
    truth,
    whole_number,
    whole_numbers,
)
from kd.run.request import Request


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
    assert out_path({}) is None and out_path({"out": "a.csv"}) == Path("a.csv")
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
        (
            lambda: whole_numbers({"batch": "1 8"}, "batch", "1"),
            "batch: must be whole numbers > 0 with commas between, got '1 8'",
        ),
        (lambda: out_path({"out": ""}), "out: must name a file or a folder, got nothing"),
        (lambda: truth({"int8": "yes"}, "int8"), "int8: must be true or false, got 'yes'"),
        (lambda: positive("seconds", "nan"), "seconds: must be a number > 0, got 'nan'"),
        (lambda: positive("hours", "2e6"), "hours: must be a number > 0 and < 1e+06, got '2e6'"),
        (lambda: positive("wait", "-1", or_zero=True), "wait: must be a number >= 0, got '-1'"),
    ):
        with pytest.raises(UserError) as told:
            call()
        assert message in str(told.value)

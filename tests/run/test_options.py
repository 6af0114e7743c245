"""A command's options: typed key=value words, what they say of each other, and the help that is made of them."""

import importlib
from dataclasses import field
from pathlib import Path
from typing import Annotated

import pytest

from kd.commands import COMMANDS
from kd.config.kinds import Range
from kd.run.eval_options import EvalOptions
from kd.run.options import CommandOptions, options_help, options_of, take, take_options
from kd.run.request import Request
from tests._helpers import refuses


def test_a_command_takes_its_own_keys_and_leaves_the_rest() -> None:
    request = Request(overrides=["split=train", "data.img_size=8", "split=val"])
    assert take_options(EvalOptions, request).split == "val"
    assert request.overrides == ["data.img_size=8"]
    request.overrides += ["optim.lr=1", "search.x=1"]
    assert take(request, "search.x") == {"search.x": "1"}
    with refuses(r"no key 'optim.lr' \(it takes .*split=.*, data\.\*\)"):
        take_options(EvalOptions, request)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (list[int], "[8, 1,8]", [8, 1, 8]),
        (list[int], "4", [4]),
        (list[str], "a,b", ["a", "b"]),
        (bool, "TRUE", True),
        (float | None, "1e-3", 1e-3),
        (str, "007", "007"),
        (Path | None, "007", Path("007")),
        (
            list[int],
            "1,none",
            "each must be a valid integer, got 'none'",
        ),
        (Annotated[int, Range(">= 1")], "0", "must be >= 1, got 0"),
        (int, "²", "must be a whole number, got '²'"),
        (bool, "maybe", "must be true or false, got 'maybe'"),
        (float, ".nan", "must be a number, got 'nan'"),
        (str, "", "must not be empty"),
    ],
)
def test_an_option_has_a_type(kind: object, text: str, expected: object) -> None:
    class Group(CommandOptions):
        x: kind = None  # type: ignore[valid-type]
        y: dict[str, str] = field(default_factory=dict)

    if not isinstance(expected, str) or expected == text:
        made = options_of(Group, {"x": text, "y.a-b": "", "y.c.d": "1"})
        assert (made.x, made.y) == (expected, {"a-b": "", "c.d": "1"})
        return
    with refuses(r"^x: ") as caught:
        options_of(Group, {"x": text})
    assert expected in str(caught.value)


def test_the_help_names_each_option_once_with_its_default() -> None:
    for name in COMMANDS:
        module = importlib.import_module(f"kd.commands.{name}")
        assert ("{options}\n" in module.HELP) == hasattr(module, "OPTIONS"), name
    lines = options_help(EvalOptions).splitlines()
    assert [line for line in lines if line.startswith("  seeds=3 ")]
    assert "given" not in options_help(EvalOptions) and max(map(len, lines)) <= 120

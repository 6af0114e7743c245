"""``--print_config`` of every recipe and every overlay, byte for byte.

``python -m tests.run.test_golden`` writes the file anew, where a setting is added or changed on purpose.
"""

import difflib
import sys

import pytest

from kd.machine import shipped
from kd.run.paths import names
from kd.run.request import translate
from kd.run.run import Run
from tests._helpers import ROOT

GOLDEN = ROOT / "tests" / "golden" / "print_config.txt"
BASE = "recipe=foodtag_vit"
OWN = [
    f"recipe={file.stem} config={file.parent.name}"
    for file in sorted(shipped("recipes").glob("debug/*.yaml"))
]
LINES = list(dict.fromkeys([BASE, *(f"recipe={name}" for name in names("recipes")),
                            *(f"{BASE} config={name}" for name in names("configs")), *OWN]))  # fmt: skip


def printed(line: str) -> str:
    return Run.of(translate(line.split())).as_yaml()


def blocks() -> dict[str, str]:
    """A command line -> what the file holds of it: overlays as changes of their recipe."""
    whole = GOLDEN.read_text()
    return dict(part.split("\n", 1) for part in whole.removeprefix("## ").split("\n## "))  # type: ignore[misc]


def told(line: str, texts: dict[str, str]) -> str:
    recipe, _, overlay = line.partition(" ")
    if not overlay:
        return texts[line]
    before, after = texts[recipe].splitlines(), texts[line].splitlines()
    return "\n".join(list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:])


def test_the_file_holds_every_recipe_and_overlay() -> None:
    assert [*blocks()] == LINES


@pytest.mark.parametrize("line", LINES)
def test_print_config_stays_as_it_is(line: str) -> None:
    texts = {line: printed(line)}
    recipe = line.split()[0]
    texts.setdefault(recipe, blocks()[recipe])
    assert told(line, texts).strip("\n") == blocks()[line].strip("\n")


if __name__ == "__main__":
    texts = {line: printed(line) for line in LINES}
    GOLDEN.write_text("\n".join(f"## {line}\n{told(line, texts)}" for line in LINES) + "\n")
    sys.exit(0)

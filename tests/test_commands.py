"""What the commands have in common: each explains itself."""

from types import ModuleType

import pytest

from kd.cli import main
from kd.commands import (
    cache,
    card,
    eval,
    export,
    latency,
    predict,
    report,
    runs,
    scale,
    train,
    tune,
)

COMMANDS = [cache, card, eval, export, latency, predict, report, runs, scale, train, tune]


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__)
def test_help_names_the_command_and_ends_well(
    module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    name = module.__name__.rpartition(".")[2]
    assert main(name, ["--help"]) == 0
    out, err = capsys.readouterr()
    assert f"kd-{name}" in out and not err

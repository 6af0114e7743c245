"""Ctrl-C at any moment of any command: one word and status 130, no traceback."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kd.cli import CtrlC, main
from kd.commands import COMMANDS
from tests._helpers import ROOT

START = """
import os, signal, sys
class At:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            print("pressed", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, At())
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's job in the background ignores
from kd.cli import main
sys.exit(main({command!r}, {words!r}, whole_process=True))
"""
AT_EXIT = """
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
signal.signal(signal.SIGINT, signal.default_int_handler)
from kd.cli import main
sys.exit(main("train", ["--version"], whole_process=True))
"""


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    """A shell ignores SIGINT for what runs in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ended(code: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("train", "kd.command_line"),
        ("train", "pydantic_core"),
        ("eval", "torch"),
        ("export", "numpy"),
        *(
            pytest.param(command, module, marks=pytest.mark.slow)
            for command in COMMANDS
            for module in ("kd.errors", "yaml", "torch._C", "pytorch_lightning", "timm")
        ),
    ],
)
def test_while_modules_are_imported(command: str, module: str, finished: Path) -> None:
    words = (
        [f"recipe={finished.parents[2] / 'tiny.yaml'}"] if command == "train" else [str(finished)]
    )
    status, said = ended(START.format(module=module, command=command, words=words))
    if "pressed" not in said:
        pytest.skip(f"kd-{command} does not import {module} with these words")
    assert status == 130
    assert said.splitlines()[-1] == f"kd-{command}: interrupted"
    assert "Traceback" not in said


def test_while_the_process_ends() -> None:
    status, said = ended(AT_EXIT)
    assert (status, said) == (130, "kd-train: interrupted\n")


class Moment:
    """Presses Ctrl-C at an audit event: each opened file, import, subprocess, connection is one."""

    def __init__(self) -> None:
        self.left = -1
        self.seen = 0
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: object) -> None:
        self.seen += 1
        if self.left >= 0:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGINT)


MOMENT = Moment()
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "train": lambda run: [f"recipe={run.parents[2] / 'tiny.yaml'}", "trainer.max_epochs=1"],
    "eval": lambda run: [str(run)],
    "export": lambda run: [str(run), "to=torch_export"],
    "predict": lambda run: [str(run), str(run.parents[2] / "data/val/apple"), f"out={run}/a.csv"],
    "cache": lambda run: [f"recipe={run.parents[2] / 'tiny.yaml'}", "model.teacher.cache=on"],
    "card": lambda run: [str(run)],
    "report": lambda run: [str(run)],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "part", [0.5, *(pytest.param(n / 20, marks=pytest.mark.slow) for n in range(20) if n != 10)]
)
def test_while_a_command_works(
    command: str, part: float, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At a part of all that it does, by the number of its audit events."""
    copied = tmp_path / "runs" / "tiny" / "000"
    shutil.copytree(finished.parents[2], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tiny.yaml"
    file.write_text(file.read_text().replace(str(finished.parents[2]), str(tmp_path)))
    words = COMMANDS[command](copied)
    for _ in range(0 if command in EVENTS else 2):  # the first imports modules, too
        MOMENT.seen = 0
        assert main(command, words) == 0
        EVENTS[command] = MOMENT.seen
    capfd.readouterr()
    MOMENT.left = round(part * EVENTS[command])
    status = main(command, words)
    MOMENT.left = -1
    said = capfd.readouterr().err
    assert "Traceback" not in said
    if status == 0:  # it was done: after its last step a training ends as it would have
        assert part > 0.8
        return
    assert status == 130
    assert "interrupted" in said or "stopping after this step" in said


EVENTS: dict[str, int] = {}
"""Of each command as a whole."""


def test_what_python_drops_is_pressed_again() -> None:
    """A KeyboardInterrupt inside a finalizer is printed and forgotten by Python."""

    class Dropped:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass

    ctrl_c = CtrlC("train")
    try:
        with pytest.raises(KeyboardInterrupt):
            del_it = Dropped()
            del del_it
            for _ in range(1000):
                time.sleep(0.01)
    finally:
        ctrl_c.end(whole_process=False)
    assert ctrl_c.pressed

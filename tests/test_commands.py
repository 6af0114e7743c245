"""What the commands have in common: each explains itself."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kd.cli import commands, main
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
from tests._helpers import ROOT

LOADING = 42
STOPS_AT_HEAVY_IMPORTS = f"""
import os, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "onnxruntime", "openvino", "optuna"):
            sys.stdout.flush()
            os._exit({LOADING})

sys.meta_path.insert(0, Stop())
from kd.cli import main
sys.exit(main(sys.argv[1], sys.argv[2:]))
"""
"""Runs a command, and ends with the status :data:`LOADING` where it would now load for seconds."""
WORDS = {
    "cache": ["recipe=RECIPE", "out=OUT"],
    "card": ["RUN"],
    "eval": ["RUN"],
    "export": ["RUN", "to=onnx"],
    "latency": ["RUN"],
    "launch": ["sky", "recipe=foodtag_vit", "instances=2xA100:8", "image=kd:1", "--dry-run"],
    "pack": ["recipe=RECIPE", "out=OUT"],
    "predict": ["RUN", "PICTURES"],
    "report": ["RUN"],
    "runs": ["RUNS", "--json"],
    "scale": ["recipe=RECIPE"],
    "serve": ["RUN"],
    "size": ["recipe=RECIPE"],
    "train": ["recipe=RECIPE"],
    "tune": ["recipe=RECIPE", "search.optim.lr=[0.1,0.2]"],
}
"""What is typed after each command; a new command needs a line here."""
COMMANDS = [cache, card, eval, export, latency, predict, report, runs, scale, train, tune]


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__)
def test_help_names_the_command_and_ends_well(
    module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    name = module.__name__.rpartition(".")[2]
    assert main(name, ["--help"]) == 0
    out, err = capsys.readouterr()
    assert f"kd-{name}" in out and not err


@pytest.mark.parametrize("name", commands())
def test_the_first_line_comes_before_anything_that_takes_seconds(
    name: str, finished: Path, recipe: Path, pictures: Path, tmp_path: Path
) -> None:
    places = {"RUNS": finished.parent, "RUN": finished, "RECIPE": recipe, "OUT": tmp_path / "out"}
    places["PICTURES"] = pictures / "val"
    words = list(WORDS[name])
    for place, path in places.items():
        words = [word.replace(place, str(path)) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", STOPS_AT_HEAVY_IMPORTS, name, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, LOADING), done.stderr
    if done.returncode == LOADING and name != "train":
        assert done.stderr.startswith(f"kd-{name}: ")
        assert " ...\n" in done.stderr
        assert not done.stdout
    assert done.stdout or done.stderr
    if "--json" in words:
        json.loads(done.stdout)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["export", "RUN", "to=torch_export"],
            ["converting the student to torch_export ..."],
        ),
    ],
)
def test_parts_that_take_seconds_begin_with_a_line_beside_the_output(
    words: list[str],
    parts: list[str],
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    name, *rest = (word.replace("RUN", str(run)) for word in words)
    rest.append(f"out={tmp_path / 'out'}")
    assert main(name, rest) == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if line in parts] == parts
    assert not any(part in out for part in parts)

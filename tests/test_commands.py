"""What the commands have in common: each explains itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kd.cli import main
from kd.commands import COMMANDS
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
    "report": ["RUN", "--json"],
    "runs": ["RUNS", "--json"],
    "scale": ["recipe=RECIPE"],
    "serve": ["RUN"],
    "size": ["recipe=RECIPE"],
    "train": ["recipe=RECIPE"],
    "tune": ["recipe=RECIPE", "search.optim.lr=[0.1,0.2]"],
}
"""What is typed after each command; a new command needs a line here."""


@pytest.mark.parametrize("name", COMMANDS)
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
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode in (0, LOADING), done.stderr
    if done.returncode == LOADING and name != "train":
        assert done.stderr.startswith(f"kd-{name}: ")
        assert " ...\n" in done.stderr
        assert not done.stdout
    assert done.stdout or done.stderr
    if "--json" in words:
        json.loads(done.stdout)


@pytest.mark.parametrize(("code", "frozen"), [("runs_main()", True), ("runs_main([])", False)])
def test_a_program_ends_without_a_search_for_unused_objects(
    code: str, frozen: bool, finished: Path
) -> None:
    """And with what was registered for its end, and its status; a call that is not the whole program leaves all as it is."""
    program = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 0));"
        f"from kd.cli import runs_main; sys.exit({code} or 7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(finished.parents[1]), "--json"],
        cwd=finished.parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7
    assert done.stdout.endswith(f"{frozen}\n")


def test_a_part_that_takes_seconds_begins_with_a_line_beside_the_output(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(finished), "to=torch_export", f"out={tmp_path / 'out'}", "--json"]
    assert main("export", words) == 0
    out, err = capsys.readouterr()
    line = "converting the student to torch_export ..."
    assert line in err.splitlines() and line not in out
    assert json.loads(out)["kept"]

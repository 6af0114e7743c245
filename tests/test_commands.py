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


def stopped_at_heavy_imports(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that ended, with :data:`LOADING` where it would have loaded for seconds."""
    return subprocess.run(
        [sys.executable, "-c", STOPS_AT_HEAVY_IMPORTS, name, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", commands())
def test_the_first_line_comes_before_anything_that_takes_seconds(
    name: str, finished: Path, recipe: Path, pictures: Path, tmp_path: Path
) -> None:
    places = {"RUNS": finished.parent, "RUN": finished, "RECIPE": recipe, "OUT": tmp_path / "out"}
    places["PICTURES"] = pictures / "val"
    words = list(WORDS[name])
    for place, path in places.items():
        words = [word.replace(place, str(path)) for word in words]
    done = stopped_at_heavy_imports(name, *words)
    assert done.returncode in (0, LOADING), done.stderr
    if done.returncode == LOADING and name != "train":
        assert done.stderr.startswith(f"kd-{name}: ")
        assert " ...\n" in done.stderr
        assert not done.stdout
    assert done.stdout or done.stderr
    if "--json" in words:
        json.loads(done.stdout)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *[
            (f"{words} UNFINISHED", "UNFINISHED is no finished run: it has no student.safetensors")
            for words in ("eval", "latency", "export to=hub", "export to=openvino int8=true")
        ],
        ("export to=onnx out=DATA RUN", "out: DATA exists already and is not an empty folder"),
        ("latency runtime=onnx RUN", "runtime: RUN has no export 'onnx' that this machine made"),
        ("eval margin=1 split=val RUN", "split: these pictures chose the best epoch of RUN"),
        ("eval margin=1 split=train RUN", "split: train can't certify"),
        ("eval margin=1 folder=DATA/train RUN", "folder: can't certify: 48 of its 48 pictures"),
        ("eval margin=1 folder=COPY RUN", "folder: these pictures chose the best epoch of RUN"),
        ("eval margin=1 groups=(x.x) RUN", "groups: '(x.x)' is not in "),
        ("eval margin=1 model.teacher.checkpoint=no.pth RUN", "margin: RUN has no teacher that"),
        (
            "eval margin=1 arch=resnet18 folder=DATA/test WEIGHTS",
            "margin: WEIGHTS has no teacher",
        ),
        ("eval cascade=true split=val RUN", "split: these pictures chose the best epoch of RUN"),
        ("eval cascade=true RUN RUN", "cascade: takes one run, or one weights file, got 2"),
    ],
)
def test_what_a_folder_tells_is_refused_before_torch(
    words: str, says: str, with_test: Path, tmp_path: Path
) -> None:
    data = with_test.parent / "data"
    shutil.copytree(data / "val", tmp_path / "copy")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    shutil.copy(with_test / "config.yaml", unfinished)
    (tmp_path / "weights.pth").touch()
    places = {"UNFINISHED": unfinished, "COPY": tmp_path / "copy", "DATA": data, "RUN": with_test}
    places["WEIGHTS"] = tmp_path / "weights.pth"
    for place, path in places.items():
        words = words.replace(place, str(path))
        says = says.replace(place, str(path))
    name, *items = words.split()
    if str(with_test) in items and name == "eval":
        items.append(f"data.source.root={data}")
    done = stopped_at_heavy_imports(name, *items)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(f"kd-{name}: {says}")
    assert done.stderr.count("\n") == 1


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

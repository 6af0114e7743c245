"""Runs by name, and the table of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kd.cli import main, train_main
from kd.commands.runs import _age
from tests._helpers import ROOT


def test_runs_with_a_name_and_their_table(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, runs = [f"recipe={recipe}", "config=debug"], recipe.parent / "runs"
    assert train_main([*line, "name=first-try"]) == 0
    assert (runs / "tiny" / "latest").resolve() == (runs / "tiny" / "first-try").resolve()
    assert train_main([*line, "name=first-try"]) == 2
    assert "name: there is a run" in capsys.readouterr().err
    assert (
        train_main([f"recipe={runs / 'tiny' / 'first-try' / 'config.yaml'}", "config=debug"]) == 0
    )  # a number
    (runs / "tiny" / "broken").mkdir()
    (runs / "tiny" / "broken" / "config.yaml").write_text("recipe: tiny\n")
    (runs / "tiny" / "broken" / "summary.json").write_text("{")
    capsys.readouterr()

    assert main("runs", [str(runs), "--json"]) == 0
    found = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(found) == {"tiny/first-try", "tiny/000", "tiny/broken"}
    assert found["tiny/000"]["status"] == "done"
    assert found["tiny/000"]["metric"] == "acc1"
    assert 0 <= found["tiny/000"]["student"] <= 1
    assert found["tiny/000"]["bytes"] > 10_000
    assert {name: row["safe_to_delete"] for name, row in found.items()} == {
        "tiny/first-try": False, "tiny/000": False, "tiny/broken": True,
    }  # fmt: skip

    assert main("runs", [str(runs)]) == 0
    table = capsys.readouterr().out
    assert "tiny/first-try" in table
    assert "safe" in next(line for line in table.splitlines() if "broken" in line)
    assert main("runs", [str(runs / "tiny"), "--json"]) == 0  # the folder of one recipe
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_a_run_that_trains_is_not_safe_to_delete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "tiny" / "000"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("recipe: tiny\n")
    lock = f"held = l.lock_run(pathlib.Path({str(run)!r}))"
    code = (
        f"import pathlib, sys, kd.storage.checkpoints as l; {lock}; print(1, flush=True); input()"
    )
    trains = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert trains.stdout is not None
    trains.stdout.readline()
    for status, safe in (("training", False), ("ended early", True)):
        assert main("runs", [str(tmp_path / "runs"), "--json"]) == 0
        row = json.loads(capsys.readouterr().out)[0]
        assert (row["status"], row["safe_to_delete"]) == (status, safe)
        if status == "training":
            trains.communicate("\n")


@pytest.mark.parametrize("items", [["/nowhere"], ["a", "b"], ["seed=1"]])
def test_wrong_use(items: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main("runs", items) == 2
    assert capsys.readouterr().err.startswith("kd-runs: ")


def test_a_run_with_weights_is_not_safe_to_delete_and_odd_files_do_not_end_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("best", "odd"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("recipe: tiny\n")
    (tmp_path / "best" / "checkpoints" / "best.ckpt").touch()
    (tmp_path / "odd" / "summary.json").write_text("[1]")
    gone, rglob = (
        tmp_path / "odd" / "metrics.csv.part",
        Path.rglob,
    )  # a run that trains has just renamed it
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: [*rglob(self, pattern), gone])
    assert main("runs", [str(tmp_path), "--json"]) == 0
    found = {
        Path(row["folder"]).name: row["safe_to_delete"]
        for row in json.loads(capsys.readouterr().out)
    }
    assert found == {"best": False, "odd": True}


def test_age() -> None:
    assert _age(7300) == "2 h"

"""place_of: which run is resumed, from where, by each way to name it and each state that its folder may be in."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kd.errors import UserError
from kd.launch.cluster import marker as job_marker
from kd.run.place import Place, Resumed, check_start, place_of, resumed_by
from kd.run.request import Request
from kd.storage.run_urls import fetched_run, on_disk
from tests._files import write_json
from tests._helpers import refuses

HELD = "import fcntl,sys,time; f=open(sys.argv[1],'a+'); fcntl.lockf(f,fcntl.LOCK_EX); f.write('process 7 on a'); f.flush(); print(flush=True); time.sleep(60)"  # fmt: skip  # noqa: E501
COMMAND = ["seed=1"]
RESUMES, FETCHES, NEW = "resumes", "fetches what is newer", "a new run"
GONE, IN_USE = r"resume: \S+ not found$", "resume: process 7 on a is training in "
TABLE = {  # the way to name it -> what becomes of a folder that is there, gone, newer elsewhere, held by a process
    "argument, a folder": (RESUMES, GONE, RESUMES, IN_USE),
    "argument, latest": (RESUMES, GONE, RESUMES, IN_USE),
    "argument, last.ckpt": (RESUMES, GONE, RESUMES, IN_USE),
    "argument, a URL": (RESUMES, FETCHES, FETCHES, IN_USE),
    "argument, latest of a URL": (RESUMES, FETCHES, FETCHES, IN_USE),
    "argument, a folder, of a URL runs_dir": (RESUMES, GONE, FETCHES, IN_USE),
    "key, a folder": (RESUMES, GONE, RESUMES, IN_USE),
    "key, a URL": (RESUMES, FETCHES, FETCHES, IN_USE),
    "marker": (RESUMES, NEW, RESUMES, IN_USE),
    "marker, of a URL runs_dir": (RESUMES, FETCHES, FETCHES, IN_USE),
}
STATES = ("there", "gone", "newer elsewhere", "held")


class Runs:
    """A run in a store, and what was fetched of it to this machine."""

    def __init__(self, root: Path) -> None:
        self.store = root / "store" / "tiny" / "000"
        self.write(self.store, "old")
        (self.store / "config.yaml").write_text("recipe: tiny\n")
        (self.store.parent / "latest").write_text("000\n")
        self.runs_dir = f"file://{root / 'store'}"
        self.folder = fetched_run(f"{self.runs_dir}/tiny/000", "resume")
        (self.folder.parent / "latest").symlink_to("000")

    @staticmethod
    def write(folder: Path, text: str) -> None:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / "last.ckpt").write_text(text)

    def place(self, way: str) -> Place:
        """Asks :func:`place_of` in one of the ways."""
        name, own_runs = str(self.folder), str(self.folder.parents[1])
        names = {"latest": str(self.folder.parent / "latest"), "last.ckpt": f"{name}/checkpoints/last.ckpt",
                 "a URL": f"{self.runs_dir}/tiny/000", "latest of a URL": f"{self.runs_dir}/tiny/latest"}  # fmt: skip
        by, _, what = way.partition(", ")
        asked = names.get(what, name)
        url_runs = what.endswith("of a URL runs_dir")
        config = {"runs_dir": self.runs_dir if url_runs else own_runs, "recipe": "tiny", "name": None,
                  "resume": asked if by == "key" else None}  # fmt: skip
        given = Resumed.named(asked) if by == "argument" else None
        if by == "marker":
            for runs in (self.folder.parent, self.store.parent if url_runs else self.folder.parent):
                marker = job_marker("job 1", runs, COMMAND)
                assert marker is not None
                there = job_marker(
                    "job 1", on_disk(config["runs_dir"], "runs_dir") / "tiny", COMMAND
                )
                assert there is not None
                (runs / there.name).write_text("000\n")
        return place_of(config, given, "job 1" if by == "marker" else None, COMMAND)


@pytest.fixture()
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Runs:
    monkeypatch.setattr(
        "kd.storage.checkpoints.damage", lambda file: ""
    )  # what a whole checkpoint holds needs torch
    return Runs(tmp_path)


@pytest.fixture()
def holder(runs: Runs) -> Iterator[subprocess.Popen[bytes]]:
    """A process that trains in the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(runs.folder / ".lock")], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", TABLE)
def test_every_way_in_every_state(
    way: str, state: str, runs: Runs, request: pytest.FixtureRequest
) -> None:
    expected = TABLE[way][STATES.index(state)]
    if state == "gone":
        for file in sorted(runs.folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        runs.folder.rmdir()
    elif state == "newer elsewhere":
        runs.write(runs.store, "newer")
    elif state == "held":
        request.getfixturevalue("holder")
    if expected in (GONE, IN_USE):
        with pytest.raises(UserError) as error:
            runs.place(way)
        assert re.match(expected, str(error.value))
        return
    place = runs.place(way)
    assert (place.runs_dir == runs.runs_dir) == ("URL" in way)
    if expected == NEW:
        assert place.folder is None and place.checkpoint is None and place.marker
        return
    assert place.folder == runs.folder and place.checkpoint is not None
    text = "newer" if expected == FETCHES and state == "newer elsewhere" else "old"
    assert place.checkpoint.read_text() == text


def test_both_sides_have_gone_on(runs: Runs) -> None:
    runs.write(runs.folder, "here")
    runs.write(runs.store, "newer")
    with refuses("has continued both in"):
        runs.place("argument, a URL")


def test_the_argument_beats_the_key_and_the_marker(runs: Runs) -> None:
    other = runs.folder.parent / "001"
    runs.write(other, "other")
    config = {
        "runs_dir": str(other.parents[1]),
        "recipe": "tiny",
        "name": None,
        "resume": str(runs.folder),
    }
    place = place_of(config, Resumed.named(str(other)), "job 1", COMMAND)
    assert place.folder == other and place.marker is not None
    place.marker.write_text("001\n")
    assert place_of(config, None, "job 1", COMMAND).folder == runs.folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs_dir": "file:///nowhere"}, "runs_dir: file:///nowhere has no run "),
        ({"name": "mine"}, "name: there is a run "),
    ],
)
def test_what_is_refused(change: dict, message: str, runs: Runs, tmp_path: Path) -> None:
    config = {
        "runs_dir": str(tmp_path / "runs"),
        "recipe": "tiny",
        "name": None,
        "resume": None,
        **change,
    }
    (tmp_path / "runs" / "tiny" / "mine").mkdir(parents=True)
    own = tmp_path / "runs" / "tiny" / "000"
    runs.write(own, "a")
    with pytest.raises(UserError) as error:
        place_of(config, Resumed.named(str(own)) if "runs_dir" in change else None, None, COMMAND)
    assert str(error.value).startswith(message)


def test_a_resumed_run_brings_its_settings(runs: Runs) -> None:
    (runs.folder / "config.yaml").write_text("---\nrecipe: tiny\n...\n")
    alone, with_recipe = Request(resume=str(runs.folder)), Request("mine", resume=str(runs.folder))
    assert resumed_by(alone) and alone.recipe == str(runs.folder / "config.yaml")
    assert (
        resumed_by(with_recipe)
        and with_recipe.recipe == "mine"
        and resumed_by(Request("mine")) is None
    )
    (runs.folder / "config.yaml").write_text("recipe: tiny\n")
    with refuses("is truncated"):
        resumed_by(Request(resume=str(runs.folder)))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "kd.storage.checkpoints.damage", lambda file: "torn" if file.name == "last.ckpt" else ""
    )
    with refuses(r"last.ckpt can't be loaded: torn"):
        runs.place("argument, a folder")
    (runs.folder / "checkpoints" / "previous.ckpt").write_text("before")
    place = runs.place("argument, a folder")
    assert place.checkpoint is not None and place.checkpoint.name == "previous.ckpt"
    assert "warning" in capsys.readouterr().err


def test_a_process_of_the_same_job_is_no_stranger(
    runs: Runs, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.place("argument, a folder").folder == runs.folder


def test_the_start_of_a_resumed_run_stays(tmp_path: Path) -> None:
    student = {"arch": "a", "checkpoint": None, "pretrained": False, "inherit": "auto"}
    before = {"model": {"ema_decay": None, "student": student}}
    write_json(tmp_path / "config.yaml", before)
    check_start(tmp_path, before)
    check_start(tmp_path, {"model": {"ema_decay": None, "student": student | {"inherit": True}}})
    for now, message in (
        (
            {"model": {"ema_decay": 0.9, "student": student}},
            "model.ema_decay: can't be turned on or off",
        ),
        (
            {"model": {"ema_decay": None, "student": student | {"pretrained": True}}},
            "model.student.pretrained: has no effect on a resumed run",
        ),
    ):
        with pytest.raises(UserError) as error:
            check_start(tmp_path, now)
        assert str(error.value).startswith(message)


def test_it_needs_no_torch() -> None:
    code = "import sys, kd.run.place, kd.run.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}).returncode == 0

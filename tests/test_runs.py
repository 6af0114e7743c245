"""Runs by name, and the table of them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from kd.cli import main, train_main
from kd.commands.runs import _age
from kd.storage.cache_parts import PARTS
from tests._helpers import ROOT

CONFIG = "recipe: tiny\nruns_dir: runs\ndata: {}\nmodel: {}\ntrainer: {}\n"
"""Settings by which a folder is recognised as a run of kd."""


def test_runs_with_a_name_and_their_table(
    recipe: Path, capsys: pytest.CaptureFixture[str], refusal
) -> None:
    line, runs = [f"recipe={recipe}", "config=debug"], recipe.parent / "runs"
    assert train_main([*line, "name=first-try"]) == 0
    assert (runs / "tiny" / "latest").resolve() == (runs / "tiny" / "first-try").resolve()
    assert "name: there is a run" in refusal("train", [*line, "name=first-try"])
    assert (
        train_main([f"recipe={runs / 'tiny' / 'first-try' / 'config.yaml'}", "config=debug"]) == 0
    )  # a number
    (runs / "tiny" / "broken").mkdir()
    (runs / "tiny" / "broken" / "config.yaml").write_text(CONFIG)
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
    assert "in 7 d" in next(line for line in table.splitlines() if "broken" in line)
    assert main("runs", [str(runs / "tiny"), "--json"]) == 0  # the folder of one recipe
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_runs_behind_a_link_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kd-runs clean`` deletes nothing outside the folder that it is given; that folder may be a link itself."""
    elsewhere = tmp_path / "elsewhere" / "000"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.yaml").write_text(CONFIG)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(elsewhere.parent)
    for folder, count in ((tmp_path / "runs", 0), (tmp_path / "runs" / "tiny", 1)):
        assert main("runs", [str(folder), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == count


def test_of_a_runs_own_folder_that_run_alone_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in it may look like a run."""
    run = tmp_path / "runs" / "tiny" / "000"
    for folder in (run, run / "copies" / "small"):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(CONFIG)
    assert main("runs", [str(run), "--json"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == ["tiny/000"]


def test_a_run_that_trains_is_not_safe_to_delete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "tiny" / "000"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
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


def test_the_table_says_when_clean_deletes_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rule: what the table calls ``now`` is what ``clean`` lists, by age and by whose folder it is."""
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "cache"))
    days = {"new": 0, "days": 4.5, "old": 30}
    for name, age in days.items():
        run = tmp_path / "runs" / "tiny" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(CONFIG)
        (run / "report.html").write_text("made today by kd-report, which only reads the run")
        then = time.time() - age * 86_400
        os.utime(run / "config.yaml", (then, then))
    other = tmp_path / "runs" / "tiny" / "other"
    other.mkdir()
    (other / "config.yaml").write_text("recipe: soup\n")
    os.utime(other / "config.yaml", (1e9, 1e9))
    assert main("runs", [str(tmp_path / "runs")]) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    said = {row[0].strip().removeprefix("tiny/"): row[-1].strip() for row in rows}
    assert said == {"new": "in 7 d", "days": "in 3 d", "old": "now", "other": ""}
    assert main("runs", ["clean", str(tmp_path / "runs")]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if "tiny/" in line]
    assert len(listed) == 1
    assert "tiny/old" in listed[0]


@pytest.fixture
def old_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with an entry of each part, and files that kd has not made; last used 30 days ago."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("KD_CACHE", str(cache))
    names = ["answers/vit_tiny-0123456789abcdef/logits-01234567/rank.bin", "answers/pixels/0123456789abcdef/a.bin",
             "stored/cloud-0123456789abcdef/a.bin", "teachers/photos_teacher-0123456789abcdef/student.safetensors",
             "fetched/s3/bucket/t.pth",
             "scans/a.json", "webdataset/a.json", "foodtag-mini-v1-2x2/train/a.png", "runs/s3/bucket/000/last.ckpt",
             "own_runs-0/00ff", "fetched/holiday/me.jpg", "thesis.tex"]  # fmt: skip
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    for name in names:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"x" * 1000)
    (cache / "fetched" / "s3" / "other").symlink_to(outside)
    (cache / "fetched" / "s3" / "bucket" / "link").symlink_to(outside)
    a_month_ago = time.time() - 30 * 86_400
    for name in names:
        os.utime(cache / name, (a_month_ago, a_month_ago))
    return cache


GOES = {
    "answers/vit_tiny-0123456789abcdef", "answers/pixels/0123456789abcdef", "fetched/s3/bucket",
    "scans", "webdataset", "foodtag-mini-v1-2x2",
}  # fmt: skip


def paths_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_clean_lists_one_line_each_and_deletes_what_it_listed_and_nothing_else(
    recipe: Path, tmp_path: Path, old_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = recipe.parent / "runs"
    assert train_main([f"recipe={recipe}", "config=debug"]) == 0
    for file in (old_cache / "scans").iterdir():  # this training has checked its pictures
        os.utime(file, (1e9, 1e9))
    failed = runs / "tiny" / "failed"
    failed.mkdir()
    (failed / "config.yaml").write_bytes((runs / "tiny" / "000" / "config.yaml").read_bytes())
    not_of_kd = runs / "tiny" / "notes"
    not_of_kd.mkdir()
    (not_of_kd / "config.yaml").write_text("recipe: soup\n")
    before, before_runs = paths_in(old_cache.parent), paths_in(runs)
    capsys.readouterr()

    # nothing was asked for but to look: younger runs stay, and nothing is deleted
    assert main("runs", ["clean", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split("  ")[0] for line in lines[:-1]}
    assert listed == {str(old_cache / name) for name in GOES}
    assert f"nothing is deleted yet: kd-runs clean {runs} --yes deletes them" in lines[-1]
    assert paths_in(old_cache.parent) == before and paths_in(runs) == before_runs

    assert main("runs", ["clean", str(runs), "older=0", "--yes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"deleted: {failed}  " in "\n".join(lines)
    gone = before - paths_in(old_cache.parent)
    assert {name for name in GOES if not (old_cache / name).exists()} == GOES
    below = tuple(f"cache/{name}" for name in GOES)
    assert all(
        name.startswith(below) or name.endswith("/tiny/failed") or "/tiny/failed/" in name
        for name in gone
    ), gone
    assert before_runs - paths_in(runs) == {"tiny/failed", "tiny/failed/config.yaml"}
    assert (tmp_path / "outside" / "precious").read_text() == "mine"
    for stays in ("thesis.tex", "fetched/holiday/me.jpg", "teachers",
                  "fetched/s3/other", "own_runs-0/00ff",
                  "runs/s3/bucket/000/last.ckpt", "stored/cloud-0123456789abcdef/a.bin"):  # fmt: skip
        assert (old_cache / stays).exists(), stays
    assert main("runs", ["clean", str(runs), "older=0"]) == 0
    assert "nothing may go" in capsys.readouterr().out


def test_the_cache_is_listed_with_its_size_and_stays_while_a_run_trains(
    tmp_path: Path, old_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "tiny" / "000"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    assert main("runs", [str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert f"cache: {old_cache}, 0.0 MB" in out
    rows = [line.split("│")[1:6] for line in out.splitlines() if "│" in line]
    parts = {row[0].strip(): row[4].strip() for row in rows if len(row) == 5}
    assert parts["answers"] == "2 of 2" and parts["teachers"] == parts["runs"] == "no"
    code = (
        f"import pathlib, kd.storage.checkpoints as l; held = l.lock_run(pathlib.Path({str(run)!r}));"
        "print(1, flush=True); input()"
    )
    trains = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True, cwd=ROOT)  # fmt: skip
    assert trains.stdout is not None
    trains.stdout.readline()
    assert main("runs", ["clean", str(tmp_path / "runs"), "older=0", "--yes"]) == 0
    trains.communicate("\n")
    assert "the cache stays as it is while tiny/000 trains" in capsys.readouterr().out
    assert all((old_cache / name).exists() for name in GOES)


def test_a_lock_belongs_to_what_it_stands_beside_and_goes_once_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table counts what ``clean`` lists; a teacher's two locks were three teachers, none of them for cleaning."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("KD_CACHE", str(cache))
    teachers = cache / "teachers"
    (teachers / "photos_teacher-0123456789abcdef").mkdir(parents=True)
    (teachers / "photos_teacher-0123456789abcdef" / "student.safetensors").write_bytes(b"x" * 1000)
    (teachers / "begun-0123456789abcdef.part").mkdir()
    (teachers / "held-0123456789abcdef.part").mkdir()  # its process trains
    (cache / "foodtag-mini-v1-2x2").mkdir()
    (cache / "stored" / "cloud-0123456789abcdef").mkdir(parents=True)
    (cache / "stored" / "cloud-0123456789abcdef" / "a.bin").write_bytes(b"x")
    gone = ["teachers/gone-0123456789abcdef.lock", "foodtag-mini-v1-3x3.lock"]
    held = "teachers/held-0123456789abcdef.lock"
    beside = ["teachers/photos_teacher-0123456789abcdef.lock",
              "teachers/begun-0123456789abcdef.lock", "foodtag-mini-v1-2x2.lock",
              "stored/cloud-0123456789abcdef/.asking"]  # fmt: skip
    for name in (*gone, *beside):
        (cache / name).touch()
    old = time.time() - 30 * 86_400
    for path in cache.rglob("*"):
        os.utime(path, (old, old))

    with FileLock(cache / held):
        os.utime(cache / held, (old, old))
        assert main("runs", [str(tmp_path)]) == 0
        out = capsys.readouterr().out
        rows = [line.split("│")[1:6] for line in out.splitlines() if "│" in line]
        table = {row[0].strip(): (row[1].strip(), row[4].strip()) for row in rows if len(row) == 5}
        assert table == {
            "stored": ("1", "no"), "teachers": ("1", "no"), "unfinished": ("2", "1 of 2"), "foodtag": ("1", "1 of 1"),
            "locks": ("2", "2 of 2"),
        }  # fmt: skip
        assert main("runs", ["clean", str(tmp_path)]) == 0
        *lines, _ = capsys.readouterr().out.splitlines()
        goes = ["foodtag-mini-v1-2x2", "teachers/begun-0123456789abcdef.part"]
        listed = {line.split("  ")[0] for line in lines}
        assert listed == {str(cache / name) for name in (*gone, *goes)}
        assert main("runs", ["clean", str(tmp_path), "--yes"]) == 0
        assert (cache / held).exists()
    left = {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()}
    assert left - {held} == {
        *beside, "teachers/photos_teacher-0123456789abcdef/student.safetensors", "stored/cloud-0123456789abcdef/a.bin",
    } - {"foodtag-mini-v1-2x2.lock", "teachers/begun-0123456789abcdef.lock"}  # fmt: skip


def test_the_page_names_every_part_of_the_cache() -> None:
    page = (ROOT / "kd/data/README.md").read_text()
    for name in PARTS:
        assert {
            "foodtag": "`foodtag-mini-*`",
            "locks": "`*.lock`",
            "unfinished": "`teachers/*.part`",
            "own_runs": "`own_runs-USER/`",
        }.get(name, f"`{name}/`") in page


@pytest.mark.parametrize(
    "items",
    [
        ["/nowhere"],
        ["a", "b"],
        ["seed=1"],
        ["clean", "/nowhere"],
        ["clean", "older=x"],
        ["clean", "a", "b"],
        ["--yes"],
    ],
)
def test_wrong_use(items: list[str], refusal) -> None:
    assert refusal("runs", items).startswith("kd-runs: ")


def test_a_run_with_weights_is_not_safe_to_delete_and_odd_files_do_not_end_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("best", "odd"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(CONFIG)
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

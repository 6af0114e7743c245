"""Runs by name, and the table of them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from kd.cli import main, train_main
from kd.storage.cache_parts import PARTS
from tests._helpers import ROOT, Command
from tests._runs import run

Printed = pytest.CaptureFixture[str]
CONFIG = "recipe: tiny\nruns_dir: runs\ndata: {}\nmodel: {}\ntrainer: {}\n"
"""Settings by which a folder is recognised as a run of kd."""


def made_at(folder: Path, config: str = CONFIG, days: float = 0) -> Path:
    """A folder with the settings of a run, so many days old."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    then = time.time() - days * 86_400
    os.utime(folder / "config.yaml", (then, then))
    return folder


def told(folder: Path, capsys: Printed, *words: str) -> str:
    """What ``kd-runs FOLDER`` prints."""
    capsys.readouterr()
    assert main("runs", [str(folder), *words]) == 0
    return capsys.readouterr().out


def rows_of(folder: Path, capsys: Printed) -> dict[str, dict[str, Any]]:
    """What ``kd-runs FOLDER --json`` prints, by the name of the run."""
    return {row["run"]: row for row in json.loads(told(folder, capsys, "--json"))}


def tables_of(folder: Path, capsys: Printed) -> list[list[str]]:
    """The cells of each row that ``kd-runs FOLDER`` prints."""
    lines = [line.split("│")[1:-1] for line in told(folder, capsys).splitlines()]
    return [[cell.strip() for cell in line] for line in lines if line]


@contextmanager
def training(run: Path) -> Iterator[None]:
    """Inside, another process holds the run's lock."""
    held = f"held = l.lock_run(pathlib.Path({str(run)!r}))"
    code = f"import pathlib, kd.storage.checkpoints as l; {held}; print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate("\n")


def test_runs_with_a_name_and_their_table(recipe: Path, capsys: Printed, refusal: Command) -> None:
    line, runs = [f"recipe={recipe}", "config=debug"], recipe.parent / "runs"
    assert train_main([*line, "name=first-try"]) == 0
    assert (runs / "tiny" / "latest").resolve() == (runs / "tiny" / "first-try").resolve()
    assert "name: there is a run" in refusal("train", [*line, "name=first-try"])
    assert (
        train_main([f"recipe={runs / 'tiny' / 'first-try' / 'config.yaml'}", "config=debug"]) == 0
    )  # a number
    broken = made_at(runs / "tiny" / "broken")
    (broken / "summary.json").write_text("{")
    found = rows_of(runs, capsys)
    assert set(found) == {"tiny/first-try", "tiny/000", "tiny/broken"}
    assert found["tiny/000"]["status"] == "done"
    assert found["tiny/000"]["metric"] == "acc1"
    assert 0 <= found["tiny/000"]["student"] <= 1
    assert found["tiny/000"]["bytes"] > 10_000
    assert {name: row["safe_to_delete"] for name, row in found.items()} == {
        "tiny/first-try": False, "tiny/000": False, "tiny/broken": True,
    }  # fmt: skip
    table = {row[0]: row for row in tables_of(runs, capsys)}
    assert "tiny/first-try" in table
    assert "in 7 d" in table["tiny/broken"]
    assert len(rows_of(runs / "tiny", capsys)) == 3  # the folder of one recipe


def test_which_folders_are_runs(tmp_path: Path, capsys: Printed) -> None:
    """Nothing behind a link, as ``clean`` deletes what is listed; the folder that is given may be a link itself. Of a
    run's own folder that run alone: a folder in it may look like one."""
    elsewhere = made_at(tmp_path / "elsewhere" / "000")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(elsewhere.parent)
    own = made_at(tmp_path / "own" / "tiny" / "000")
    made_at(own / "copies" / "small")
    assert rows_of(tmp_path / "runs", capsys) == {}
    assert len(rows_of(tmp_path / "runs" / "linked", capsys)) == 1
    assert [*rows_of(own, capsys)] == ["tiny/000"]


def test_a_run_that_trains_is_not_safe_to_delete(tmp_path: Path, capsys: Printed) -> None:
    run = made_at(tmp_path / "runs" / "tiny" / "000")
    with training(run):
        (row,) = rows_of(tmp_path / "runs", capsys).values()
        assert (row["status"], row["safe_to_delete"]) == ("training", False)
    (row,) = rows_of(tmp_path / "runs", capsys).values()
    assert (row["status"], row["safe_to_delete"]) == ("ended early", True)


def test_the_table_says_when_clean_deletes_a_run(
    tmp_path: Path, capsys: Printed, prints: Command, own_cache: Path
) -> None:
    """One rule: what the table calls ``now`` is what ``clean`` lists, by age and by whose folder it is."""
    tiny = tmp_path / "runs" / "tiny"
    for name, days in {"new": 0, "days": 4.5, "old": 30}.items():
        run = made_at(tiny / name, days=days)
        (run / "report.html").write_text("made today by kd-report, which only reads the run")
    made_at(tiny / "other", "recipe: soup\n", days=9000)
    said = {row[0].removeprefix("tiny/"): row[-1] for row in tables_of(tmp_path / "runs", capsys)}
    assert said == {"new": "in 7 d", "days": "in 3 d", "old": "now", "other": ""}
    (listed,) = [
        line
        for line in prints("runs", ["clean", str(tmp_path / "runs")]).splitlines()
        if "tiny/" in line
    ]
    assert "tiny/old" in listed


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
    recipe: Path, tmp_path: Path, old_cache: Path, capsys: Printed, prints: Command
) -> None:
    runs = recipe.parent / "runs"
    run(recipe, "config=debug")
    for file in (old_cache / "scans").iterdir():  # this training has checked its pictures
        os.utime(file, (1e9, 1e9))
    failed = made_at(runs / "tiny" / "failed", (runs / "tiny/000/config.yaml").read_text())
    made_at(runs / "tiny" / "notes", "recipe: soup\n")
    before, before_runs = paths_in(old_cache.parent), paths_in(runs)
    capsys.readouterr()

    # nothing was asked for but to look: younger runs stay, and nothing is deleted
    lines = prints("runs", ["clean", str(runs)]).splitlines()
    listed = {line.split("  ")[0] for line in lines[:-1]}
    assert listed == {str(old_cache / name) for name in GOES}
    assert f"nothing is deleted yet: kd-runs clean {runs} --yes deletes them" in lines[-1]
    assert paths_in(old_cache.parent) == before and paths_in(runs) == before_runs

    lines = prints("runs", ["clean", str(runs), "older=0", "--yes"]).splitlines()
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
    assert "nothing may go" in prints("runs", ["clean", str(runs), "older=0"])


def test_the_cache_is_listed_with_its_size_and_stays_while_a_run_trains(
    tmp_path: Path, old_cache: Path, capsys: Printed, prints: Command
) -> None:
    run = made_at(tmp_path / "runs" / "tiny" / "000")
    assert f"cache: {old_cache}, 0.0 MB" in prints("runs", [str(tmp_path / "runs")])
    parts = {row[0]: row[4] for row in tables_of(tmp_path / "runs", capsys) if len(row) > 4}
    assert parts["answers"] == "2 of 2" and parts["teachers"] == parts["runs"] == "no"
    with training(run):
        assert main("runs", ["clean", str(tmp_path / "runs"), "older=0", "--yes"]) == 0
    assert "the cache stays as it is while tiny/000 trains" in capsys.readouterr().out
    assert all((old_cache / name).exists() for name in GOES)


def test_a_lock_belongs_to_what_it_stands_beside_and_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed, prints: Command
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
    held = "teachers/held-0123456789abcdef.lock"
    beside = ["teachers/photos_teacher-0123456789abcdef.lock",
              "teachers/begun-0123456789abcdef.lock", "foodtag-mini-v1-2x2.lock",
              "stored/cloud-0123456789abcdef/.asking"]  # fmt: skip
    for name in beside:
        (cache / name).touch()
    old = time.time() - 30 * 86_400
    for path in cache.rglob("*"):
        os.utime(path, (old, old))

    with FileLock(cache / held):
        os.utime(cache / held, (old, old))
        cells = tables_of(tmp_path, capsys)
        table = {row[0]: (row[1], row[4]) for row in cells if len(row) > 4}
        assert table == {
            "stored": ("1", "no"), "teachers": ("1", "no"), "unfinished": ("2", "1 of 2"), "foodtag": ("1", "1 of 1"),
        }  # fmt: skip
        *lines, _ = prints("runs", ["clean", str(tmp_path)]).splitlines()
        goes = ["foodtag-mini-v1-2x2", "teachers/begun-0123456789abcdef.part"]
        listed = {line.split("  ")[0] for line in lines}
        assert listed == {str(cache / name) for name in goes}
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
            "unfinished": "`teachers/*.part`",
            "own_runs": "`own_runs-USER/`",
        }.get(name, f"`{name}/`") in page


def test_a_run_with_weights_is_not_safe_to_delete_and_odd_files_do_not_end_the_table(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("best", "odd"):
        (made_at(tmp_path / name) / "checkpoints").mkdir()
    (tmp_path / "best" / "checkpoints" / "best.ckpt").touch()
    (tmp_path / "odd" / "summary.json").write_text("[1]")
    gone = tmp_path / "odd" / "metrics.csv.part"  # a run that trains has just renamed it
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: [*rglob(self, pattern), gone])
    rows = rows_of(tmp_path, capsys).values()
    found = {Path(row["folder"]).name: row["safe_to_delete"] for row in rows}
    assert found == {"best": False, "odd": True}

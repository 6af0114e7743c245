"""What is written below a run's folder stays there; what is read is a regular file of a bounded size."""

import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kd.storage import run_urls
from kd.storage.checkpoints import holder_of, lock_run
from kd.storage.elsewhere import (
    LARGEST,
    bytes_of,
    lines_of,
    open_regular,
    regular,
    regular_files,
    text_of,
)
from kd.storage.writing import (
    appended,
    file_for,
    guard,
    move,
    remove,
    second_name,
    write_json,
    write_text,
    write_whole,
)
from tests._helpers import Command, refuses


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "tiny" / "000"
    folder.mkdir(parents=True)
    return guard(folder)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file, of which nothing may change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "x").write_text("kept")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["x"]
    assert (folder / "x").read_text() == "kept"


def write_line(path: Path) -> None:
    with appended(path) as file:
        file.write("line\n")


def give_second_name(path: Path) -> None:
    weights = Path(os.environ["KD_CACHE"], "weights")
    weights.unlink(missing_ok=True)
    weights.write_text("new")
    second_name(weights, path)


WAYS: dict[str, Callable[[Path], object]] = {
    "write_text": lambda path: write_text(path, "new"),
    "write_json": lambda path: write_json(path, {}),
    "write_whole": lambda path: write_whole(
        path, lambda file: file.write(b"new"), keep=path.with_name("before")
    ),
    "appended": write_line,
    "file_for": lambda path: file_for(path).write_text("new"),
    "second_name": give_second_name,
}


def test_an_old_file_that_has_its_second_name_already_gets_no_third(tmp_path: Path) -> None:
    """As after a power cut between the two renames."""
    file, before = tmp_path / "file", tmp_path / "before"
    file.write_text("old")
    before.hardlink_to(file)
    write_whole(file, lambda opened: opened.write(b"new"), keep=before)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "file": "new",
        "before": "old",
    }


def intrude(kind: str, place: Path, outside: Path) -> None:
    """Puts something into a file's or a folder's place that leads to ``outside``, or is no file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "hard":
        place.hardlink_to(outside / "x")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "part":
        place.with_name(f"{place.name}.part").symlink_to(outside / "x")
    else:
        targets = {"link": outside / "x", "folder": outside, "dangling": outside / "none"}
        place.symlink_to(targets.get(kind, Path("/dev/zero")))


@pytest.mark.parametrize("kind", ["link", "folder", "dangling", "pipe", "device"])
@pytest.mark.parametrize("name", ["x", "checkpoints", "records/deep/x", "export/a"])
def test_a_folder_that_leads_out_is_refused_when_it_is_opened(
    kind: str, name: str, run: Path, outside: Path
) -> None:
    intrude(kind, run / name, outside)
    with refuses(f"{name}: is a (link; kd follows|named pipe; a run)"):
        guard(run)


def test_what_stays_in_a_run_is_let_through(run: Path, outside: Path, tmp_path: Path) -> None:
    """A logger's link to its newest folder, weights of two names; links above a run are the user's."""
    (run / "wandb" / "run-1").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run-1")
    (run / "student.safetensors").hardlink_to(outside / "x")
    (tmp_path / "by-link").symlink_to(run.parent)
    for folder in (run, tmp_path / "by-link" / run.name, run / "none"):
        assert guard(folder) == folder
    with refuses("by-link/000: is a link"):
        guard(tmp_path / "by-link" / run.name, within=tmp_path)
    assert guard(run, within=tmp_path) == run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["link", "dangling", "hard", "pipe", "device", "part"])
def test_nothing_is_written_through_what_is_in_a_files_place(
    way: str, kind: str, run: Path, outside: Path
) -> None:
    """It is replaced; what would be added to is refused, or copied where it has a second name."""
    place = run / "records" / "x"
    intrude(kind, place, outside)
    if way in ("appended", "file_for") and kind not in ("hard", "part"):
        with refuses("x: is a (link|named pipe); a file is written there"):
            WAYS[way](place)
        return
    WAYS[way](place)
    assert place.is_file() and not place.is_symlink()
    assert place.stat().st_nlink == 1 + (way == "second_name")
    if way == "appended":
        assert place.read_text() == ("kept" if kind == "hard" else "") + "line\n"


def test_folders_and_files_in_each_others_place(run: Path) -> None:
    (run / "export").write_text("a file")
    with refuses("export: a file has the place of this folder, or"):
        write_text(run / "export" / "x", "")
    (run / "summary.json").mkdir()
    for call in (guard, lambda run: write_text(run / "summary.json", "")):
        with refuses("summary.json: is a folder; a file is written there"):
            call(run)
    assert not list(run.glob("*.part"))


def test_a_library_finds_no_second_name_in_a_folder(run: Path, outside: Path) -> None:
    place = run / "csv"
    (place / "inner").mkdir(parents=True)
    (place / "inner" / "x").hardlink_to(outside / "x")
    (place / "own.csv").write_text("own")
    guard(place, writes=True)
    assert sorted(p.name for p in place.rglob("*")) == ["inner", "own.csv", "x"]
    (place / "inner" / "x").write_text("new")


def test_names_are_changed_and_removed_in_their_folder(run: Path, outside: Path) -> None:
    write_text(run / "a" / "x", "1")
    move(run / "a" / "x", run / "a" / "y")
    assert (run / "a" / "y").read_text() == "1"
    (run / "out").symlink_to(outside)
    remove(run / "out")
    remove(run / "a")
    remove(run / "none")
    assert list(run.iterdir()) == []


def test_the_lock_of_a_run_is_its_own_file(run: Path, outside: Path) -> None:
    (run / ".lock").hardlink_to(outside / "x")
    lock_run(run).close()
    assert (run / ".lock").read_text().startswith("process ")
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    assert holder_of(run) == ""


def test_the_holder_of_a_lock_may_ask_who_holds_it(run: Path) -> None:
    """It did not see itself, and the question gave its lock back: POSIX does so with any handle that is closed."""
    code = f"import pathlib, kd.storage.checkpoints as c; print(c.holder_of(pathlib.Path({str(run)!r})))"
    with lock_run(run):
        me = f"process {os.getpid()} on {socket.gethostname()}"
        assert holder_of(run) == me
        with refuses(f"resume: {me} is training in"):
            lock_run(run)
        assert subprocess.check_output([sys.executable, "-c", code], text=True) == f"{me}\n"
    assert holder_of(run) == ""
    lock_run(run).close()


# -- reading -----------------------------------------------------------------------------------------------------------

READERS = [open_regular, regular, bytes_of, text_of, lines_of]


@pytest.fixture(params=["pipe", "device", "socket", "folder", "sparse"])
def no_text(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A file that no command may read as text."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    place = tmp_path / "x"
    if request.param == "pipe":
        os.mkfifo(place)
    elif request.param == "device":
        place.symlink_to("/dev/zero")
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("x")
    elif request.param == "folder":
        place.mkdir()
    else:
        with place.open("wb") as file:
            file.truncate(200 * 2**30)
    return place


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", READERS)
def test_only_a_regular_file_of_a_bounded_size_is_read(
    read: Callable[[Path], object], no_text: Path
) -> None:
    with refuses(r"x: (is a .*only a regular file is read|has [\d,]+ bytes, at most)") as found:
        read(no_text)
    assert str(pickle.loads(pickle.dumps(found.value))) == str(
        found.value
    )  # from a loader's process
    assert isinstance(found.value, OSError)


def test_a_folder_that_a_library_reads(tmp_path: Path) -> None:
    regular_files(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with refuses("config.json: is a named pipe"):
        regular_files(tmp_path)


def test_a_missing_file_stays_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        text_of(tmp_path / "none")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfa\r\n")
    assert text_of(tmp_path / "marked") == "a\r\n"
    (tmp_path / "large").write_bytes(bytes(LARGEST + 1))
    with refuses("large: has 67,108,865 bytes, at most 64 MB are read"):
        text_of(tmp_path / "large")


NAMED = {
    "model.teacher.classes": "{x}",
    "model.teacher.checkpoint": "{x}",
    "model.student.checkpoint": "{x}",
    "data.class_facts": "{x}",
    "recipe": "{x}.yaml",
    "config": "{x}.yaml",
    "resume": "{x}",
    "data.source": "{{class_path: kd.data.sources.Manifest, init_args: {{train: {x}.csv, val: {x}.csv}}}}",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("key", NAMED)
def test_what_a_command_line_names_is_a_regular_file(
    key: str, tmp_path: Path, recipe: Path, refusal: Command
) -> None:
    """Whose readers refuse what else is none, as above."""
    pipe = tmp_path / "x"
    os.mkfifo(pipe)
    for ending in (".yaml", ".csv"):
        pipe.with_name(f"x{ending}").symlink_to(pipe)
    items = [
        f"{key}={NAMED[key].format(x=pipe)}",
        *([] if key == "recipe" else [f"recipe={recipe}"]),
    ]
    lines = [line for line in refusal("train", items).splitlines() if line.startswith("kd-")]
    assert len(lines) == 1 and "KD_TRACEBACK" not in lines[0], lines
    assert any(str(place) in lines[0] for place in (pipe, pipe.resolve())), lines


def test_a_run_in_a_bucket_is_fetched_only_if_it_fits_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.setenv("KD_CACHE", str(tmp_path))
    url = "memory://food/tiny/000"
    store.pipe(
        {
            "/food/tiny/000/config.yaml": b"recipe: tiny\n",
            "/food/tiny/000/records/x.jsonl": bytes(2000),
        }
    )
    try:
        with monkeypatch.context() as few:
            few.setattr(run_urls, "MOST_FILES", 1)
            with refuses(r"run: .* has 2 files, at most 1 are fetched"):
                run_urls.run_at(url)
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda path: usage)
            with refuses(r"run: .* has 0 MB to fetch, .* has room for 0 MB"):
                run_urls.run_at(url)
        assert (run_urls.run_at(url) / "records" / "x.jsonl").stat().st_size == 2000
    finally:
        store.rm("/food", recursive=True)

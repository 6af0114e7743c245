"""What lies in place of a run's files: links, hard links, pipes, devices, sockets, folders, files of 20 GB.

The files are those of a real run, so a new one is covered. Every command that reads or writes them ends with status 0,
or with status 2 and one line; it never hangs, takes no memory for what a file only claims, and leaves alone what is
outside. The commands run in forked processes, one for each kind of intruder, which have a time limit.
"""

import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from kd.cli import main
from tests._files import json_lines, read_json, write_json
from tests._helpers import StopwatchHere, draw_folder, save_teacher, write_recipe

HUGE = 20 * 2**30  # bytes that a sparse file claims
MORE_MEMORY = 2 * 2**30  # bytes that the commands may need
LIMIT_S = 240  # of all cases of one kind


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has every file: trained with an audit, evaluated, exported, reported."""
    root = tmp_path_factory.mktemp("places")
    data, weights = draw_folder(root / "data", train=4), save_teacher(root / "teacher.safetensors")
    file = write_recipe(root / "tiny.yaml", data, weights, monitor={"health_every": 1})
    more = [
        "config=audit",
        "trainer.max_epochs=1",
        "trainer.log_every_n_steps=1",
        "trainer.logger=CSVLogger",
    ]
    assert main("train", [f"recipe={file}", *more]) == 0
    run = root / "runs" / "tiny" / "000"
    (run / "monitor").write_text("on")
    assert (
        main("export", [str(run), "to=onnx"]) == 0
    )  # what kd-serve would make, and kd-latency times
    for command in COMMANDS:
        if command != "resume":
            assert call(command, run)[0] == 0
    return run


@pytest.fixture(scope="module")
def reached(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By command the names in the run's folder that it opens, makes, renames or removes; by a fork, as a hook stays."""
    root = tmp_path_factory.mktemp("reached")
    status, _ = forked(lambda: write_json(root / "names.json", touched(made, root / "c")), LIMIT_S)
    assert status == 0
    return read_json(root / "names.json")


def _items(command: str, run: Path) -> tuple[str, list[str]]:
    pictures = run.parents[2] / "data" / "val" / "apple"
    return {
        "report": ("report", [str(run)]),
        "card": ("card", [str(run), "license=mit", "teacher_license=mit", "data_license=mit"]),
        "runs": ("runs", [str(run.parent)]),
        "eval": ("eval", [str(run)]),
        "predict": ("predict", [str(run), str(pictures), f"out={run / 'predicted.csv'}"]),
        "export": ("export", [str(run), "to=backbone"]),
        "latency": ("latency", [str(run), "batch=1", "threads=1", "seconds=0.01"]),
        "serve": ("serve", [str(run), "port=0", "threads=1"]),
        "resume": ("train", [f"resume={run}", "trainer.max_epochs=2"]),
    }[command]


SLOW = ("eval", "predict", "export", "latency", "serve", "resume")
COMMANDS = ("report", "card", "runs", "eval", "predict", "export", "latency", "serve", "resume")


def call(command: str, run: Path) -> tuple[int, str]:
    """Status and messages of a command."""
    program, items = _items(command, run)
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()), ended_at_once():
        status = main(program, items)
    return status, said.getvalue()


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Inside, a server ends as it begins to wait for requests, and models are timed in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kd.ship.latency.Stopwatch", StopwatchHere)
        patch.setattr("kd.ship.serving.run.serve", lambda server, listening: None)
        yield


# -- intruders: (place, a file outside with what was there) -> what is in the place -----------------------------------


def link(place: Path, outside: Path) -> None:
    place.symlink_to(outside)


def dangling_link(place: Path, outside: Path) -> None:
    place.symlink_to(outside.with_name("nothing"))


def hard_link(place: Path, outside: Path) -> None:
    place.hardlink_to(outside)


def pipe(place: Path, outside: Path) -> None:
    os.mkfifo(place)


def device(place: Path, outside: Path) -> None:
    place.symlink_to("/dev/zero")


def unix_socket(place: Path, outside: Path) -> None:
    short = Path(f"/tmp/kd-{os.getpid()}.socket")  # a socket's path has 107 characters at most
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(short))
    shutil.move(short, place) if short.stat().st_dev == place.parent.stat().st_dev else os.mkfifo(
        place
    )
    short.unlink(missing_ok=True)


def folder(place: Path, outside: Path) -> None:
    place.mkdir()
    (place / "inner").write_text("kept")


def sparse_file(place: Path, outside: Path) -> None:
    with place.open("wb") as file:
        file.truncate(HUGE)


def plain_file(place: Path, outside: Path) -> None:
    place.write_text("no folder\n")


SAME_CONTENT = (link, hard_link)  # all files of a run at once: what is read is what it was
OF_FILES = (dangling_link, pipe, device, unix_socket, folder, sparse_file)
OF_FOLDERS = (link, dangling_link, pipe, device, plain_file)


# -- cases ------------------------------------------------------------------------------------------------------------


class Case:
    """A copy of the run with intruders in some places; what is outside of it is compared afterwards."""

    def __init__(self, made: Path, root: Path) -> None:
        shutil.rmtree(root, ignore_errors=True)
        self.run = Path(shutil.copytree(made, root / "runs" / "tiny" / "000"))
        (root / "data").symlink_to(made.parents[2] / "data")
        self.outside = root / "outside"
        self.outside.mkdir()

    def put(self, intrude: Callable[[Path, Path], None], name: str) -> None:
        place = self.run / name
        outside = self.outside / name.replace("/", "_")
        place.rename(outside)
        intrude(place, outside)

    def problems(self, command: str) -> list[str]:
        before = state(self.outside)
        start = time.monotonic()
        try:
            status, said = call(command, self.run)
        except BaseException:
            return [f"raised {traceback.format_exc()[-600:]}"]
        lines = [
            line for line in said.splitlines() if line.startswith("kd-") and "warning:" not in line
        ]
        found: list[str] = []
        if (
            status not in (0, 2)
            or "Traceback" in said
            or "MemoryError" in said
            or "KD_TRACEBACK" in said
        ):
            found.append(f"status {status}: {said[-400:]}")
        if status == 2 and (len(lines) != 1 or str(self.run.name) not in lines[0]):
            found.append(f"{len(lines)} lines: {said[-400:]}")
        if state(self.outside) != before:
            found.append("what is outside has changed")
        if time.monotonic() - start > 60:
            found.append(f"took {time.monotonic() - start:.0f} s")
        return found


def state(folder: Path) -> dict[str, object]:
    """Kind and content of everything below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.is_file() and path.stat().st_size < HUGE
        else ""
        for path in folder.rglob("*")
    }


def touched(made: Path, root: Path) -> dict[str, list[str]]:
    names: set[str] = set()

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if event.split(".")[0] in ("open", "os", "shutil"):
            names.update(
                Path(os.fsdecode(a)).name
                for a in arguments
                if isinstance(a, (str, bytes, os.PathLike))
            )

    sys.addaudithook(listen)
    found = {}
    for command in COMMANDS:
        run = Case(made, root).run
        names.clear()
        assert call(command, run)[0] == 0
        found[command] = sorted({name.removesuffix(".part") for name in names})
    return found


def cases(
    made: Path,
    reached: dict[str, list[str]],
    intrude: Callable[[Path, Path], None],
    of: str,
    every: bool,
) -> Iterator[tuple[str, list[str]]]:
    """Command and places of each case; without ``every`` a slow command meets a file with one kind alone."""
    is_place = Path.is_dir if of == "folders" else Path.is_file
    places = sorted(str(path.relative_to(made)) for path in made.rglob("*") if is_place(path))
    kinds = OF_FOLDERS if of == "folders" else OF_FILES
    for command in COMMANDS:
        if of == "files" and intrude in SAME_CONTENT:
            yield command, places
            continue
        for number, name in enumerate(places):
            its_turn = (
                every
                or command not in SLOW
                or intrude is link
                or number % len(kinds) == kinds.index(intrude)
            )
            if Path(name).name in reached[command] and its_turn:
                yield command, [name]


Cases = list[tuple[str, list[str]]]


def run_cases(
    made: Path, root: Path, intrude: Callable[[Path, Path], None], them: Cases, log: Path
) -> None:
    """Writes each case to ``log`` before it begins, and each problem."""
    with log.open("w") as written:
        for command, places in them:
            case = Case(made, root)
            for name in places:
                case.put(intrude, name)
            where = f"{command} with {intrude.__name__} at {places[0] if len(places) == 1 else 'every file'}"
            print(json.dumps({"case": where}), file=written, flush=True)
            for problem in case.problems(command):
                print(json.dumps({"problem": f"{where}: {problem}"}), file=written, flush=True)
        print(json.dumps({"end": True}), file=written, flush=True)


def forked(work: Callable[[], None], limit_s: float) -> tuple[int, int]:
    """The status of a forked process, killed after ``limit_s``, and the most memory that it had, in bytes."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MORE_MEMORY, size + 2 * MORE_MEMORY))
            work()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL, 0


ALL = [("files", kind) for kind in (*SAME_CONTENT, *OF_FILES)] + [
    ("folders", kind) for kind in OF_FOLDERS
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"]
)
@pytest.mark.parametrize(
    ("of", "intrude"), ALL, ids=lambda x: x if isinstance(x, str) else x.__name__
)
def test_nothing_in_a_runs_folder_leads_out_of_it(
    of: str,
    intrude: Callable[[Path, Path], None],
    every: bool,
    made: Path,
    reached: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    them = list(cases(made, reached, intrude, of, every))
    assert len(them) >= len(COMMANDS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    status, memory = forked(lambda: run_cases(made, tmp_path / "c", intrude, them, log), LIMIT_S)
    lines = json_lines(log)
    problems = [line["problem"] for line in lines if "problem" in line]
    assert not problems, "\n".join(problems)
    assert status == 0 and "end" in lines[-1], f"status {status} at {lines[-1]}"
    assert memory < before + MORE_MEMORY

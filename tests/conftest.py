"""Fixtures. The tests' cache folder is their own, so that the user's is neither read nor written.

What takes seconds to import is imported by the fixtures: pytest-xdist's first process reads this file as well, and its
workers wait for it.
"""

import functools
import gc
import inspect
import os
import shutil
import sys
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

from tests._clock import HandClock, OwnTime

# Each of the tests' processes would compile kd's 300 files again. A process started by them finds the variable too.
gc.disable()
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A fork never frees what is garbage of this process: ONNX Runtime's sessions would wait for their threads, which no fork
# has. Which test's fork collected first was chance.
os.register_at_fork(after_in_child=gc.freeze)


FAST = ("losses", "report", "tasks", "test_house.py", "test_doors.py", "run/test_keys.py")
"""Folders and files below ``tests/`` whose tests ``pytest -m fast`` runs."""
LONG = {"main", "train_main", "eval_main", "run", "trained", "subprocess", "Popen", "BROWSER"}
"""Names that a test, or a fixture of it, reads where it trains, or starts a process or a browser: it is not fast."""


def is_fast(item: pytest.Item) -> bool:
    """Whether a test is in a place of :data:`FAST`, is not slow, trains nothing and has no process of its own."""
    root = Path(__file__).parent
    if not isinstance(item, pytest.Function) or not item.path.is_relative_to(root):
        return False
    if item.get_closest_marker("slow") or not str(item.path.relative_to(root)).startswith(FAST):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(fixture.func for each in fixtures for fixture in each)]
    return not any(LONG & {*inspect.unwrap(f).__code__.co_names} for f in functions)


class Collection:
    """What pytest doesn't read: a module is imported and searched for its examples only where it has one."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        """Leaves out a module's examples where its text has none."""
        found = yield
        if file_path.suffix == ".py" and ">>>" in file_path.read_text():
            return found
        return [each for each in found if not isinstance(each, DoctestModule)]


def pytest_configure(config: pytest.Config) -> None:
    """Where ``-m fast`` names no path, only the places of :data:`FAST` are read."""
    config.pluginmanager.register(Collection())
    if config.option.markexpr == "fast" and config.args_source is config.ArgsSource.TESTPATHS:
        config.args = [str(Path(__file__).parent / place) for place in FAST]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that :func:`is_fast` names, before pytest's own ``-m`` reads the marks; the longest begins first."""
    items.sort(key=lambda item: "test_situations" not in item.nodeid)
    for item in items:
        if is_fast(item):
            item.add_marker("fast")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are cores: tests wait for processes, signals and time limits, too."""
    return (os.cpu_count() or 1) + 2


def pytest_collection_finish() -> None:
    """What is imported by now is never garbage: to search it again and again took a seventh of the tests' time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 10, 10)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    import torch
    from lightning_fabric.utilities import registry
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from kd.run import cascade
    from tests._exports import traced_once

    os.environ["KD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    # Lightning raises the number of threads where the variable is unset, and a forked run that uses more threads than
    # its parent hangs in GNU OpenMP.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Each of a run's 24 files is forced to the disk, milliseconds each, against a power cut, which no test makes.
    os.fsync = lambda handle: None
    # Seconds for which a cascade's models are timed: what the time is no test asks.
    cascade.SECONDS = 0.05
    # Each run reads the entry points of every installed package.
    registry.entry_points = functools.cache(registry.entry_points)
    # Each export to ONNX parses the source of 500 functions, half a second of two.
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    torch.onnx.export = traced_once(torch.onnx.export)
    # A loader's worker looks every 5 s whether its parent is gone or has no work left: many tests would wait for it.
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = (
        1.0  # how long the loader waits for it at the end
    )


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, empty: ``tmp_path / "cache"``."""
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hand_clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """What the test measures is measured by a clock that only ``time.sleep`` moves; no wait for a core counts."""
    monkeypatch.setattr("kd.clock.Clock._ready_ms", lambda self: 0.0)
    return HandClock(monkeypatch)


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> OwnTime:
    """What the test measures is its own computing and its sleeps, however busy the machine is."""
    monkeypatch.setattr("kd.clock.Clock._ready_ms", lambda self: 0.0)
    return OwnTime(monkeypatch)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ImageFolder of 4 classes, 48 training and 16 validation pictures."""
    from tests._helpers import draw_folder

    return draw_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher's checkpoint for them (random weights: what it knows is not tested here)."""
    from tests._helpers import save_teacher

    return save_teacher(tmp_path_factory.mktemp("teacher") / "teacher.safetensors", seed=1)


@pytest.fixture()
def recipe(tmp_path: Path, pictures: Path, teacher: Path) -> Path:
    """A recipe file for the tiny pair; runs go below ``tmp_path / "runs"``."""
    from tests._helpers import write_recipe

    return write_recipe(tmp_path / "tiny.yaml", pictures, teacher)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny pair; its views (40 px) are larger than its models' input (32 px)."""
    from kd.cli import main
    from tests._helpers import draw_folder, save_teacher, write_recipe

    root = tmp_path_factory.mktemp("finished")
    data, weights = draw_folder(root / "data"), save_teacher(root / "teacher.safetensors")
    file = write_recipe(root / "tiny.yaml", data, weights, data__img_size=40)
    assert main("train", [f"recipe={file}", "trainer.max_epochs=1"]) == 0
    return root / "runs" / "tiny" / "000"


@pytest.fixture()
def with_test(finished: Path, tmp_path: Path) -> Path:
    """The finished run's pictures beside a test split of others, and a copy of the run as training left it."""
    from tests._helpers import draw_folder

    data = tmp_path / "data"
    shutil.copytree(finished.parents[2] / "data", data)
    other = draw_folder(tmp_path / "other", train=8, val=16, size=44)
    shutil.copytree(other / "val", data / "test")
    run = tmp_path / "run"
    shutil.copytree(
        finished,
        run,
        ignore=shutil.ignore_patterns("eval_*", "looks.json", "cascade.json", "export"),
    )
    return run


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real photographs and weights, where ``KD_SHARED`` names one."""
    if "KD_SHARED" not in os.environ:
        pytest.skip("KD_SHARED is not set")
    return Path(os.environ["KD_SHARED"])


@pytest.fixture()
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Sequence[str]], str]:
    """Runs a command (``train``, its words), which must end with status 2: what it says on the error stream."""
    from kd.cli import main

    def refused(command: str, words: Sequence[str]) -> str:
        assert main(command, words) == 2
        return capsys.readouterr().err

    return refused


@pytest.fixture()
def prints(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Sequence[str]], str]:
    """Runs a command (``train``, its words), which must end with status 0: what it says on the output."""
    from kd.cli import main

    def ran(command: str, words: Sequence[str]) -> str:
        capsys.readouterr()
        assert main(command, words) == 0
        return capsys.readouterr().out

    return ran


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[str]:
    """The address of an S3 server of this machine, whose buckets go by a request."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from tests._bucket import s3_server

    with s3_server() as address:
        yield address


@pytest.fixture()
def s3(_s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket on an S3 server of this machine."""
    import s3fs

    from tests._bucket import KEYS

    for name, value in {"AWS_ENDPOINT_URL": _s3_server, **KEYS}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # of the server of another test
    s3fs.S3FileSystem().mkdir("food")
    yield "s3://food"
    urllib.request.urlopen(
        urllib.request.Request(f"{_s3_server}/moto-api/reset", method="POST"), timeout=60
    ).close()

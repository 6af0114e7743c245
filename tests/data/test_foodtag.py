"""FoodTag-mini: the same pictures everywhere, and a folder that is either complete or drawn again."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kd import progress
from kd.data.sources import FoodTagCalories, FoodTagMini, foodtag
from kd.data.sources.foodtag import drawing_program
from tests._helpers import refuses

build, draw, portion_of = (
    drawing_program().build,
    drawing_program().draw,
    drawing_program().portion_of,
)
CLASSES, SIZE, VERSION = (
    drawing_program().CLASSES,
    drawing_program().SIZE,
    drawing_program().VERSION,
)
SMALL = {"train": 2, "val": 1}
PROGRAM = (
    "import sys; from pathlib import Path; from kd.data.sources.foodtag import drawing_program; "
)
PROGRAM += (
    "print(drawing_program().build(Path(sys.argv[1]), {'train': int(sys.argv[2]), 'val': 1}))"
)


def start(cache: Path, train: int = 2) -> subprocess.Popen[str]:
    """Another process that builds the set."""
    command = [sys.executable, "-c", PROGRAM, str(cache), str(train)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def contents(root: Path) -> dict[str, str]:
    """Every file below a folder with its sum."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 2 training pictures and 1 validation picture a class; the damage tests leave it intact."""
    return build(tmp_path_factory.mktemp("first"), SMALL)


def test_layout_and_sums(first: Path) -> None:
    files = contents(first)
    assert len(files) == len(CLASSES) * 3 + 1
    assert sorted(path.name for path in (first / "train").iterdir()) == sorted(CLASSES)
    assert sorted(path.name for path in (first / "val").iterdir()) == sorted(CLASSES)
    lines = (first / "SHA256SUMS").read_text().splitlines()
    assert {line[66:]: line[:64] for line in lines} == {
        k: v for k, v in files.items() if k != "SHA256SUMS"
    }
    assert len(set(files.values())) == len(files), "two pictures are the same"


def test_without_a_terminal_progress_is_a_line_every_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "CALM", 0.05)
    build(tmp_path, SMALL | {"train": 6})
    told = capfd.readouterr().err
    assert "\r" not in told
    assert 1 <= len(told.splitlines()) <= 100
    assert all(line.startswith("drawing FoodTag-mini") for line in told.splitlines())


def test_two_builds_are_byte_identical(first: Path, tmp_path: Path) -> None:
    assert contents(build(tmp_path, SMALL)) == contents(first)


def test_a_larger_set_holds_the_smaller_one(first: Path, tmp_path: Path) -> None:
    larger, smaller = contents(build(tmp_path, SMALL | {"train": 3})), contents(first)
    assert {k: v for k, v in smaller.items() if k != "SHA256SUMS"}.items() <= larger.items()


def test_classes_are_drawn_by_functions_of_their_names() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == len(drawing_program().FOODS) == 20
    assert tuple(CLASSES) == tuple(sorted(CLASSES))


@pytest.mark.parametrize("label", range(len(CLASSES)), ids=CLASSES)
def test_pictures_differ_within_and_between_classes(label: int) -> None:
    one, other = (np.asarray(draw(label, seed), dtype=np.float32) for seed in (0, 1))
    neighbour = np.asarray(draw((label + 1) % len(CLASSES), 0), dtype=np.float32)
    assert one.shape == (SIZE, SIZE, 3)
    assert one.std() > 10
    assert np.abs(one - other).mean() > 8
    assert np.abs(one - neighbour).mean() > 8


def test_draw_neither_reads_nor_moves_global_generators() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    one = draw(3, 7).tobytes()
    after = random.random(), np.random.random()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert after == (random.random(), np.random.random())  # noqa: NPY002
    assert draw(3, 7).tobytes() == one


def test_intact_set_is_left_alone(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    assert build(first.parent, SMALL) == first
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    assert capsys.readouterr().err == ""


# a file that is not there has no sum, as a changed one has another; what is not listed is a file or a folder
@pytest.mark.parametrize("damage", ["changed", "sums", "folder"])
def test_damage_is_named_and_repaired(
    first: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(first)
    victim = sorted((first / "train" / CLASSES[4]).iterdir())[0]
    if damage == "changed":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(bytes(data))
    elif damage == "folder":
        victim = first / "train" / "aaa"
        victim.mkdir()
    else:
        victim = first / "SHA256SUMS"
        victim.write_text("")
    build(first.parent, SMALL)
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(said) == 1
    assert str(victim) in said[0]
    assert contents(first) == before
    assert not (first / "train" / "aaa").exists()


def test_two_processes_at_once_give_one_set(first: Path, tmp_path: Path) -> None:
    both = [start(tmp_path) for _ in range(2)]
    roots = {process.communicate(timeout=240)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert roots == {str(tmp_path / first.name)}
    assert contents(tmp_path / first.name) == contents(first)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [first.name]


@pytest.mark.skipif(os.name != "posix", reason="kills a process group")
def test_interrupted_build_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start(tmp_path, 200)
    name = f"foodtag-mini-{VERSION}-200x1"
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(f"{name}.tmp-*/train/*/*.jpg")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / name).exists()
    left = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert left and all(".tmp-" in folder for folder in left)
    # The next build of the same set clears it away; here of a small one of the same name, to be quick.
    (tmp_path / left[0]).rename(tmp_path / left[0].replace("200x1", "2x1"))
    root = build(tmp_path, SMALL)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [root.name]


@pytest.mark.parametrize("kind", [FoodTagMini, FoodTagCalories])
def test_a_test_split_is_drawn_when_it_is_read_and_shares_no_picture(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path))
    monkeypatch.setattr(foodtag, "TEST_PER_CLASS", 1)
    source = kind(train_per_class=1, val_per_class=1)
    source.load("val")
    assert not list(tmp_path.glob("*test*"))
    test = source.load("test")
    assert source.has("test") and len(test.targets) == len(CLASSES)
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.rglob("*.jpg")]
    assert len(set(sums)) == len(sums) == 3 * len(CLASSES)
    with refuses("split: FoodTag has the splits .*, got 'other'"):
        source.load("other")


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="train_per_class"):
        FoodTagMini(0)


def test_drawing_needs_no_torch() -> None:
    program = "import sys, kd.data.sources.foodtag as f; f.drawing_program(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_pictures_are_those_of_this_version() -> None:
    """A picture of each class, and a portion of each, to the byte: another sum needs another ``VERSION``."""
    pixels = hashlib.sha256()
    for label in range(len(CLASSES)):
        pixels.update(draw(label, 7).tobytes())
        pixels.update(draw(label, 8, portion_of(label, 8)).tobytes())
    assert (VERSION, pixels.hexdigest()) == (
        "v1",
        "363da7a299f9626e36460f06c9c73126f05efc069d68bd32ce6aa85a854778d0",
    )

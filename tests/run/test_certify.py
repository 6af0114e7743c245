"""``kd-eval margin=``: which pictures may certify a run, what is counted, and the words."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kd
from kd.cli import main
from kd.report.tables import Table, results_of
from kd.run.eval_options import EvalOptions
from tests._files import read_json
from tests._helpers import Command, other_weights


def test_a_run_is_certified_on_test_and_each_look_is_counted(
    with_test: Path, prints: Command
) -> None:
    root = f"data.source.root={with_test.parent / 'data'}"
    out = prints("eval", [str(with_test), "margin=40", root])
    assert "the student not worse than the teacher by more than 40 points of accuracy: " in out
    assert "split test: measured once for this run (looks.json)" in out
    found = read_json(with_test / "eval_test.json")
    certificate = found["certificate"]
    assert certificate["pictures"] == found["pictures"] == 64
    counts = [certificate[k] for k in ("both_right", "only_reference", "only_candidate")]
    assert sum(counts) + certificate["both_wrong"] == 64
    assert (counts[0] + counts[2]) / 64 == pytest.approx(found["student"]["acc1"])
    assert (counts[0] + counts[1]) / 64 == pytest.approx(found["teacher"]["acc1"])
    assert certificate["shown"] == (certificate["largest_loss"] <= 0.4)
    # other figures of the same student leave the certificate on page and card
    assert main("eval", [str(with_test), "split=test", root]) == 0
    assert main("eval", [str(with_test), "cascade=true", "share=0.5", root]) == 0
    results = results_of(with_test, print)
    (table,) = results["certificate_test"]
    assert isinstance(table, Table) and table.title.endswith("split test")
    assert [row[0] for row in table.rows] == certificate["text"]
    assert len(results["cascade"]) == 3
    other_weights(with_test)
    assert not results_of(with_test, print)
    again = kd.evaluate(with_test, {"margin": 40, "data.source.root": with_test.parent / "data"})
    assert again["certificate"]["looks"] == 4
    assert again["certificate"]["students"] == 2


def test_of_two_runs_the_looks_of_both_are_named(with_test: Path, prints: Command) -> None:
    other = with_test.parent / "twin"
    shutil.copytree(with_test, other)
    root = f"data.source.root={with_test.parent / 'data'}"
    assert main("eval", [str(with_test), "split=test", root]) == 0
    out = prints("eval", [str(with_test), str(other), "margin=40", root])
    assert f"split test: measured 2 times for {with_test} (looks.json)" in out
    assert f"split test: measured once for {other} (looks.json)" in out


def test_pictures_that_chose_the_student_guarantee_nothing(
    with_test: Path, prints: Command, refusal: Command
) -> None:
    """They are refused where nobody has typed that they count (more: :mod:`tests.run.test_at_once`)."""
    words = [
        str(with_test),
        "margin=1",
        f"data.source.root={with_test.parent / 'data'}",
        "split=val",
    ]
    hint = "so they can't certify it: type split=test, or folder=DIR (DIR/<class>/*.jpg;"
    assert hint in refusal("eval", words)
    caution = "no guarantee for new pictures: these chose the student's epoch"
    assert caution in prints("eval", [*words, "despite_choice=true"])


def test_a_test_folder_that_serves_as_val_has_chosen_too(with_test: Path, refusal: Command) -> None:
    data = with_test.parent / "data"
    shutil.rmtree(data / "val")
    err = refusal("eval", [str(with_test), "margin=1", f"data.source.root={data}"])
    assert "chose the best epoch" in err
    assert "so they can't certify it: type folder=DIR (DIR/<class>/*.jpg;" in err


def test_training_pictures_certify_nothing_where_some_of_them_were_held_out(
    with_test: Path, refusal: Command
) -> None:
    """The run's splits are parts of one folder then, and a folder with their files shares pictures with them."""
    data = with_test.parent / "data"
    shutil.rmtree(data / "val")
    shutil.rmtree(data / "test")
    words = [str(with_test), "margin=1", f"data.source.root={data}", f"folder={data / 'train'}"]
    err = refusal("eval", words)
    assert "folder: can't certify: " in err
    assert " of its 48 pictures are training pictures" in err


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_a_folder_named_as_a_split_leaves_that_splits_figures(name: str) -> None:
    assert EvalOptions(folder=f"pictures/{name}").file == f"eval_folder_{name}.json"


def test_two_students_and_groups(
    with_test: Path, capsys: pytest.CaptureFixture[str], prints: Command
) -> None:
    """Each against the first: the same student again can't be worse; pictures in groups are resampled together."""
    data = with_test.parent / "data"
    same = str(with_test / "student.safetensors")
    words = [str(with_test), same, "margin=12", f"data.source.root={data}"]
    out = prints("eval", words)
    assert "student.safetensors not worse than " in out
    assert "by more than 12 points of accuracy: shown: it loses at most 4.6 points" in out
    assert "how the weights were chosen is not known" in out
    for pattern, status in (("/([^/]*)/[^/]*$", 2), (r"([^/]+/\d+)\.\w+$", 0)):
        words = [str(with_test), "margin=12", f"data.source.root={data}", f"groups={pattern}"]
        assert main("eval", words) == status
    assert "needs 20 groups of pictures or more" in capsys.readouterr().err


def test_looks_of_two_processes_at_once_are_both_counted(with_test: Path) -> None:
    """Each read the file, added its look and wrote it: the later one took the other's away."""
    code = (
        "import pathlib; from types import SimpleNamespace as Of; from kd.run import certify;"
        f"run = pathlib.Path({str(with_test)!r});"
        f"root = {str(with_test.parent / 'data')!r};"
        "from kd.data.sources import ImageFolder; pictures = ImageFolder(root).load('test');"
        "data = Of(splits=Of(listed=lambda place: [pictures])); subject = Of(run=run, data=data);"
        "print(1, flush=True); input();"
        "[certify.count_look(subject, 'test', 'kd-eval') for _ in range(40)]"
    )
    before = 0
    if (with_test / "looks.json").is_file():
        before = len(read_json(with_test / "looks.json")["looks"])
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        process.stdout.readline()
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait() for process in both] == [0, 0]
    assert len(read_json(with_test / "looks.json")["looks"]) == before + 80


def test_each_picture_is_looked_up_once(with_test: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training pictures were listed anew for each judged one: hours for a million of them."""
    data = f"data.source.root={with_test.parent / 'data'}"
    real = os.path.realpath
    calls: list[str] = []

    def counted(path: str, **options: bool) -> str:
        calls.append(str(path))
        return real(path, **options)

    monkeypatch.setattr("kd.run.certify.os.path.realpath", counted)
    assert main("eval", [str(with_test), "margin=40", data]) == 0
    pictures = [call for call in calls if call.endswith(".jpg") and "/data/" in call]
    assert 0 < len(pictures) <= 3 * len(set(pictures))

"""Odd command lines and files from elsewhere: each ends in one line, with exit status 2, and nothing is written."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kd import progress as _bar
from kd.cli import kd_main, main
from kd.commands import pack
from kd.errors import RunError
from kd.run.request import Request
from tests._files import read_yaml, write_yaml
from tests._helpers import ROOT, Command, write_recipe
from tests._runs import resumed, run_of

CALLBACK = """\
from pytorch_lightning import Callback

class Mine(Callback):
    pass
"""


def test_own_classes_in_own_files_and_trusted_ones_elsewhere(
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Command,
) -> None:
    (tmp_path / "own_classes.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = write_recipe(
        tmp_path / "r.yaml", pictures, teacher, trainer__callbacks=["own_classes.Mine"]
    )
    line = [f"recipe={recipe}", "config=debug"]
    foreign = "r.yaml: trainer.callbacks names own_classes.Mine, which is not among"
    assert foreign in refusal("train", line)
    for trust in ("--trust", "trust=own_classes"):
        assert main("train", [*line, trust, "--print_config"]) == 0
    monkeypatch.chdir(tmp_path)  # a recipe of one's own checkout
    assert main("train", line) == 0
    run = tmp_path / "runs" / "tiny" / "000"
    resumed(run, "trainer.max_epochs=2", "--print_config")  # a run of one's own
    config = read_yaml(run / "config.yaml")
    write_yaml(run / "config.yaml", {**config, "seed": 1})  # no longer what was started here
    assert "config.yaml: trainer.callbacks names own_classes.Mine" in refusal("eval", [str(run)])


def test_a_recipe_without_a_name_takes_its_files(
    tmp_path: Path, pictures: Path, prints: Command
) -> None:
    recipe = write_recipe(tmp_path / "mine.yaml", pictures, None)
    content = yaml.safe_load(recipe.read_text())
    del content["recipe"]
    write_yaml(recipe, content)
    assert (
        yaml.safe_load(prints("train", [f"recipe={recipe}", "--print_config"]))["recipe"] == "mine"
    )


def test_a_traceback_for_those_who_ask(tmp_path: Path) -> None:
    code = "import kd.commands.pack as p; p.run = lambda r: 1 / 0; from kd.cli import main; exit(main('pack', []))"
    (tmp_path / "input/config").mkdir(parents=True)
    env = {"PATH": "", "PYTHONPATH": str(ROOT), "SAGEMAKER_BASE_DIR": str(tmp_path)}
    for asked, status in (({}, 2), ({"KD_TRACEBACK": "1"}, 1)):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env | asked, capture_output=True, text=True)
        assert done.returncode == status
        assert "ZeroDivisionError" in done.stderr
        assert ("KD_TRACEBACK" in done.stderr, done.stderr.count("\n") > 1) == (
            not asked,
            bool(asked),
        )
    told = tmp_path / "output/failure"
    assert told.read_text() == "ZeroDivisionError: division by zero\n"


def test_a_failure_without_a_runs_folder_is_status_1_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(request: Request) -> int:
        raise RunError("data.num_workers: no shared memory is left")

    monkeypatch.setattr(pack, "run", fail)
    assert main("pack", []) == 1
    assert capsys.readouterr().err == "kd-pack: data.num_workers: no shared memory is left\n"


def test_taps_and_teachers_one_field_at_a_time(
    recipe: Path, teacher: Path, prints: Command
) -> None:
    taps = [
        "model.taps.at.student=blocks.0",
        "model.taps.at.teacher=blocks.1",
        "model.distill_losses.at=ATLoss",
    ]
    other = [
        "model.teacher=null",
        "model.teachers.a.arch=resnet18",
        "model.teachers.a.kwargs.drop_rate=0.1",
    ]
    for items, key, want in (
        (taps, "taps", {"at": {"student": "blocks.0", "teacher": "blocks.1", "tokens": "patch"}}),
        ([*taps, "model.taps={at: {student: norm, teacher: norm}}"], "taps", None),
        (other, "teachers", None),
    ):
        found = yaml.safe_load(prints("train", [f"recipe={recipe}", *items, "--print_config"]))[
            "model"
        ][key]
        assert found == want if want else found
    assert found["a"]["kwargs"] == {"drop_rate": 0.1}


def test_output_that_is_no_terminal_is_lines(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("train", [f"recipe={recipe}", "preflight=warn"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line[:9] for line in lines if line.startswith("epoch")] == ["epoch   1", "epoch   2"]
    assert not [line for line in lines if "\r" in line or "%|" in line]
    run = run_of(recipe)
    assert main("train", [f"resume={run}/checkpoints/last.ckpt", "trainer.max_epochs=3"]) == 0
    assert "epoch   3" in capsys.readouterr().err


def test_a_long_bar_is_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    clock = iter(range(0, 1000, 3))
    made = _bar.bar(range(12), label="waiting", total=12)
    monkeypatch.setattr(made, "_time", lambda: made.start_t + next(clock))
    for _ in made:
        pass
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 5
    assert all(line.startswith("waiting") for line in lines)


def test_kd_alone_lists_the_commands_and_runs_each(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert kd_main([]) == 0
    listed = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert listed[0] == "train" and {f"kd-{name}" for name in listed} == set(scripts) - {"kd"}
    assert kd_main(["runs", "--help"]) == main("runs", ["--help"]) == 0
    first, second = capsys.readouterr().out.split("kd-runs: ")[1:]
    assert first == second
    assert kd_main(["exprot"]) == 2
    assert "kd: no command 'exprot'; did you mean 'kd export'?" in capsys.readouterr().err


def test_a_batch_of_one_before_batchnorm_is_named_by_its_key(
    tmp_path: Path, pictures: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A map of one pixel has no variance over a single picture: kd's words, in place of torch's."""
    student = {"arch": "resnet10t", "img_size": 32}
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher, model__student=student)
    items = [f"recipe={recipe}", "data.batch_size=1", "trainer.max_steps=1"]
    assert main("train", items) == 1
    error = capsys.readouterr().err
    assert "kd-train: failed: data.batch_size: must be >= 2 in each process" in error
    assert "Expected more than 1 value" not in error


def test_a_cache_folder_that_cannot_be_made_names_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Command
) -> None:
    """A command that keeps something there says where, why, and by what to name another place."""
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for folder in (taken, taken / "below"):
        monkeypatch.setenv("KD_CACHE", str(folder))
        line = (
            refusal("train", ["recipe=foodtag_vit", f"runs_dir={tmp_path / 'runs'}"])
            .strip()
            .splitlines()[-1]
        )
        assert line.startswith(f"kd-train: KD_CACHE: kd's cache folder {folder} can't be written")
        assert "KD_CACHE=DIR before the command" in line
    assert not (tmp_path / "runs").exists()

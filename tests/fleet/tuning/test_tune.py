"""``kd-tune``: real trials, stops and kills, what is found, and what is refused before anything is written."""

import csv
import ctypes
import os
import pickle
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests._runs import run_of

pytest.importorskip("optuna")

from kd.cli import main, train_main
from kd.errors import needs_extra
from kd.fleet.tuning import search
from kd.fleet.tuning import study as studies
from kd.fleet.tuning.confirm import compared
from kd.fleet.tuning.plan import plan
from kd.fleet.tuning.space import space_of
from kd.fleet.tuning.study import PRUNERS, Study
from kd.fleet.tuning.trials import deal
from kd.run.request import Request
from tests._files import json_lines, read_json, read_yaml, write_yaml
from tests._forks import ForkedRun, start, status_of, wait_until
from tests._helpers import ROOT, Command, run_cli
from tests._runs import disturb, summary_of
from tests._searches import of, trial_processes, trials

LOSS = "search.model.distill_losses.kd"
QUIET = ["trainer.precision=32-true", "trainer.max_epochs=2"]


@pytest.fixture(autouse=True)
def _forked_trials(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "slow" not in request.keywords:
        monkeypatch.setattr("kd.fleet.tuning.trials.start_kd_train", ForkedRun)


def small_disk(where: Path) -> None:
    """A disk of 40 kB, seen by this process and its children; exit status 77 where that is not allowed."""
    libc = ctypes.CDLL(None)
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
        os._exit(77)
    if libc.mount(b"tmpfs", str(where).encode(), b"tmpfs", 0, b"size=40k"):
        os._exit(77)


def test_a_search_that_is_killed_and_stopped_goes_on_and_its_best_is_repeated(recipe: Path) -> None:
    slow = disturb("Slow", seconds=0.05)
    items = [
        f"recipe={recipe}",
        *QUIET,
        slow,
        "trials=3",
        "pruner=none",
        "search.optim.lr=log:1e-4..1e-2",
    ]
    log, folder = recipe.parent / "log", of(recipe)
    pid = start(items, log, program="tune")
    wait_until(lambda: log.exists() and "trial 0: val/acc1" in log.read_text())
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)  # within the second trial
    assert status_of(pid) == -9
    wait_until(lambda: not trial_processes(folder))
    pid = start(items, log, program="tune")
    wait_until(lambda: len(trial_processes(folder)) > 1)
    time.sleep(0.5)
    os.kill(pid, signal.SIGTERM)
    assert status_of(pid) == 143, log.read_text()
    assert not trial_processes(folder)
    assert status_of(start(items, log, program="tune")) == 0, log.read_text()
    ended = trials(folder)
    assert [t.number for t in ended] == [0, 1, 2]
    assert {t.state.name for t in ended} == {"COMPLETE"}
    for trial in ended:  # each step was made once, whatever came between
        with (Path(trial.user_attrs["folder"]) / "metrics.csv").open() as file:
            steps = [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]
        assert steps == list(range(12))
    best = max(ended, key=lambda t: t.value)
    text = (folder / "best.yaml").read_text()
    assert f"val/acc1 {best.value:.6g}" in text.splitlines()[0]
    assert yaml.safe_load(text)["optim"]["lr"] == pytest.approx(best.params["optim.lr"])
    assert (
        train_main([str(folder / "best.yaml"), "trainer.callbacks=null", "trust=tests._stop"]) == 0
    )
    summary = summary_of(run_of(recipe))
    assert summary["student"]["best_val"]["acc1"] == best.value
    assert f"best: kd-train {folder / 'best.yaml'}" in log.read_text()


def test_a_grid_ends_a_failure_is_told_and_two_objectives_make_a_front(
    recipe: Path, prints: Command, refusal: Command
) -> None:
    """Three trials: one loss, and the other one with two values of what only it has."""
    items = [f"recipe={recipe}", "trainer.max_epochs=1", "sampler=grid", "objective=val/acc1,-params", "trials=9",
             f"{LOSS}=[KDLoss, DKDLoss]", f"{LOSS}.beta=[1.0e+39, 8]"]  # fmt: skip
    out = prints("tune", items)
    assert "failed: the loss is " in out
    assert "3 of 9 ended" in out
    study = Study(of(recipe), ["maximize", "minimize"], "grid", "none", 1, 0)
    ended = [(t.state.name, *t.params.values()) for t in study.trials()]
    assert sorted(ended) == [
        ("COMPLETE", "DKDLoss", 8),
        ("COMPLETE", "KDLoss"),
        ("FAIL", "DKDLoss", 1.0e39),
    ]
    assert study.best()
    assert f"optuna-dashboard {of(recipe) / 'journal.log'}" in out
    assert "was begun with optim.lr=0.001, now 0.5; give the same settings" in refusal(
        "tune", [*items, "optim.lr=0.5"]
    )


def test_trials_share_the_teachers_answers(recipe: Path) -> None:
    """The second trial reads them, and ends as a run of its own does that has measured everything itself."""
    items = [f"recipe={recipe}", *QUIET, "model.teacher.cache=on", "model.teacher.cache_views=2",
             "model.student.kwargs.drop_rate=0.2"]  # fmt: skip
    space = ["trials=2", "sampler=grid", "pruner=none", "search.optim.lr=[0.01, 0.001]"]
    assert main("tune", [*items, *space]) == 0
    first, second = (Path(t.user_attrs["folder"]) for t in trials(of(recipe)))
    caches = [summary_of(folder)["cache"] for folder in (first, second)]
    assert [(c["answers_read"] > 0, c["answers_computed"] > 0) for c in caches] == [
        (False, True),
        (True, False),
    ]
    lr = read_yaml(second / "config.yaml")["optim"]["lr"]
    alone = recipe.parent / "alone"
    assert (
        train_main(
            [
                *items,
                f"optim.lr={lr}",
                f"runs_dir={alone}",
                f"model.teacher.cache_dir={alone / 'cache'}",
            ]
        )
        == 0
    )
    assert (alone / "tiny" / "000" / "student.safetensors").read_bytes() == (
        second / "student.safetensors"
    ).read_bytes()
    kinds = [read_json(f / "fidelity.json") for f in (second, alone / "tiny" / "000")]
    assert kinds[0] == kinds[1]


def test_a_poor_trial_is_stopped_early_with_a_checkpoint(recipe: Path) -> None:
    items = [f"recipe={recipe}", "trainer.max_epochs=3", "trials=3", disturb("Slow", seconds=0.1), "sampler=grid",
             "search.optim.lr=[1.0e-9, 0.01, 0.005]"]  # fmt: skip
    assert main("tune", items) == 0
    study = Study(of(recipe), ["maximize"], "tpe", "none", 3, 0)
    stopped = study.trials("pruned")
    assert stopped
    assert all(len(t.intermediate_values) < 3 for t in stopped)
    assert all(
        (Path(t.user_attrs["folder"]) / "checkpoints" / "last.ckpt").is_file() for t in stopped
    )


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in (ROOT / "recipes" / "tune").glob("*.yaml"))
)
def test_spaces_that_ship_with_a_recipe(name: str, refusal: Command) -> None:
    """All values are taken by a run: what is wrong then is the only thing that is."""
    assert "the number of cores, got 9999" in refusal("tune", [f"recipe={name}", "jobs=9999"])


def test_a_difference_is_weighed_against_its_spread() -> None:
    """By hand: differences 2, 3 and 4 have mean 3 and standard error 1/sqrt(3); t of two degrees of freedom is 4.30."""
    text = compared("val/acc1", True, (1, 2, 3), (12.0, 13.0, 14.0), (10.0, 10.0, 10.0))
    assert text.endswith("The difference, +3 ± 2.5 (95 %, paired by seed), survives.")
    assert "does not survive" in compared("val/acc1", True, (1, 2), (3.0, 1.0), (1.0, 1.0))
    assert "is none" in compared("val/loss", False, (1, 2), (3.0, 3.1), (1.0, 1.0))


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_two_searches_in_one_folder_do_not_draw_the_same(tmp_path: Path, sampler: str) -> None:
    """Begun at the same moment, with nothing known yet."""
    space = [space_of("optim.lr", "0.1..0.9")]
    both = [Study(tmp_path, ["maximize"], sampler, "none", 1, 0) for _ in range(2)]
    drawn = [study.ask(space)[1]["optim.lr"] for _ in range(3) for study in both]
    assert len(set(drawn)) == 6


class Planted:
    """Writes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("sampler", studies.SAMPLERS)
def test_no_sampler_unpickles_what_a_journal_holds(sampler: str, tmp_path: Path) -> None:
    """Optuna's CmaEsSampler restores itself from an attribute of the last trial: a journal may be a stranger's."""
    space = [space_of("optim.lr", "[0.1, 0.2, 0.3]"), space_of("data.batch_size", "1..9")]
    study, mark = Study(tmp_path, ["maximize"], sampler, "none", 1, 0), tmp_path / "mark"
    planted = pickle.dumps(Planted(mark)).hex()
    for _ in range(3):
        trial = study.ask(space)[0]
        for prefix in ("cma:", "sepcma:", "cmawm:"):
            study.study._storage.set_trial_system_attr(
                trial._trial_id, f"{prefix}optimizer:0", planted
            )
        study.tell(trial, "complete", [0.5], {})
    assert planted in (tmp_path / "journal.log").read_text()
    again = Study(tmp_path, ["maximize"], sampler, "median", 1, 0)
    for _ in range(3):
        again.ask(space)
    again.best()
    assert not mark.exists()


def test_samplers_and_pruners_do_not_import_pickle() -> None:
    made = [
        *(make(0) for make in studies.SAMPLERS.values()),
        *(make(4) for make in PRUNERS.values()),
    ]
    modules = {sys.modules[kind.__module__] for one in made for kind in type(one).__mro__}
    assert not [module.__name__ for module in modules if hasattr(module, "pickle")]


def test_below_the_median_of_four_trials_a_trial_ends_after_its_first_epoch() -> None:
    study = studies.optuna.create_study(pruner=PRUNERS["median"](4))
    for loss in (1, 1, 1, 1, 2):
        trial = study.ask()
        trial.report(loss, 1)
        is_pruned = trial.should_prune()
        study.tell(trial, loss)
    assert is_pruned


def test_the_machine_is_dealt_without_overlap() -> None:
    slots = deal(3, ["0", "1", "2", "3"])
    for shares in ([slot.gpus for slot in slots], [slot.cores for slot in slots]):
        assert len(set(sum(shares, ()))) == sum(len(share) for share in shares)
    assert sorted(sum((slot.gpus for slot in slots), ())) == ["0", "1", "2", "3"]
    assert slots[0].variables()["CUDA_VISIBLE_DEVICES"] == "0,3"


def test_a_teacher_serves_all_trials_only_where_they_share_its_pictures(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "train_teacher_first", lambda *_: {"model.teacher.checkpoint": "t"})
    space = {"optim.lr": "[0.1]", "data.val_fraction": "[0.1, 0.2]", "seed": "[1, 2]"}
    for key, values in space.items():
        planned = plan(Request(str(recipe), overrides=[f"search.{key}={values}"]))
        found = search._teacher_of_all(planned)
        assert found == ["model.teacher.checkpoint=t"] * (key == "optim.lr")


def test_without_optuna_one_line_names_the_extra(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, refusal: Command
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "kd.fleet.tuning.study")
    assert f"kd-tune: searching {needs_extra('tune')}" in refusal(
        "tune", [f"recipe={recipe}", "search.optim.lr=0..1"]
    )
    assert not (recipe.parent / "runs").exists()


def test_a_trial_that_hangs_is_killed_and_has_failed(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no signal, and more time than a trial may."""
    monkeypatch.setattr("kd.fleet.tuning.trials.KILL_S", 0.5)
    items = [
        f"recipe={recipe}",
        disturb("Deaf"),
        "search.optim.lr=[0.001]",
        "trials=1",
        "trial_hours=0.001",
    ]
    began = time.monotonic()
    assert main("tune", items) == 1
    assert time.monotonic() - began < 30
    assert "trial 0: failed: took longer than trial_hours=0.001 (" in capsys.readouterr().out
    assert [t.state.name for t in trials(of(recipe))] == ["FAIL"]
    assert not trial_processes(of(recipe))


def test_a_second_ctrl_c_waits_for_no_trial(recipe: Path) -> None:
    items = [f"recipe={recipe}", disturb("Deaf"), "search.optim.lr=[0.001]", "trials=1"]
    log = recipe.parent / "log"
    pid = start(items, log, program="tune")
    wait_until(lambda: any(of(recipe).rglob("deaf")))
    for _ in range(2):
        os.kill(pid, signal.SIGINT)
        time.sleep(0.3)
    began = time.monotonic()
    assert status_of(pid) == 130, log.read_text()
    assert time.monotonic() - began < 10
    assert not trial_processes(of(recipe))
    assert [t.state.name for t in trials(of(recipe))] == ["RUNNING"]


@pytest.mark.parametrize("tail", ['{"op_code":4,"wor', "\0" * 40])
def test_a_torn_line_of_the_journal_ends_no_search(tmp_path: Path, tail: str) -> None:
    """A process was killed while it wrote; the next ones write and read on, those that have it open too."""
    space = [space_of("optim.lr", "0.1..0.9")]
    study = Study(tmp_path, ["maximize"], "tpe", "none", 1, 0)
    study.ask(space)
    whole = (tmp_path / "journal.log").read_bytes()
    for _ in range(2):
        with (tmp_path / "journal.log").open("a") as journal:
            journal.write(tail)
        assert len(study.trials()) == len(trials(tmp_path))
        study.ask(space)
    assert len(trials(tmp_path)) == 3
    assert (tmp_path / "journal.log").read_bytes().startswith(whole)
    assert all(json_lines(tmp_path / "journal.log"))


def test_a_full_disk_is_one_line_and_leaves_no_process(recipe: Path) -> None:
    """Room for the search's own first lines, and not for a run."""
    room = recipe.parent / "room"
    room.mkdir()
    items = [f"recipe={recipe}", f"runs_dir={room}/runs", "search.optim.lr=0..1", "trials=9"]
    log = recipe.parent / "log"
    pid = start(items, log, partial(small_disk, room), program="tune")
    status = status_of(pid)
    if status == 77:
        pytest.skip("needs the right to mount a file system")
    assert status == 1, log.read_text()
    assert log.read_text().splitlines()[-1].startswith("kd-tune: ")
    assert "No space left on device" in log.read_text().splitlines()[-1]
    assert "Traceback" not in log.read_text()


def test_the_winner_runs_again_on_fresh_seeds(recipe: Path, prints: Command) -> None:
    write_yaml(recipe, read_yaml(recipe) | {"name": "mine"})  # which no trial is called
    items = [
        f"recipe={recipe}",
        "trainer.max_epochs=1",
        "search.optim.lr=[0.01]",
        "trials=1",
        "confirm=1",
    ]
    out = prints("tune", items)
    assert "val/acc1 on fresh seeds (1,): the winner " in out
    assert "one seed says nothing of the spread." in out
    runs = {
        p.parent.parent.parent.name: read_yaml(p)
        for p in of(recipe).glob("confirm/*/*/*/config.yaml")
    }
    assert {name: (run["seed"], run["optim"]["lr"]) for name, run in runs.items()} == {
        "trial-0-seed-1": (1, 0.01), "default-seed-1": (1, 0.001),
    }  # fmt: skip


@pytest.mark.slow
def test_speed_as_an_objective(recipe: Path) -> None:
    items = [f"recipe={recipe}", "trainer.max_epochs=1", "objective=val/acc1,-latency_ms", "sampler=grid",
             "search.model.student.kwargs.depth=[1, 2]"]  # fmt: skip
    done = run_cli(*items, program="tune")
    assert done.returncode == 0, done.stderr
    study = Study(of(recipe), ["maximize", "minimize"], "grid", "none", 1, 0)
    speed = {t.params["model.student.kwargs.depth"]: t.values[1] for t in study.trials("complete")}
    assert 0 < speed[1] < speed[2]


def test_a_search_keeps_no_secret_in_its_journal(recipe: Path) -> None:
    """Everyone who may read the search's folder reads it."""
    address = "https://hooks.example/T0/hush"
    words = [f"monitor.webhook={address}", "search.optim.lr=[0.1, 0.2]"]
    planned = plan(Request(str(recipe), [], words))
    assert planned.config["monitor"]["webhook"] == address
    assert planned.settings()["monitor.webhook"] == "..."

"""Loggers by key, beside metrics.csv."""

import csv
import json
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger

from kd.callbacks.context import RunContext
from kd.callbacks.loggers import Loggers, placed
from kd.callbacks.tracked_runs import with_run_ids
from kd.cli import train_main
from kd.optim import warmup_cosine
from kd.run import needs
from tests._files import read_json, read_yaml, write_json
from tests._forks import start, status_of
from tests._helpers import Command, refuses
from tests._runs import disturb, run, run_of


def test_loggers_write_below_the_run_with_all_settings(recipe: Path) -> None:
    """Where nothing else is said; several at once; the saved configuration repeats it."""
    assert train_main([f"recipe={recipe}", "trainer.logger=CSVLogger", "optim.lr=0.002"]) == 0
    run = recipe.parent / "runs" / "tiny"
    assert train_main([str(run / "000" / "config.yaml"), "trainer.max_epochs=1"]) == 0
    for folder in (run / "000", run / "001"):
        assert "train/kd_loss" in (folder / "csv" / "metrics.csv").read_text()
        settings = read_yaml(folder / "csv" / "hparams.yaml")
        assert (settings["optim.lr"], settings["data.batch_size"]) == (0.002, 8)
    rows = list(csv.DictReader((run / "000" / "metrics.csv").open()))
    rates = [float(row["train/lr"]) for row in rows if row["train/loss"]]
    assert rates == pytest.approx([0.002 * warmup_cosine(step, 0, 12, 0.01) for step in range(12)])


def test_arguments_left_at_their_defaults_follow_the_run() -> None:
    """Also those of loggers whose packages are not installed here."""
    run, loggers = Path("/runs/food/007"), "pytorch_lightning.loggers."
    board = {"class_path": loggers + "TensorBoardLogger", "init_args": {"save_dir": "RUN"}}
    assert placed(board, run)["init_args"] == {
        "save_dir": "/runs/food/007", "name": "tensorboard", "version": "",
    }  # fmt: skip
    assert placed(
        {"class_path": loggers + "WandbLogger", "init_args": {"save_dir": ".", "project": None}},
        run,
    )["init_args"] == {"save_dir": "/runs/food/007", "project": "food", "name": "food-007"}
    mlflow = {
        "class_path": loggers + "MLFlowLogger",
        "init_args": {"run_name": "mine", "save_dir": "./mlruns"},
    }
    assert placed(mlflow, run)["init_args"] == {
        "run_name": "mine", "save_dir": "/runs/food/007/mlruns", "experiment_name": "food",
        "tracking_uri": "sqlite:////runs/mlflow.db", "artifact_location": "/runs/mlflow",
    }  # fmt: skip
    mlflow["init_args"] = {"save_dir": "/elsewhere"}
    assert placed(mlflow, run)["init_args"]["tracking_uri"] == "sqlite:////elsewhere/mlflow.db"
    # required, and of a class whose settings kd does not list
    assert placed({"class_path": loggers + "CSVLogger"}, run)["init_args"]["save_dir"] == str(run)
    mlflow["init_args"] = {"tracking_uri": "http://server"}
    assert "artifact_location" not in placed(mlflow, run)["init_args"]


def test_lightnings_own_words_write_below_the_run_too(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    words = ["trainer.logger=true", "trainer.profiler=pytorch", "trainer.max_epochs=1"]
    run(recipe, *words)
    folder = tmp_path / "runs" / "tiny" / "000"
    assert (folder / "csv" / "metrics.csv").is_file() and list(folder.glob("*.pt.trace.json"))
    assert not list(here.iterdir())
    assert not list(folder.parent.glob(".RUN"))


def test_two_loggers_at_once(recipe: Path) -> None:
    short = {"class_path": "CSVLogger", "init_args": {"name": "again"}}
    items = [f"trainer.logger=[CSVLogger,{json.dumps(short)}]", "trainer.max_epochs=1"]
    assert train_main([f"recipe={recipe}", *items]) == 0
    run = run_of(recipe)
    assert "train/kd_loss" in (run / "csv" / "metrics.csv").read_text()
    assert list((run / "again").rglob("metrics.csv"))


def test_a_missing_package_is_named(recipe: Path, refusal: Command) -> None:
    missing = next(
        name
        for name, (packages, extra) in needs.PACKAGES.items()
        if name.endswith("Logger") and not any(find_spec(p) for p in packages)
    )
    assert f"trainer.logger: {missing} needs the package" in refusal(
        "train", [f"recipe={recipe}", f"trainer.logger={missing}"]
    )
    assert not (recipe.parent / "runs").exists()


def train_to_the_end(items: list[str]) -> int:
    """``kd-train``, and what W&B does at a process's end, which a fork does not reach."""
    status = train_main(items)
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()
    return status


def kill_and_resume(recipe: Path, loggers: str) -> Path:
    """Two epochs of 6 steps, killed at step 10, resumed at step 6; the run's folder."""
    items = [f"recipe={recipe}", f"trainer.logger={loggers}", disturb("KillAtStep", step=10)]
    assert status_of(start(items, recipe.parent / "log")) == -signal.SIGKILL
    run = run_of(recipe)
    items = [f"resume={run}", "trainer.callbacks=null"]
    resumed = start(items, recipe.parent / "log", program=train_to_the_end)
    assert status_of(resumed) == 0, (recipe.parent / "log").read_text()
    return run


def test_a_killed_and_resumed_run_logs_each_step_once(recipe: Path) -> None:
    """As ``metrics.csv``: 12 steps, killed at the tenth, resumed at the last checkpoint, of step 6."""
    board = find_spec("tensorboard") is not None
    run = kill_and_resume(recipe, "[CSVLogger,TensorBoardLogger]" if board else "[CSVLogger]")
    assert len(steps_of(run / "csv" / "metrics.csv")) > 6, "it was not killed after a checkpoint"
    assert steps_of(run / "metrics.csv") == list(range(12))
    assert steps_of(run / "csv" / "from_step_6" / "metrics.csv") == list(range(6, 12))
    if board:
        reading = import_module("tensorboard.backend.event_processing.event_accumulator")
        events = reading.EventAccumulator(str(run / "tensorboard")).Reload()
        assert [event.step for event in events.Scalars("train/loss")] == list(range(12))


def test_mlflow_continues_the_run_of_a_killed_training(recipe: Path) -> None:
    """One run, with each metric of each step, a parameter that the resumed training changes at its first value."""
    mlflow = pytest.importorskip("mlflow")
    run = kill_and_resume(recipe, "MLFlowLogger")
    client = mlflow.MlflowClient(f"sqlite:///{recipe.parent / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert read_json(run / "loggers.json") == {"MLFlowLogger": tracked.info.run_id}
    assert tracked.info.status == "FINISHED"
    for metric, steps in (("train/loss", [*range(12)]), ("val/acc1", [5, 11])):
        history = client.get_metric_history(tracked.info.run_id, metric)
        assert sorted({point.step for point in history}) == steps, metric


def test_a_run_that_mlflow_does_not_have_is_named(recipe: Path, refusal: Command) -> None:
    pytest.importorskip("mlflow")
    items = [f"recipe={recipe}", "trainer.logger=MLFlowLogger"]
    assert train_main([*items, "trainer.max_epochs=1"]) == 0
    run = run_of(recipe)
    (run / "loggers.json").write_text('{"MLFlowLogger": "0123456789abcdef0123456789abcdef"}')
    error = refusal("train", [f"resume={run}", "trainer.max_epochs=2"]).strip().splitlines()[-1]
    assert "trainer.logger: " in error
    assert "loggers.json" in error


def test_wandb_continues_the_run_of_a_killed_training(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one id, which ``wandb sync --append`` joins."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = kill_and_resume(recipe, "WandbLogger")
    files = sorted((run / "wandb").rglob("run-*.wandb"))
    run_ids = {file.stem.removeprefix("run-") for file in files}
    assert len(files) == 2
    assert {read_json(run / "loggers.json")["WandbLogger"]} == run_ids


@pytest.mark.parametrize(
    "run_id", ["../../else", "a/b", "", 7, None, ["id"], "x" * 65], ids=lambda value: str(value)[:9]
)
def test_an_id_of_a_runs_folder_is_a_plain_word(tmp_path: Path, run_id: object) -> None:
    """The file may be a stranger's; W&B makes a folder of this name."""
    write_json(tmp_path / "loggers.json", {"WandbLogger": run_id})
    (spec,) = with_run_ids([{"class_path": "pytorch_lightning.loggers.WandbLogger"}], tmp_path)
    assert spec["init_args"] == {}


def test_each_logger_continues_its_own_run(tmp_path: Path) -> None:
    """Two of one class, one whose settings name a run, one that has no runs."""
    (tmp_path / "loggers.json").write_text(
        '{"WandbLogger": "first", "WandbLogger-2": "second", "CSVLogger": "x", "CometLogger": "c"}'
    )
    names = ("WandbLogger", "CSVLogger", "WandbLogger", "CometLogger")
    specs = [{"class_path": f"pytorch_lightning.loggers.{name}"} for name in names]
    arguments = [spec["init_args"] for spec in with_run_ids(specs, tmp_path)]
    assert arguments == [{"id": "first"}, {}, {"id": "second"}, {"experiment_key": "c"}]
    specs[0]["init_args"] = {"id": "mine"}
    assert with_run_ids(specs, tmp_path)[0]["init_args"] == {"id": "mine"}


def steps_of(file: Path) -> list[int]:
    """The steps whose training loss a file of metrics holds."""
    rows = list(csv.DictReader(file.open()))
    return [int(row["step"]) for row in rows if row["train/loss"]]


def test_a_run_that_fsdp_resumes_keeps_its_loggers_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its strategy reads the checkpoint after ``on_fit_start``: made there, a logger would begin anew."""
    file = tmp_path / "csv" / "metrics.csv"
    file.parent.mkdir()
    file.write_text("step,train/loss\n0,3.0\n1,2.0\n2,1.0\n")
    run: Any = SimpleNamespace(folder=tmp_path, module=SimpleNamespace(resumed=True))
    monkeypatch.setattr(RunContext, "of", lambda trainer: run)
    strategy = SimpleNamespace(restore_checkpoint_after_setup=True)
    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=[], strategy=strategy)
    spec = {"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": {}}
    module: Any = None
    loggers = Loggers([spec], lambda specs: [CSVLogger(**specs[0]["init_args"])], {})
    loggers.on_fit_start(trainer, module)
    loggers.on_load_checkpoint(trainer, module, {"global_step": 2})
    (logger,) = trainer.loggers
    logger.log_metrics({"train/loss": 0.5}, 2)
    logger.save()
    assert steps_of(file) == [0, 1, 2]
    assert steps_of(tmp_path / "csv" / "from_step_2" / "metrics.csv") == [2]


def test_a_link_in_the_place_of_mlflows_database_is_refused(tmp_path: Path) -> None:
    """It lies beside the runs, which may be a stranger's; SQLite would write to what the link leads to."""
    (tmp_path / "mlflow.db").symlink_to(tmp_path / "victim")
    spec = {"class_path": "pytorch_lightning.loggers.MLFlowLogger"}
    with refuses(r"mlflow.db: is a link"):
        placed(spec, tmp_path / "food" / "007")

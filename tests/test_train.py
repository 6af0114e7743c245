"""kd-train end to end on a tiny pair: run folder, resume, seeds, signals, processes."""

import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kd.cli import eval_main, train_main
from kd.fit_to_machine.precision import choose_precision
from kd.report.records import read_run
from tests._files import read_json, read_yaml
from tests._forks import as_program, run_ranks, start, status_of
from tests._helpers import ACCELERATOR, WITHOUT_TEACHER, Command, plain_answers, write_recipe
from tests._runs import (
    assert_good,
    assert_same,
    assert_same_runs,
    callback,
    disturb,
    evaluated,
    losses,
    resumed,
    run,
    run_folders,
    run_of,
    student_of,
    summary_of,
)

MODEL = "student.model."  # the student's part of a checkpoint

RUN_FILES = {
    "config.yaml",
    "metrics.csv",
    "summary.json",
    "checkpoints",
    "student",
    "student.safetensors",
    "records",
    "report.html",
    ".lock",
    "fidelity.json",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, pictures: Path, teacher: Path) -> Path:
    """The folder of a finished run of the recipe as it is; evaluations alone write there."""
    return run(write_recipe(tmp_path_factory.mktemp("plain") / "tiny.yaml", pictures, teacher))


def test_a_run_leaves_a_folder_that_explains_itself(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(recipe)
    assert {p.name for p in folder.iterdir()} == RUN_FILES
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
    }
    assert (folder.parent / "latest").resolve() == folder.resolve()
    summary = summary_of(folder)
    assert summary["status"] == "done"
    assert summary["epochs"] == 2
    assert summary["steps"] == 12
    assert summary["data"] == {
        "source": f"ImageFolder {read_yaml(recipe)['data']['source']['init_args']['root']}",
        "train": 48, "val": 16, "classes": 4, "unlabeled": 0, "skipped": 0, "shared": 0,
    }  # fmt: skip
    assert [*summary["student"]["val"]] == ["acc1", "acc5", "agreement", "kl"]
    assert summary["student"]["best_val"]["acc1"] >= summary["student"]["val"]["acc1"]
    assert set(summary["teacher"]["val"]) == {"acc1", "acc5"}
    for key in ("recipe", "kd_version", "device", "precision", "strategy", "world_size", "wall_s", "images_per_s",
                "step_ms_median", "peak_memory_mb", "seed"):  # fmt: skip
        assert summary[key] is not None, key
    out = capsys.readouterr()
    if ACCELERATOR == "cpu":
        assert summary["precision"] == choose_precision("cpu")[0]
        assert f"precision: {summary['precision']}, as " in out.out
    else:
        assert summary["device"] == torch.cuda.get_device_name()
    assert "preflight: teacher" in out.out
    assert "agreement" in out.out
    assert str(folder) in out.out
    assert "images/s" in out.out
    assert re.search(
        "epoch   2  train/loss [^\n]*  val/acc1 [^\n]*  val/agreement [^\n]*  val/kl ", out.err
    )


def test_the_saved_configuration_repeats_the_run_to_the_last_bit(recipe: Path) -> None:
    """Equal runs are equal files; an audit is no torn record."""
    first = run(
        recipe, "config=audit", "data.num_workers=2", "data.augment.mixup=0.8", "data.augment.cutmix=1",
        "model.ema_decay=0.9", "trainer.max_epochs=1",
    )  # fmt: skip
    assert read_run(first).notes == []
    before = set(run_folders(recipe))
    assert train_main([str(first / "config.yaml"), "data.num_workers=0"]) == 0
    (again,) = set(run_folders(recipe)) - before
    assert losses(first) == losses(again)
    for name in ("student.safetensors", "student/model.safetensors", "student/config.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes()


def test_another_seed_is_another_run(plain: Path, recipe: Path) -> None:
    other = losses(run(recipe, "seed=1", "trainer.max_epochs=1"))
    assert other and all(losses(plain)[step] != value for step, value in other.items())


def test_resume_at_an_epochs_end_equals_the_uninterrupted_run(recipe: Path) -> None:
    """In the middle of one: :func:`test_a_signal_leaves_a_checkpoint_to_go_on_from`."""
    extra = ["model.ema_decay=0.9", "trainer.accumulate_grad_batches=2", "data.augment.mixup=1"]
    whole = run(recipe, *extra)
    # the schedule knows the whole length: the first part stops early, it is not a shorter run
    assert train_main([f"recipe={recipe}", *extra, disturb("StopAfterEpoch", epoch=0)]) == 143
    part = run_folders(recipe)[-1]
    assert summary_of(part)["status"] == "interrupted"
    resumed(part, "trainer.callbacks=null")
    assert_same_runs(part, whole)
    summaries = [summary_of(f) for f in (part, whole)]
    assert summaries[0]["student"] == summaries[1]["student"]


def test_a_short_accumulation_steps_as_far_as_a_whole_one(recipe: Path) -> None:
    """Resumed in an epoch that ends soon: two batches of an accumulation of four are one batch of twice the size."""
    sgd = [
        "optim.name=sgd",
        "optim.min_lr_ratio=1",
        "trainer.max_epochs=1",
        "trainer.precision=32-true",
        "trainer.gradient_clip_val=0",
        "checkpoint.every_n_steps=1",
    ]
    assert train_main([f"recipe={recipe}", *sgd, disturb("FailAtStep", step=1)]) == 1
    one = run_of(recipe)
    short = shutil.copytree(one, one.with_name("001"))
    again = "trainer.callbacks=null"
    resumed(short, again, "trainer.accumulate_grad_batches=4", "trainer.limit_train_batches=3")
    resumed(one, again, "data.batch_size=16", "trainer.limit_train_batches=2")
    for name, weight in student_of(one).items():
        torch.testing.assert_close(student_of(short)[name], weight, atol=1e-6, rtol=1e-5)


def test_a_short_runs_average_does_not_keep_the_first_weights(recipe: Path) -> None:
    folder = run(recipe, "model.ema_decay=0.9998", "trainer.max_steps=1")
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    own = {k.removeprefix(MODEL): v for k, v in state.items() if k.startswith(MODEL)}
    assert own
    assert_same({k: state[f"student.average.module.{k}"] for k in own}, own)


def test_more_epochs_of_a_run_that_its_steps_have_ended(
    recipe: Path, capsys: pytest.CaptureFixture[str], prints: Command
) -> None:
    """The line names the limit that is reached, and its words train on."""
    folder = run(recipe, "trainer.max_steps=2")
    capsys.readouterr()
    assert f"all 2 steps of {folder} are done; trainer.max_steps=4 trains on" in prints(
        "train", [f"resume={folder}", "trainer.max_epochs=2"]
    )
    resumed(folder, "trainer.max_epochs=2", "trainer.max_steps=-1")
    steps = summary_of(folder)["steps"]
    capsys.readouterr()
    assert f"all {steps} steps of {folder} are done" in prints(
        "train", [f"resume={folder}", "trainer.max_steps=2", "trainer.max_epochs=-1"]
    )
    assert summary_of(folder)["epochs"] == 2


def test_latest_is_resumed_and_evaluated_as_the_run_it_names(
    recipe: Path, capsys: pytest.CaptureFixture[str], prints: Command
) -> None:
    folder = run(recipe, "trainer.max_epochs=1")
    latest = folder.parent / "latest"
    resumed(latest, "trainer.max_epochs=2")
    assert latest.resolve() == folder.resolve()
    assert summary_of(folder)["epochs"] == 2
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    capsys.readouterr()
    assert (
        prints("train", [f"resume={latest}"])
        == f"kd-train: all 2 epochs of {folder} are done; trainer.max_epochs=4 trains on\n"
    )
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    latest.unlink()
    latest.write_text("000\n")  # as on a file system without links
    assert eval_main([str(latest)]) == 0
    run(recipe, f"model.student.checkpoint={latest}", "trainer.max_epochs=1")


@pytest.mark.parametrize(
    "items",
    [
        ["trainer.limit_val_batches=0"],
        ["data.batch_size=7", "data.augment.mixup=0.8"],
        ["model.student.img_size=48", "data.img_size=40"],
        [
            "trainer.logger=CSVLogger",
            "trainer.logger.save_dir=logs",
            "trainer.callbacks+=LearningRateMonitor",
        ],
        [
            "trainer.enable_progress_bar=false",
            "checkpoint.monitor=val/agreement",
            "trainer.accumulate_grad_batches=4",
        ],
    ],
    ids=lambda items: items[0],
)
def test_settings_that_people_combine(
    items: list[str], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    folder = run(recipe, "trainer.max_epochs=1", *items)
    assert summary_of(folder)["status"] == "done"
    assert (folder / "student.safetensors").exists()


def test_the_checkpoint_holds_no_teacher(plain: Path) -> None:
    checkpoint = torch.load(plain / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(key.startswith(MODEL) for key in checkpoint["state_dict"])
    assert set(checkpoint["kd_teacher"]) == {"arch", "weights"}
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(student_of(plain))


def test_plain_timm_loads_the_student_and_gives_the_same_numbers(
    plain: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluated(plain)
    assert found["pictures"] == 16
    assert {"acc1", "acc5", "agreement"} <= set(found["student"])
    assert "teacher" in capsys.readouterr().out

    model = timm.create_model(f"local-dir:{plain / 'student'}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(model)
    assert list(config["input_size"]) == [3, 32, 32]  # a tuple since timm 1.0.30
    assert config["crop_pct"] == 0.875
    assert config["interpolation"] == "bilinear"
    answers = plain_answers(model, pictures / "val", 32, config["mean"], config["std"])
    right = sum(label == answer for label, answer in answers)
    assert found["student"]["acc1"] == right / 16

    file = plain / "student.safetensors"
    with safe_open(file, framework="pt") as opened:
        meta = opened.metadata()
    assert json.loads(meta["classes"]) == list(model.pretrained_cfg["label_names"])
    same = timm.create_model(meta["arch"], **json.loads(meta["kwargs"]))
    same.load_state_dict(load_file(file))
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in same.state_dict().items())


def test_eval_of_another_folder_and_split(plain: Path, pictures: Path, tmp_path: Path) -> None:
    few = tmp_path / "few" / "bread"
    few.parent.mkdir()
    few.symlink_to(pictures / "train" / "bread")
    assert eval_main([str(plain)]) == 0
    own = (plain / "eval_val.json").read_bytes()
    for words, file, count in (
        ([f"folder={few.parent}"], "eval_few.json", 12),
        ([f"folder={pictures / 'val'}"], "eval_folder_val.json", 16),
        (["split=train", "data.batch_size=3"], "eval_train.json", 48),
    ):
        assert eval_main([str(plain), *words]) == 0
        assert read_json(plain / file)["pictures"] == count
    assert (plain / "eval_val.json").read_bytes() == own


def test_a_student_without_a_teacher(recipe: Path) -> None:
    """Its loader processes are chosen, too."""
    summary = summary_of(
        run(recipe, *WITHOUT_TEACHER, "data.num_workers=auto", "trainer.max_epochs=1")
    )
    assert summary["teacher"] is None
    assert summary["memory_mb"]["teacher"] == 0
    assert set(summary["student"]["val"]) == {"acc1", "acc5"}


def test_a_failed_run_says_why(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fail = callback("tests._stop.FailAtStep", step=3)
    assert train_main([f"recipe={recipe}", fail]) == 1
    folder = run_folders(recipe)[-1]
    summary = summary_of(folder)
    assert summary["status"] == "failed"
    assert "planted" in summary["error"]
    assert "_stop.py" in (folder / "error.txt").read_text()
    assert str(folder / "error.txt") in capsys.readouterr().err


def test_a_signal_before_the_first_step_is_no_failure(recipe: Path) -> None:
    assert train_main([f"recipe={recipe}", disturb("TerminateFirst")]) == 143
    (folder,) = run_folders(recipe)
    assert summary_of(folder)["status"] == "interrupted"
    assert not (folder / "error.txt").exists()


def test_a_signal_leaves_a_checkpoint_to_go_on_from(
    plain: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of an epoch. Signals from outside: tests/test_signals.py."""
    assert train_main([f"recipe={recipe}", disturb("Terminate", step=8)]) == 143
    (folder,) = run_folders(recipe)
    said = capsys.readouterr()
    assert f"kd-train resume={folder}" in said.out + said.err
    assert summary_of(folder)["status"] == "interrupted"
    assert_good(folder, 9)
    resumed(folder, "trainer.callbacks=null")
    assert summary_of(folder)["status"] == "done"
    assert_same(student_of(folder), student_of(plain))


TWO = ["config=ddp_2cpu", "data.batch_size=4", "trainer.precision=32-true", "trainer.max_epochs=1"]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, pictures: Path, teacher: Path) -> Path:
    """The folder of a run of one epoch on two processes."""
    recipe = write_recipe(tmp_path_factory.mktemp("two") / "tiny.yaml", pictures, teacher)
    run_ranks([f"recipe={recipe}", *TWO], recipe.parent / "log")
    return run_folders(recipe)[-1]


def test_two_processes_and_a_sharded_optimizer(recipe: Path, on_two: Path) -> None:
    """ZeRO over two gloo processes learns what AdamW over two learns, and its checkpoint resumes on one."""
    items = [f"recipe={recipe}", *TWO]
    watch = callback("tests._sockets.Listening")
    items += ["config=zero", watch]
    log = recipe.parent / "log"  # this run starts its second process itself
    assert status_of(start(items, log, as_program, items)) == 0, log.read_text()
    assert "listening: 127.0.0.1" in log.read_text()
    assert "listening: 0.0.0.0" not in log.read_text()
    assert "listening: ::" not in log.read_text()
    sharded = run_folders(recipe)[-1]
    assert summary_of(sharded)["world_size"] == 2
    assert_same_runs(on_two, sharded)
    resumed(sharded, "trainer.max_epochs=2", "optim.zero=false", "trainer.devices=1", "trainer.strategy=auto")  # fmt: skip
    assert summary_of(sharded)["epochs"] == 2


def test_two_processes_see_what_one_sees(recipe: Path, on_two: Path) -> None:
    """The same global batches: after one epoch, one process and two agree up to the order of summation."""
    single = run(recipe, "trainer.max_epochs=1", "trainer.precision=32-true")
    for key, value in student_of(single).items():
        torch.testing.assert_close(student_of(on_two)[key], value, rtol=1e-3, atol=1e-4)
    summaries = [summary_of(f) for f in (single, on_two)]
    assert summaries[0]["student"]["val"] == summaries[1]["student"]["val"]
    assert summaries[0]["teacher"] == summaries[1]["teacher"]
    faithful = [read_json(f / "fidelity.json") for f in (single, on_two)]
    assert faithful[0]["pictures"] == faithful[1]["pictures"] == summaries[0]["data"]["val"]
    assert faithful[0]["per_class"] == faithful[1]["per_class"]
    for key in ("agreement", "kl"):
        assert faithful[0][key] == pytest.approx(faithful[1][key], abs=1e-3)

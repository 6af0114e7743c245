"""kd-train end to end on a tiny pair: run folder, resume, seeds, signals, processes."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from kd.cli import eval_main, train_main
from kd.fit_to_machine.precision import choose_precision
from kd.report.records import read_run
from tests._forks import as_program, run_ranks, start, start_ranks, status_of
from tests._helpers import ACCELERATOR, ROOT, WITHOUT_TEACHER, write_recipe
from tests._runs import (
    assert_good,
    assert_same,
    callback,
    disturb,
    losses,
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
        "source": f"ImageFolder {yaml.safe_load(recipe.read_text())['data']['source']['init_args']['root']}",
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
    first = run(
        recipe, "data.num_workers=2", "data.augment.mixup=0.8", "data.augment.cutmix=1", "model.ema_decay=0.9",
        "trainer.max_epochs=1",
    )  # fmt: skip
    before = set(run_folders(recipe))
    assert train_main([str(first / "config.yaml"), "data.num_workers=0"]) == 0
    (again,) = set(run_folders(recipe)) - before
    assert losses(first) == losses(again)
    assert_same(student_of(first), student_of(again))


def test_another_seed_is_another_run(plain: Path, recipe: Path) -> None:
    other = losses(run(recipe, "seed=1", "trainer.max_epochs=1"))
    assert other and all(losses(plain)[step] != value for step, value in other.items())


@pytest.mark.parametrize(
    "extra",
    [
        # in the middle of one: test_a_signal_leaves_a_checkpoint_to_go_on_from
        pytest.param([], marks=pytest.mark.slow),
        ["model.ema_decay=0.9", "trainer.accumulate_grad_batches=2", "data.augment.mixup=1"],
    ],
)
def test_resume_at_an_epochs_end_equals_the_uninterrupted_run(
    recipe: Path, extra: list[str]
) -> None:
    whole = run(recipe, *extra)
    # the schedule knows the whole length: the first part stops early, it is not a shorter run
    assert train_main([f"recipe={recipe}", *extra, disturb("StopAfterEpoch", epoch=0)]) == 143
    part = run_folders(recipe)[-1]
    assert summary_of(part)["status"] == "interrupted"
    assert train_main([f"resume={part}", "trainer.callbacks=null"]) == 0
    assert losses(part) == losses(whole)
    assert_same(student_of(part), student_of(whole))
    summaries = [summary_of(f) for f in (part, whole)]
    assert summaries[0]["student"] == summaries[1]["student"]


def test_a_short_last_accumulation_steps_as_far_as_a_whole_one(recipe: Path) -> None:
    """Two batches of an accumulation of four are one batch of twice the size."""
    sgd = [
        "optim.name=sgd",
        "trainer.max_epochs=1",
        "trainer.precision=32-true",
        "trainer.gradient_clip_val=0",
    ]
    short = run(recipe, *sgd, "trainer.accumulate_grad_batches=4", "trainer.limit_train_batches=2")
    one = run(recipe, *sgd, "data.batch_size=16", "trainer.limit_train_batches=1")
    for name, weight in student_of(one).items():
        torch.testing.assert_close(student_of(short)[name], weight, atol=1e-6, rtol=1e-5)


def test_a_short_runs_average_does_not_keep_the_first_weights(recipe: Path) -> None:
    folder = run(recipe, "model.ema_decay=0.9998", "trainer.max_steps=1")
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    own = {k.removeprefix(MODEL): v for k, v in state.items() if k.startswith(MODEL)}
    assert own
    assert_same({k: state[f"student.average.module.{k}"] for k in own}, own)


def test_more_epochs_of_a_run_that_its_steps_have_ended(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the limit that is reached, and its words train on."""
    folder = run(recipe, "trainer.max_steps=2")
    capsys.readouterr()
    assert train_main([f"resume={folder}", "trainer.max_epochs=2"]) == 0
    assert (
        f"all 2 steps of {folder} are done; trainer.max_steps=4 trains on"
        in capsys.readouterr().out
    )
    assert train_main([f"resume={folder}", "trainer.max_epochs=2", "trainer.max_steps=-1"]) == 0
    steps = summary_of(folder)["steps"]
    capsys.readouterr()
    assert train_main([f"resume={folder}", "trainer.max_steps=2", "trainer.max_epochs=-1"]) == 0
    assert f"all {steps} steps of {folder} are done" in capsys.readouterr().out
    assert summary_of(folder)["epochs"] == 2


def test_latest_is_resumed_and_evaluated_as_the_run_it_names(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(recipe, "trainer.max_epochs=1")
    latest = folder.parent / "latest"
    assert train_main([f"resume={latest}", "trainer.max_epochs=2"]) == 0
    assert latest.resolve() == folder.resolve()
    assert summary_of(folder)["epochs"] == 2
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    capsys.readouterr()
    assert train_main([f"resume={latest}"]) == 0  # finished already: nothing is written
    assert (
        capsys.readouterr().out
        == f"kd-train: all 2 epochs of {folder} are done; trainer.max_epochs=4 trains on\n"
    )
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    latest.unlink()
    latest.write_text("000\n")  # as on a file system without links
    assert eval_main([str(latest)]) == 0
    assert (
        train_main(
            [f"recipe={recipe}", f"model.student.checkpoint={latest}", "trainer.max_epochs=1"]
        )
        == 0
    )


def test_a_damaged_checkpoint_is_named(recipe: Path, refusal) -> None:
    folder = run(recipe, "trainer.max_epochs=1")
    last = folder / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    before = {p: p.read_bytes() for p in folder.glob("*.*")}
    assert f"resume: {last} can't be loaded" in refusal(
        "train", [f"resume={folder}", "trainer.max_epochs=2"]
    )
    assert {p: p.read_bytes() for p in folder.glob("*.*")} == before


@pytest.mark.parametrize(
    "items",
    [
        ["trainer.limit_val_batches=0"],
        ["data.batch_size=7", "data.augment.mixup=0.8"],
        # test_a_recipe_bends_to_its_student
        pytest.param(
            ["model.student.arch=resnet10t", "model.student.kwargs={}"], marks=pytest.mark.slow
        ),
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


def test_resume_refuses_another_teacher(recipe: Path, tmp_path: Path, refusal) -> None:
    from tests._helpers import save_teacher

    folder = run(recipe, "trainer.max_epochs=1")
    other = save_teacher(tmp_path / "other.safetensors", seed=7)
    assert "another teacher" in refusal(
        "train", [f"resume={folder}", "trainer.max_epochs=2", f"model.teacher.checkpoint={other}"]
    )


def test_the_checkpoint_holds_no_teacher(plain: Path) -> None:
    checkpoint = torch.load(plain / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(key.startswith(MODEL) for key in checkpoint["state_dict"])
    assert set(checkpoint["kd_teacher"]) == {"arch", "weights"}
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(student_of(plain))


def test_plain_timm_loads_the_student_and_gives_the_same_numbers(
    plain: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_main([str(plain)]) == 0
    found = json.loads((plain / "eval_val.json").read_text())
    assert found["pictures"] == 16
    assert {"acc1", "acc5", "agreement"} <= set(found["student"])
    assert "teacher" in capsys.readouterr().out

    model = timm.create_model(f"local-dir:{plain / 'student'}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(model)
    assert list(config["input_size"]) == [3, 32, 32]  # a tuple since timm 1.0.30
    assert config["crop_pct"] == 0.875
    assert config["interpolation"] == "bilinear"
    right = 0
    for c, name in enumerate(model.pretrained_cfg["label_names"]):
        for path in sorted((pictures / "val" / name).iterdir()):
            right += int(plain_prediction(model, config, path) == c)
    assert found["student"]["acc1"] == right / 16

    file = plain / "student.safetensors"
    with safe_open(file, framework="pt") as opened:
        meta = opened.metadata()
    assert json.loads(meta["classes"]) == list(model.pretrained_cfg["label_names"])
    same = timm.create_model(meta["arch"], **json.loads(meta["kwargs"]))
    same.load_state_dict(load_file(file))
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in same.state_dict().items())


def plain_prediction(model: torch.nn.Module, config: dict, path: Path) -> int:
    """Torchvision and timm alone."""
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    size = config["input_size"][-1]
    steps = v2.Compose([
        v2.Resize(math.floor(size / config["crop_pct"]), antialias=True), v2.CenterCrop(size),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize(config["mean"], config["std"]),
    ])  # fmt: skip
    with torch.inference_mode():
        return int(model(steps(decode_image(str(path)))[None]).argmax())


def test_eval_of_another_folder_and_split(recipe: Path, pictures: Path, tmp_path: Path) -> None:
    folder = run(recipe, "trainer.max_epochs=1")
    few = tmp_path / "few" / "bread"
    few.parent.mkdir()
    few.symlink_to(pictures / "train" / "bread")
    assert eval_main([str(folder), f"folder={few.parent}"]) == 0
    assert json.loads((folder / "eval_few.json").read_text())["pictures"] == 12
    assert eval_main([str(folder)]) == 0
    own = (folder / "eval_val.json").read_bytes()
    assert eval_main([str(folder), f"folder={pictures / 'val'}"]) == 0
    assert (folder / "eval_val.json").read_bytes() == own
    assert (folder / "eval_folder_val.json").is_file()
    assert eval_main([str(folder), "split=train", "data.batch_size=3"]) == 0
    assert json.loads((folder / "eval_train.json").read_text())["pictures"] == 48


def test_a_student_without_a_teacher(recipe: Path) -> None:
    folder = run(recipe, *WITHOUT_TEACHER, "trainer.max_epochs=1")
    summary = summary_of(folder)
    assert summary["teacher"] is None
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
    assert train_main([f"resume={folder}", "trainer.callbacks=null"]) == 0
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
    assert losses(on_two) == losses(sharded)
    assert_same(student_of(on_two), student_of(sharded))
    assert train_main([
        f"resume={sharded}", "trainer.max_epochs=2", "optim.zero=false", "trainer.devices=1", "trainer.strategy=auto",
    ]) == 0  # fmt: skip
    assert summary_of(sharded)["epochs"] == 2


def test_two_processes_see_what_one_sees(recipe: Path, on_two: Path) -> None:
    """The same global batches: after one epoch, one process and two agree up to the order of summation."""
    single = run(recipe, "trainer.max_epochs=1", "trainer.precision=32-true")
    for key, value in student_of(single).items():
        torch.testing.assert_close(student_of(on_two)[key], value, rtol=1e-3, atol=1e-4)
    summaries = [summary_of(f) for f in (single, on_two)]
    assert summaries[0]["student"]["val"] == summaries[1]["student"]["val"]
    assert summaries[0]["teacher"] == summaries[1]["teacher"]
    faithful = [json.loads((f / "fidelity.json").read_text()) for f in (single, on_two)]
    assert faithful[0]["pictures"] == faithful[1]["pictures"] == summaries[0]["data"]["val"]
    assert faithful[0]["per_class"] == faithful[1]["per_class"]
    for key in ("agreement", "kl"):
        assert faithful[0][key] == pytest.approx(faithful[1][key], abs=1e-3)


def test_a_hint_on_the_class_token(tmp_path: Path, pictures: Path, teacher: Path) -> None:
    hint = {"class_path": "kd.losses.HintLoss"}
    recipe = write_recipe(
        tmp_path / "tiny.yaml", pictures, teacher,
        model__distill_losses={"hint": hint},
        model__taps={"hint": {"student": "norm", "teacher": "norm", "tokens": "class"}},
    )  # fmt: skip
    folder = run(recipe, "trainer.max_epochs=1")
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"][
        "student.objective.losses.hint.projection.layers.weight"
    ].shape == (32, 32)
    assert not any("projection" in key for key in student_of(folder))
    assert "train/hint_loss" in (folder / "metrics.csv").read_text().splitlines()[0]


def test_the_student_starts_from_the_teachers_layers(recipe: Path, teacher: Path) -> None:
    folder = run(
        recipe,
        "model.student.inherit=true",
        "model.student.kwargs.depth=2",
        "optim.lr=0",
        "trainer.max_epochs=1",
    )
    summary = summary_of(folder)
    assert summary["student"]["val"]["agreement"] == 1.0


def test_a_signal_to_one_of_two_processes_stops_both_with_a_checkpoint(recipe: Path) -> None:
    """Which resumes on one: test_resume_on_another_number_of_ranks."""
    log = recipe.parent / "log.txt"
    items = ["config=ddp_2cpu", "data.batch_size=2", disturb("Terminate", step=2, rank=0)]
    pids = start_ranks([f"recipe={recipe}", *items], log)
    assert [status_of(pid) for pid in pids] == [143, 0], log.with_suffix(
        ".0"
    ).read_text()  # 0: see _status_of_stop
    folder = run_of(recipe)
    assert f"kd-train resume={folder}" in log.with_suffix(".0").read_text()
    assert_good(folder, 10)  # ranks agree every ten batches


@pytest.mark.slow  # ranks with a launcher's environment: test_zero_resumes_to_the_end; torchrun: test_signals.py
def test_under_torchrun(recipe: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "kd.cli", f"recipe={recipe}",
         "config=ddp_2cpu", "config=zero", "data.batch_size=4", "trainer.max_epochs=1"],
        cwd=ROOT, text=True, capture_output=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder:") == 1
    summary = summary_of(run_of(recipe))
    assert (summary["status"], summary["world_size"]) == ("done", 2)


def test_equal_runs_are_equal_files_and_an_audit_is_no_torn_record(recipe: Path) -> None:
    runs = [run(recipe, "config=audit", "trainer.max_epochs=1") for _ in range(2)]
    for name in ("student.safetensors", "student/model.safetensors", "student/config.json"):
        assert (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes()
    assert read_run(runs[0]).notes == []

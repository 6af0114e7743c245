"""No lost work: runs that are killed, and go on as if nothing had happened."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from kd.callbacks.summary import Summary
from kd.cli import train_main
from kd.data.sampler import TrainBatches
from kd.module.resume import Resume
from kd.optim import warmup_cosine
from tests._files import json_lines, read_yaml, write_yaml
from tests._forks import start, start_ranks, status_of
from tests._helpers import Command, draw_folder, refuses, write_recipe
from tests._kills import main as kill_in_a_row
from tests._runs import callback, resumed, run_of, summary_of

AUDIT = '[{"class_path": "kd.monitor.audit.Audit"}]'

HARD = {
    "data__augment": {"mixup": 0.8, "cutmix": 1.0},
    "model__ema_decay": 0.9,
    "data__batch_size": 4,
    "checkpoint": {"every_n_steps": 2},
}


def hard_recipe(path: Path, pictures: Path, teacher: Path, **changes: object) -> Path:
    """Everything that carries state from step to step: mixup, EMA, accumulation, a loss with parameters, dropout."""
    recipe = write_recipe(path, pictures, teacher, **{**HARD, **changes})

    config = read_yaml(recipe)
    config["model"]["distill_losses"]["hint"] = {
        "class_path": "kd.losses.HintLoss",
        "init_args": {},
    }
    config["model"]["taps"] = {"hint": {"student": "norm", "teacher": "norm"}}
    config["model"]["student"]["kwargs"]["proj_drop_rate"] = 0.1
    config["trainer"] |= {"max_epochs": 12, "accumulate_grad_batches": 2}
    write_yaml(recipe, config)
    return recipe


ASYNCHRONOUS = "checkpoint.asynchronous=true"


@pytest.mark.parametrize(
    ("workers", "kills", "epochs", "more"),
    [
        (0, 2, 2, []),
        pytest.param(0, 5, 4, [], marks=pytest.mark.slow),
        pytest.param(0, 20, 12, [], marks=pytest.mark.slow),
        # loader workers change nothing: test_the_saved_configuration_repeats_the_run_to_the_last_bit
        pytest.param(2, 1, 1, [], marks=pytest.mark.slow),
        pytest.param(2, 5, 4, [], marks=pytest.mark.slow),
        pytest.param(2, 20, 12, [], marks=pytest.mark.slow),
        pytest.param(0, 4, 4, [ASYNCHRONOUS], marks=pytest.mark.slow),
    ],
    ids=[
        "two",
        "five",
        "twenty",
        "one, loader workers",
        "five, loader workers",
        "twenty, loader workers",
        "asynchronous",
    ],
)
def test_kills_in_a_row(
    workers: int,
    kills: int,
    epochs: int,
    more: list[str],
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = hard_recipe(tmp_path / "tiny.yaml", pictures, teacher, data__num_workers=workers)
    status = kill_in_a_row(recipe, kills, workers, [f"trainer.max_epochs={epochs}", *more])
    said = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{said}")
    assert status == 0, said


def records(folder: Path) -> dict[int, tuple[int, set[int]]]:
    """Step -> epoch and samples, over all ranks."""
    found: dict[int, tuple[int, set[int]]] = {}
    for file in sorted((folder / "records").glob("samples.rank*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            epoch, earlier = found.get(line["step"], (line["epoch"], set()))
            assert epoch == line["epoch"]
            assert not earlier & set(line["index"])
            found[line["step"]] = (epoch, earlier | set(line["index"]))
    return found


ONE = ["trainer.devices=1", "trainer.strategy=auto"]
TWO = ["trainer.devices=2", "trainer.strategy=ddp"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([*TWO, "data.batch_size=4"], [*ONE, "data.batch_size=8"]),
        pytest.param(
            [*TWO, "data.batch_size=4"],
            [*ONE, "data.batch_size=4", "trainer.accumulate_grad_batches=2"],
            marks=pytest.mark.slow,
        ),
        ([*ONE, "data.batch_size=8"], [*TWO, "data.batch_size=4"]),
    ],
    ids=["2 to 1", "2 to 1, accumulated", "1 to 2"],
)
def test_resume_on_another_number_of_ranks(
    before: list[str], after: list[str], recipe: Path, tmp_path: Path
) -> None:
    """Killed in the middle of the second of two epochs: the same samples in the same global batches."""
    kill = callback("tests._stop.KillAtStep", step=9)
    items = [
        "config=audit",
        *before,
        "trainer.max_epochs=2",
        "checkpoint.every_n_steps=1",
        kill,
    ]
    for pid in start_ranks(
        [f"recipe={recipe}", *items], tmp_path / "killed.log", 1 if before[0] == ONE[0] else 2
    ):
        assert status_of(pid) != 0
    folder = run_of(recipe)
    items = [f"resume={folder}", *after, f"trainer.callbacks={AUDIT}"]
    for pid in start_ranks(items, tmp_path / "again.log", 1 if after[0] == ONE[0] else 2):
        assert status_of(pid) == 0, (tmp_path / "again.0").read_text()
    order = TrainBatches(48, 8, 0).order
    assert records(folder) == {
        6 * e + b + 1: (e, set(order(e)[8 * b : 8 * b + 8].tolist()))
        for e in range(2)
        for b in range(6)
    }


def test_another_global_batch_in_the_middle_of_an_epoch_sees_each_sample_once(recipe: Path) -> None:
    kill = json.dumps([
        {"class_path": "kd.monitor.audit.Audit"},
        {"class_path": "tests._stop.FailAtStep", "init_args": {"step": 2}},
    ])  # fmt: skip
    assert (
        train_main([f"recipe={recipe}", "checkpoint.every_n_steps=1", f"trainer.callbacks={kill}"])
        == 1
    )
    folder = run_of(recipe)
    for size in (5, 3):  # 16 seen, then fives, then threes
        stop = json.dumps([
            {"class_path": "kd.monitor.audit.Audit"},
            {"class_path": "tests._stop.FailAtStep", "init_args": {"step": 4}},
        ])  # fmt: skip
        train_main(
            [
                f"resume={folder}",
                f"data.batch_size={size}",
                f"trainer.callbacks={stop if size == 5 else AUDIT}",
            ]
        )
    seen: dict[int, list[int]] = {0: [], 1: []}
    for line in map(
        json.loads, (folder / "records" / "samples.rank0.jsonl").read_text().splitlines()
    ):
        seen[line["epoch"]] += line["index"]
    order = TrainBatches(48, 3, 0).order
    assert seen == {
        0: order(0)[:47].tolist(),
        1: order(1).tolist(),
    }  # 16 + 2 x 5 + 7 x 3; then 16 x 3
    assert summary_of(folder)["student"]["val"]


# -- settings, data and files between two sessions of a run --------


def stop_at(step: int, recipe: Path, *items: str) -> Path:
    """A run of 4 epochs that failed before an optimizer step; its folder."""
    kill = json.dumps({"class_path": "tests._stop.FailAtStep", "init_args": {"step": step}})
    often = step % 6 or step  # that step is saved; an epoch has six, and its end is saved too
    more = [
        "trainer.max_epochs=4",
        f"checkpoint.every_n_steps={often}",
        "trainer.enable_progress_bar=false",
    ]
    assert train_main([f"recipe={recipe}", *more, *items, f"trainer.callbacks=[{kill}]"]) == 1
    return run_of(recipe)


def steps_of(folder: Path, *items: str) -> list[dict]:
    """Resumes a run; what its optimizer was set to at each step."""
    file = folder / "steps.jsonl"
    file.unlink(missing_ok=True)
    record = json.dumps(
        {"class_path": "tests._stop.RecordOptimizer", "init_args": {"file": str(file)}}
    )
    resumed(folder, *items, f"trainer.callbacks=[{record}]")
    return json_lines(file)


@pytest.mark.parametrize(
    ("before", "after", "stop", "done"),
    [(8, 16, 12, 6), (16, 8, 6, 12), (8, 16, 15, 8)],
    ids=["larger", "smaller", "in the middle of an epoch"],
)
def test_the_schedule_goes_on_by_the_share_of_samples_seen(
    before: int, after: int, stop: int, done: int, recipe: Path
) -> None:
    """``done``: of the steps that the resumed run would have made in all; after half of the samples it is half."""
    folder = stop_at(stop, recipe, f"data.batch_size={before}", "optim.lr=0.5")
    total = 4 * (48 // after)
    rates = [step["lr"] for step in steps_of(folder, f"data.batch_size={after}")]
    assert rates == pytest.approx(
        [0.5 * warmup_cosine(s, 0, total, 0.01) for s in range(done, total)]
    )


def test_a_run_bounded_by_steps_keeps_its_place(recipe: Path) -> None:
    folder = stop_at(5, recipe, "trainer.max_epochs=-1", "trainer.max_steps=10", "optim.lr=0.5")
    rates = [step["lr"] for step in steps_of(folder, "data.batch_size=16")]
    assert rates == pytest.approx([0.5 * warmup_cosine(s, 0, 10, 0.01) for s in range(5, 10)])


def test_the_optimizers_settings_follow_a_resume(recipe: Path) -> None:
    folder = stop_at(12, recipe, "optim.lr=1")
    steps = steps_of(
        folder, "optim.lr=0.1", "optim.weight_decay=0.5", "optim.kwargs={betas: [0.5, 0.6]}"
    )
    assert steps[0]["lr"] == pytest.approx(0.1 * warmup_cosine(12, 0, 24, 0.01))
    assert all(step["decay"] == [0.0, 0.5] and step["betas"] == [0.5, 0.6] for step in steps)
    optim = read_yaml(folder / "config.yaml")["optim"]
    assert (optim["lr"], optim["weight_decay"], optim["kwargs"]) == (
        0.1,
        0.5,
        {"betas": [0.5, 0.6]},
    )


def content(folder: Path) -> dict[str, bytes]:
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != ".lock"]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    """A run that has stopped, with pictures of its own beside it. Not to be changed."""
    place = tmp_path_factory.mktemp("stopped")
    return stop_at(2, write_recipe(place / "tiny.yaml", draw_folder(place / "pictures"), teacher))


def test_a_resume_on_other_data_is_refused(stopped: Path, tmp_path: Path, refusal: Command) -> None:
    """Moved pictures are the same pictures; one that has gone to another class is not."""
    shutil.copytree(stopped.parents[2], tmp_path / "moved")
    folder = tmp_path / "moved" / "runs" / "tiny" / "000"
    pictures = tmp_path / "moved" / "pictures"
    items = [
        f"resume={folder}",
        f"data.source.root={pictures}",
        "trainer.callbacks=[]",
        "trainer.max_epochs=1",
    ]
    assert train_main(items) == 0
    apple, bread = (pictures / "train" / name / "05.jpg" for name in ("apple", "bread"))
    apple.rename(tmp_path / "kept"), bread.rename(apple), (tmp_path / "kept").rename(bread)
    assert (
        "data.source: these are not the training pictures and labels of the resumed run"
        in refusal("train", [*items[:3], "trainer.max_epochs=2"])
    )


def test_two_runs_in_one_folder(stopped: Path, tmp_path: Path) -> None:
    """The second is refused while the first lives, and goes on as soon as that is killed, though its workers live."""
    folder, log = tmp_path / "000", tmp_path / "log"
    shutil.copytree(stopped, folder)
    shutil.rmtree(folder / "records")  # new ones tell that the first one trains
    slow = json.dumps([{"class_path": "tests._stop.Slow", "init_args": {"seconds": 5}}])
    first = start(
        [f"resume={folder}", f"trainer.callbacks={slow}", "data.num_workers=1"], tmp_path / "first"
    )
    while not (folder / "records").is_dir() or not list((folder / "records").glob("phases*")):
        time.sleep(0.05)
    assert status_of(start([f"resume={folder}", "trainer.callbacks=[]"], log)) == 2
    assert f"kd-train: resume: process {first} on " in log.read_text()
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    assert (
        status_of(start([f"resume={folder}", "trainer.callbacks=[]", "trainer.max_epochs=1"], log))
        == 0
    )


def test_torn_files_stop_no_run(recipe: Path) -> None:
    folder = stop_at(8, recipe, "config=audit", "trainer.max_epochs=2")  # the second epoch
    for name in ("metrics.csv", "checkpoints/best.ckpt", "records/samples.rank0.jsonl"):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes((file.read_bytes() if file.exists() else b"")[:40] + b"\xff\0\n7\n")
    # a rate of 0: no later epoch takes the best one's place
    resumed(folder, f"trainer.callbacks={AUDIT}", "optim.lr=0")
    assert (folder / "student.safetensors").is_file()
    assert (folder / "metrics.csv").read_text().splitlines()[-1]


def test_a_report_that_fails_costs_no_student(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Summary, "_student", lambda *_: 1 / 0)
    train_main([f"recipe={recipe}", "trainer.max_epochs=1"])
    assert (run_of(recipe) / "student.safetensors").is_file()


def test_zero_resumes_to_the_end(recipe: Path, tmp_path: Path) -> None:
    items = [*TWO, "data.batch_size=4", "optim.zero=true"]
    for log, first, epochs in (
        ("one", f"recipe={recipe}", 1),
        ("two", f"resume={tmp_path}/runs/tiny/000", 2),
    ):
        for pid in start_ranks(
            [first, *items, f"trainer.max_epochs={epochs}"], tmp_path / f"{log}.log"
        ):
            assert status_of(pid) == 0, (tmp_path / f"{log}.0").read_text()
        said = [(tmp_path / f"{log}.{rank}").read_text() for rank in (0, 1)]
        assert [text.count("run folder:") for text in said] == [1, 0]
    folder = tmp_path / "runs" / "tiny" / "000"
    summary = summary_of(folder)
    assert (summary["status"], summary["epochs"], summary["world_size"]) == ("done", 2, 2)
    assert summary["memory_mb"]["optimizer"] > 0
    assert (folder / "student.safetensors").is_file()


def test_a_resumed_run_replaces_the_best_file_of_the_users_own_checkpoints(recipe: Path) -> None:
    """Its list of files is loaded before the run's folder is in the callback's paths."""
    for place in ({"dirpath": "RUN/best"}, {}):
        arguments = {"monitor": "step", "mode": "max", "filename": "mine-{step}", **place}
        own = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": arguments}
        items = [f"trainer.callbacks={json.dumps([own])}", f"name=to-{len(place)}"]
        assert train_main([f"recipe={recipe}", *items, "trainer.max_epochs=1"]) == 0
        run = recipe.parent / "runs" / "tiny" / f"to-{len(place)}"
        (first,) = run.glob("*/mine-*.ckpt")
        resumed(run, "trainer.max_epochs=2")
        (second,) = run.glob("*/mine-*.ckpt")
        assert second != first


def test_a_given_folder_of_the_users_own_checkpoints_is_kept(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the folder that Lightning would choose where none is given, ``checkpoints`` in the working folder."""
    here = recipe.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    arguments = {"dirpath": "checkpoints", "filename": "mine"}
    own = {"class_path": "ModelCheckpoint", "init_args": arguments}
    items = [f"recipe={recipe}", f"trainer.callbacks={json.dumps([own])}", "trainer.max_epochs=1"]
    assert train_main(items) == 0
    assert [file.name for file in (here / "checkpoints").iterdir()] == ["mine.ckpt"]
    runs = recipe.parent / "runs" / "tiny"
    assert not list(runs.glob("*/checkpoints/mine.ckpt"))
    assert list(runs.glob("*/checkpoints/last.ckpt"))


def test_fsdp_keeps_no_states_of_optimizers_and_checks_the_schedules() -> None:
    """It has read the checkpoint before the module's hook, after the optimizers were made."""
    schedule = SimpleNamespace(state_dict=lambda: {"last_epoch": 3})
    trainer: Any = SimpleNamespace(
        ckpt_path="last.ckpt",
        strategy=SimpleNamespace(restore_checkpoint_after_setup=True),
        fit_loop=SimpleNamespace(state_dict=dict),
        precision_plugin=SimpleNamespace(state_dict=dict),
        lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)],
    )
    resume = Resume.__new__(Resume)
    checkpoint = {"optimizer_states": [{}], "lr_schedulers": [{"last_epoch": 2}]}
    resume.check_states(checkpoint, trainer, nn.Module())
    assert resume._optimizer_states is None
    checkpoint["lr_schedulers"] = [{"last_epoch": -2}]
    with refuses(r"last.ckpt: lr_schedulers.0.last_epoch: must not be"):
        resume.check_states(checkpoint, trainer, nn.Module())

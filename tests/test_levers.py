"""What makes a step faster must not change what it learns; what is found by measuring stays within its limits."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kd.fit_to_machine import _tune, measure
from kd.fit_to_machine.memory import Memory, _shards, saved_bytes
from kd.machine import cores
from kd.models import StudentSpec, build_model, preprocess_for
from kd.optim import OptimSpec
from kd.strategies.ddp import DDP
from kd.strategies.fsdp import FSDP
from tests._forks import run_ranks
from tests._helpers import refuses, write_recipe
from tests._runs import losses, resumed, run, summary_of


def summary(folder: Path) -> dict:
    return summary_of(folder)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_compiled_models_learn_the_same(recipe: Path) -> None:
    items = ["trainer.precision=32-true", "trainer.max_epochs=1", "trainer.limit_val_batches=0"]
    plain = run(recipe, *items)
    fast = run(recipe, *items, "model.student.compile=true", "model.teacher.compile=default")
    for step, value in losses(plain).items():
        assert losses(fast)[step] == pytest.approx(value, rel=1e-4)


def test_channels_last_learns_the_same(recipe: Path) -> None:
    items = ["model.student.arch=resnet10t", "model.student.kwargs={}", "trainer.precision=32-true"]
    items += [
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=3",
        "trainer.limit_val_batches=0",
    ]
    plain, last = run(recipe, *items), run(recipe, *items, "model.student.channels_last=true")
    for step, value in losses(plain).items():
        assert losses(last)[step] == pytest.approx(value, rel=2e-2)
    model = build_model(StudentSpec("resnet10t", channels_last=True), 4, "model.student")
    assert model.conv1[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr,index]
    picture = preprocess_for(model, 32, True)(torch.zeros(2, 3, 40, 40, dtype=torch.uint8))
    assert picture.is_contiguous(memory_format=torch.channels_last)


def test_saved_activations_are_counted_once() -> None:
    """Linear, ReLU, linear: kept are the input, the first output (ReLU's own) and nothing of the parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    found = saved_bytes(model, torch.zeros(10, 8), torch.enable_grad())
    assert found == 4 * 10 * (8 + 32)


def test_the_summary_breaks_memory_down(recipe: Path) -> None:
    items = ["trainer.precision=32-true", "trainer.max_epochs=1"]
    parts = summary(run(recipe, *items))["memory_mb"]
    assert set(parts) == {"teacher", "student", "gradients", "optimizer", "activations"}
    half = summary(run(recipe, *items, "data.batch_size=4"))["memory_mb"]
    assert parts["activations"] == pytest.approx(2 * half["activations"], rel=0.2, abs=0.1)


def counted(**parts: float) -> Memory:
    memory = Memory.__new__(Memory)
    for name, value in {"teacher": 100, "student": 50, "gradients": 50, "optimizer": 100, "per_step": 20,
                        "per_picture": 10, "shards": 1, **parts}.items():  # fmt: skip
        setattr(memory, name, value)
    return memory


def test_what_fits_leaves_head_room() -> None:
    """(800 - 320) / 10 of 1,000 bytes."""
    found = [counted().fits(available) for available in (1000, 1100, 450, 10)]
    assert found == [48, 56, 4, 1]


def test_a_gpus_batch_is_cut_until_it_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 pictures are counted, of which the GPU has room for 33: 64, 51, 40, 32."""
    tried: list[int] = []
    monkeypatch.setattr(measure, "Memory", lambda run: counted())
    monkeypatch.setattr(measure, "available_bytes", lambda device, processes: 1200)
    monkeypatch.setattr(
        measure, "_goes_through", lambda *args: tried.append(args[-1]) or args[-1] <= 33
    )
    strategy = SimpleNamespace(root_device=torch.device("cuda"))
    trainer = SimpleNamespace(strategy=strategy, num_devices=1, world_size=1)
    size, why = measure.largest_batch_size(
        SimpleNamespace(trainer=trainer),  # type: ignore[arg-type]
        SimpleNamespace(epoch_length=1000),  # type: ignore[arg-type]
    )
    assert (size, tried) == (32, [64, 51, 40, 32])
    assert why.endswith("; 32 fewer than counted, as trials have shown")


def test_batch_size_auto(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine the training set is what bounds it; the rate follows by the square root."""
    items = ["data.batch_size=auto", "optim.lr_batch=12", "optim.lr=0.001"]
    folder = run(recipe, *items)
    found = summary(folder)
    assert (found["batch_size"], found["steps"]) == (48, 2)
    assert found["student"]["lr"] == pytest.approx(0.002)
    assert "batch size: 48 a process takes" in capsys.readouterr().out
    resumed(folder, "trainer.max_epochs=3")
    assert summary(folder)["batch_size"] == 48


def test_batch_size_auto_counts_what_sharding_saves(recipe: Path) -> None:
    """ZeRO shares the optimizer's state, FSDP the weights and gradients, too; two ranks agree on a size."""
    for strategy, zero, expected in (
        (DDP(), False, (1, False)),
        (DDP(), True, (2, False)),
        (FSDP(), False, (2, True)),
    ):
        trainer = SimpleNamespace(strategy=strategy, world_size=2)
        student = SimpleNamespace(optim=OptimSpec(zero=zero))
        assert _shards(SimpleNamespace(trainer=trainer, student=student)) == expected  # type: ignore[arg-type]
    items = ["data.batch_size=auto", "optim.lr_batch=8", "config=ddp_2cpu", "config=zero"]
    log = recipe.parent / "log"
    run_ranks([f"recipe={recipe}", *items, "trainer.max_epochs=1"], log)
    assert re.search(r"a process takes [\d,.]+ MB", log.with_suffix(".0").read_text())


def test_num_workers_auto_measures_and_changes_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(recipe, "data.num_workers=auto", "trainer.max_epochs=1")
    found = summary(folder)["num_workers"]
    assert 0 <= found <= cores() - 1
    told = capsys.readouterr().out
    assert re.search(rf"loader processes: {found} \(a step takes \d+ ms with 0", told)
    assert losses(folder) == losses(
        run(recipe, f"data.num_workers={found}", "trainer.max_epochs=1")
    )


@pytest.mark.skipif(cores() < 2, reason="one core leaves nothing to try")
def test_num_workers_auto_tries_on_all_processes_at_once(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures that wait for their disk: a loader process is worth it, and both ranks take as many."""
    monkeypatch.setattr("kd.fit_to_machine.measure.TRIAL_S", 0.3)
    slow = {
        "class_path": "scripts.bench.plants.SlowFolder",
        "init_args": {"root": str(pictures), "sleep_s": 0.02},
    }
    recipe = write_recipe(
        tmp_path / "tiny.yaml", pictures, None, data__batch_size=4, trainer__max_epochs=1
    )
    log = tmp_path / "log.txt"
    run_ranks(
        [
            f"recipe={recipe}",
            "config=ddp_2cpu",
            "data.num_workers=auto",
            f"data.source={json.dumps(slow)}",
        ],
        log,
    )
    said = log.with_suffix(".0").read_text()
    assert "ms with 1, 2 processes at once; at most 1 fit the cores" in said or cores() > 2
    folder = tmp_path / "runs" / "tiny" / "000"
    assert summary(folder)["num_workers"] in (0, 1)  # which is faster is the machine's affair
    headers = [
        json.loads(f.read_text().splitlines()[0])
        for f in sorted((folder / "records").glob("phases.*"))
    ]
    assert [h["num_workers"] for h in headers] == [summary(folder)["num_workers"]] * 2


def test_a_containers_quota_counts_as_its_cores(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    given = cores(quota)  # there is none
    for text, allowed in (
        ("max 100000", given),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("9900000 100000", given),
    ):
        quota.write_text(text + "\n")
        assert cores(quota) == allowed


def test_a_teacher_that_all_processes_hold_together_tries_no_batches() -> None:
    """One process would try batches with it, while the others wait: it would hang."""
    teacher = SimpleNamespace(is_shared_out=True)
    student = SimpleNamespace(optim=SimpleNamespace(lr_batch=8))
    run = SimpleNamespace(student=student, teacher=teacher)
    with refuses("data.batch_size: auto is not available beside placement"):
        _tune(run, SimpleNamespace(auto={"batch_size"}))  # type: ignore[arg-type]

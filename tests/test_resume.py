"""No lost work: runs that are killed, and go on as if nothing had happened."""

import json
from pathlib import Path

import pytest

from kd.cli import train_main
from kd.data.sampler import TrainBatches
from tests._forks import start_ranks, status_of
from tests._helpers import write_recipe
from tests._kills import main as kill_in_a_row

AUDIT = '[{"class_path": "kd.callbacks.audit.Audit"}]'

HARD = {
    "data__augment": {"mixup": 0.8, "cutmix": 1.0},
    "model__ema_decay": 0.9,
    "data__batch_size": 4,
    "checkpoint": {"every_n_steps": 2},
}


def hard_recipe(path: Path, pictures: Path, teacher: Path, **changes: object) -> Path:
    """Everything that carries state from step to step: mixup, EMA, accumulation, a loss with parameters, dropout."""
    recipe = write_recipe(path, pictures, teacher, **{**HARD, **changes})
    import yaml

    config = yaml.safe_load(recipe.read_text())
    config["model"]["distill_losses"]["hint"] = {"class_path": "kd.losses.HintLoss", "init_args": {}}
    config["model"]["taps"] = {"hint": {"student": "norm", "teacher": "norm"}}
    config["model"]["student"]["kwargs"]["proj_drop_rate"] = 0.1
    config["trainer"] |= {"max_epochs": 12, "accumulate_grad_batches": 2}
    recipe.write_text(yaml.safe_dump(config))
    return recipe


ASYNCHRONOUS = "checkpoint.asynchronous=true"


@pytest.mark.parametrize(
    ("workers", "kills", "epochs", "more"),
    [
        (0, 20, 12, []),
        (2, 1, 1, []),
        pytest.param(2, 5, 4, [], marks=pytest.mark.slow),
        pytest.param(2, 20, 12, [], marks=pytest.mark.slow),
        pytest.param(0, 4, 4, [ASYNCHRONOUS], marks=pytest.mark.slow),
    ],
    ids=["twenty", "one, loader workers", "five, loader workers", "twenty, loader workers", "asynchronous"],
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
def test_resume_on_another_number_of_ranks(before: list[str], after: list[str], recipe: Path, tmp_path: Path) -> None:
    """Killed in the middle of the second of three epochs: the same samples in the same global batches."""
    kill = json.dumps({"class_path": "tests._stop.KillAtStep", "init_args": {"step": 9}})
    items = [
        "config=audit",
        *before,
        "trainer.max_epochs=3",
        "checkpoint.every_n_steps=1",
        f"trainer.callbacks+={kill}",
    ]
    for pid in start_ranks([f"recipe={recipe}", *items], tmp_path / "killed.log", 1 if before[0] == ONE[0] else 2):
        assert status_of(pid) != 0
    folder = recipe.parent / "runs" / "tiny" / "000"
    items = [f"resume={folder}", *after, f"trainer.callbacks={AUDIT}"]
    for pid in start_ranks(items, tmp_path / "again.log", 1 if after[0] == ONE[0] else 2):
        assert status_of(pid) == 0, (tmp_path / "again.0").read_text()
    order = TrainBatches(48, 8, 0).order
    assert records(folder) == {
        6 * e + b + 1: (e, set(order(e)[8 * b : 8 * b + 8].tolist())) for e in range(3) for b in range(6)
    }


def test_another_global_batch_in_the_middle_of_an_epoch_sees_each_sample_once(recipe: Path) -> None:
    kill = json.dumps([
        {"class_path": "kd.callbacks.audit.Audit"},
        {"class_path": "tests._stop.FailAtStep", "init_args": {"step": 2}},
    ])  # fmt: skip
    assert train_main([f"recipe={recipe}", "checkpoint.every_n_steps=1", f"trainer.callbacks={kill}"]) == 1
    folder = recipe.parent / "runs" / "tiny" / "000"
    for size in (5, 3):  # 16 seen, then fives, then threes
        stop = json.dumps([
            {"class_path": "kd.callbacks.audit.Audit"},
            {"class_path": "tests._stop.FailAtStep", "init_args": {"step": 4}},
        ])  # fmt: skip
        train_main([f"resume={folder}", f"data.batch_size={size}", f"trainer.callbacks={stop if size == 5 else AUDIT}"])
    seen: dict[int, list[int]] = {0: [], 1: []}
    for line in map(json.loads, (folder / "records" / "samples.rank0.jsonl").read_text().splitlines()):
        seen[line["epoch"]] += line["index"]
    order = TrainBatches(48, 3, 0).order
    assert seen == {0: order(0)[:47].tolist(), 1: order(1).tolist()}  # 16 + 2 x 5 + 7 x 3; then 16 x 3
    assert json.loads((folder / "summary.json").read_text())["student"]["val"]

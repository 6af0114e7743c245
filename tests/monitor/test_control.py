"""The file ``monitor``: what is watched is changed while the job runs, on all ranks at the same batch; NVTX ranges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer

from kd.callbacks.context import RunContext
from kd.monitor import control
from kd.monitor.system import System
from kd.monitor.watched import Watched
from kd.report.records import read_run
from kd.storage.control_file import parse
from tests._forks import start_ranks, status_of
from tests._helpers import Command
from tests._runs import callback, resumed, run_of
from tests._runs import run as trained


class Ask(Callback):
    """Writes a file ``monitor`` before batch 1, and has it looked at without a second's pause."""

    def __init__(self, words: list[str]) -> None:
        control.LOOK_EVERY_S = 0.0
        self.words = words

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and trainer.fit_loop.epoch_loop.total_batch_idx == 1:
            (RunContext.of(trainer).folder / "monitor").write_text("\n".join(self.words))


def asking(words: str) -> str:
    own = callback("tests.monitor.test_control.Ask", words=words.split("\n"))
    return own


def test_two_ranks_follow_at_the_same_batch(recipe: Path) -> None:
    """Six batches an epoch: the ranks meet at its last, 5; a window of 7 and 8, readings every second batch."""
    items = [
        "trainer.devices=2",
        "data.batch_size=4",
        "monitor.health_every=0",
        asking("off\nhealth=2 kernels=2"),
    ]
    log = recipe.parent / "log.txt"
    pids = start_ranks([f"recipe={recipe}", *items], log)
    assert {status_of(pid) for pid in pids} == {0}, log.with_suffix(".0").read_text()
    run = read_run(run_of(recipe))
    assert {(w["rank"], w["first"], w["last"]) for w in run.kernels} == {(0, 7, 8), (1, 7, 8)}
    assert [h["step"] for h in run.health] == [6, 8, 10]
    assert run.counts["train"] == [12] * 4  # the header comes with the first reading
    assert all(h["grad_norm"] > 0 for h in run.health)


def test_the_sampling_changes_its_pace() -> None:
    system = System(Watched(Path()), 0.5)
    for text, on, interval in (
        ("off interval=7", False, 7.0), ("interval=0.1", False, 0.1), ("health=3", False, 0.1), ("on", True, 0.1),
        ("off interval=0", True, 0.1),
    ):  # fmt: skip
        system._obey((text, 1))
        assert (system.on, system.interval_s) == (on, interval), text


def test_words_are_sent_to_a_folder_of_this_machine(
    tmp_path: Path, prints: Command, refusal
) -> None:
    (tmp_path / "config.yaml").touch()
    assert f"{tmp_path / 'monitor'}; a run that still trains follows" in prints(
        "report", [str(tmp_path), "--set", "kernels=5", "off"]
    )
    assert parse((tmp_path / "monitor").read_text()) == {"on": False, "kernels": 5}


def test_words() -> None:
    assert parse("ON\n interval=0.5 health=0 kernels=3 nvtx=off") == {
        "on": True, "interval": 0.5, "health": 0, "kernels": 3, "nvtx": False}  # fmt: skip
    assert parse("") == {}
    for word in ("health", "kernels=0", "interval=nan", "nvtx=maybe", "of", "health=1.5"):
        with pytest.raises(
            ValueError, match=f"'{word}' is not known; known: on, off, interval=SECONDS"
        ):
            parse(word)


def test_phases_and_named_parts_are_ranges_for_nsight(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_now: list[str] = []
    seen: set[tuple[str, ...]] = set()

    def push(name: str) -> None:
        open_now.append(name)
        seen.add(tuple(open_now))

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: open_now.pop())
    monkeypatch.setattr(control, "LOOK_EVERY_S", 0.0)
    trained(recipe, "monitor.nvtx=true", asking("nvtx=off helth=3"), "trainer.max_epochs=1")
    assert {("data",), ("backward",)} <= {names[-1:] for names in seen}
    assert any(
        names[-1] == "teacher" and "loss" in names for names in seen
    )  # inside the training step
    assert not open_now
    assert "kd-train: the file monitor: 'helth=3' is not known" in capsys.readouterr().err
    seen.clear()
    trained(recipe, "trainer.max_epochs=1")
    assert not seen  # where it is asked for, only


@pytest.mark.slow
def test_a_window_of_an_earlier_start_is_not_asked_for_again(recipe: Path) -> None:
    """The words stay in the folder: readings go on at their pace, the window is not made twice."""
    trained(recipe, asking("kernels=1 health=3"), "trainer.max_epochs=1")
    folder = run_of(recipe)
    assert [w["first"] for w in read_run(folder).kernels] == [3]
    resumed(folder, "trainer.callbacks=null", "trainer.max_epochs=2")
    run = read_run(folder)
    assert [w["first"] for w in run.kernels] == [3]
    assert [h["step"] for h in run.health] == [
        0,
        3,
        9,
    ]  # 6 is the first after the resume, before the ranks meet


def test_a_file_that_is_refused_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its path is no word of the file."""
    (tmp_path / "monitor").mkdir()
    monkeypatch.setattr(control, "LOOK_EVERY_S", 0.0)
    parts: Any = None
    looking = control.Control(Watched(tmp_path), parts, parts, parts)
    assert looking._look(tmp_path) == looking._look(tmp_path) == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"kd.Monitor: {tmp_path / 'monitor'}: is a folder; only a regular file is read"

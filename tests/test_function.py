"""``kd.train`` is a function: the program around it keeps its folder, seeds, signals, variables and threads."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import kd
import kd.api
from kd.errors import UserError
from kd.report.records import read_run
from tests._helpers import refuses

SMALL = {"trainer.max_epochs": 1, "data.batch_size": 4, "trainer.enable_progress_bar": False}


def state_of_the_process() -> dict[str, object]:
    """All that a call could change, in values that can be compared."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {
        "folder": Path.cwd(), "environment": dict(os.environ), "signals": handlers,
        "random": random.getstate(), "numpy": str(np.random.get_state()), "torch": torch.get_rng_state().tolist(),  # noqa: NPY002
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(), "gradients": torch.is_grad_enabled(),
    }  # fmt: skip


def test_the_process_is_as_before_after_a_run_an_evaluation_and_a_mistake(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(7)
    before = state_of_the_process()
    settings = {**SMALL, "runs_dir": "here", "trainer.deterministic": True}
    result = kd.train(recipe, settings)
    assert state_of_the_process() == before
    assert (tmp_path / result.folder).resolve().is_relative_to(tmp_path / "here")
    kd.evaluate(result)
    assert state_of_the_process() == before
    with refuses("no key 'lr'"):
        kd.train(recipe, {"lr": 1})
    assert state_of_the_process() == before


def test_the_start_counts_from_the_call(recipe: Path, tmp_path: Path) -> None:
    began = time.time()
    result = kd.train(recipe, {**SMALL, "runs_dir": tmp_path})
    startup = read_run(result.folder).event("startup")
    assert startup is not None and startup["s"] <= time.time() - began


def test_no_thread_sees_another_folder_while_settings_are_parsed(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    visited: list[object] = []
    monkeypatch.setattr(os, "chdir", visited.append)
    with refuses(r"optim\.lr"):
        kd.train(recipe, {**SMALL, "optim.lr": -1})
    assert visited == []


def test_a_second_run_at_once_is_refused_in_a_line(recipe: Path, tmp_path: Path) -> None:
    results: list[object] = []

    def train(name: str) -> None:
        try:
            results.append(
                kd.train(recipe, {**SMALL, "runs_dir": tmp_path / name}).summary["status"]
            )
        except UserError as error:
            results.append(error)

    threads = [threading.Thread(target=train, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done, refused = sorted(results, key=lambda result: isinstance(result, UserError))
    assert done == "done"
    assert str(refused).startswith(
        "kd.train: another run is going on in this program"
    ) and "\n" not in str(refused)
    assert len([folder for folder in ("a", "b") if (tmp_path / folder).exists()]) == 1


def test_two_processes_without_a_file_to_start_them_from(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"trainer.devices": 2, "trainer.strategy": "ddp", "runs_dir": str(tmp_path / "runs")}
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # python -
    monkeypatch.setattr(sys, "argv", ["-"])
    with refuses("^trainer.devices: 2 processes need a program that each of them can start again"):
        kd.train(recipe, {**SMALL, **two})
    assert not (tmp_path / "runs" / "tiny").exists()

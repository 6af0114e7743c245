"""``compile=auto``: which mode is taken, what a resumed run takes over, what happens on a CPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from kd.cli import train_main
from kd.fit_to_machine import compilation
from kd.report.records import read_run
from kd.report.rules import Explained
from tests._runs import losses, run, run_of, summary_of

CPU = torch.device("cpu")
MS = {"": 100.0, "default": 60.0, "reduce-overhead": 20.0}


@pytest.fixture()
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gives each mode the time of :data:`MS`; the modes that were timed, in order."""
    seen: list[str] = []

    def median_ms(call: Callable[[], str], device: torch.device) -> float:
        seen.append(call())
        return MS[seen[-1]]

    monkeypatch.setattr(compilation, "median_ms", median_ms)
    monkeypatch.setattr(compilation, "_launching_share", lambda call, device: 1.0)
    return seen


def ready(mode: str) -> Callable[[], str]:
    return lambda: mode


@pytest.mark.parametrize(
    ("batches", "graphs", "taken", "tried"),
    [
        (2_999, True, "", [""]),
        (3_000, False, "default", ["", "default"]),
        (3_000, True, "reduce-overhead", ["", "default", "reduce-overhead"]),
    ],
)
def test_a_long_run_takes_the_fastest_mode(
    timed: list[str], batches: int, graphs: bool, taken: str, tried: list[str]
) -> None:
    """From 300 s of computing on; CUDA graphs where one process launches for most of the time."""
    mode, why = compilation.fastest_mode(ready, batches, CPU, graphs)
    assert mode == taken
    assert timed == tried
    assert why.startswith(f"{taken or 'false'}: ")
    assert ("60.0 ms default" in why) is (len(tried) > 1)


def test_what_a_compiler_refuses_is_said(timed: list[str]) -> None:
    def refused(mode: str) -> Callable[[], str]:
        if mode == "default":
            raise RuntimeError("no kernel\nand more")
        return ready(mode)

    mode, why = compilation.fastest_mode(refused, 10_000, CPU, graphs=False)
    assert (mode, why) == (
        "",
        "false: 100.0 ms a batch as it is written, default fails (no kernel)",
    )


def test_a_step_slower_compiled_stays(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that gains less than the timing can be wrong by."""
    monkeypatch.setitem(MS, "default", 98.0)
    assert compilation.fastest_mode(ready, 10_000, CPU, graphs=False)[0] == ""


def test_a_cpu_tries_nothing(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(recipe, "trainer.max_epochs=1", "trainer.limit_val_batches=0")
    assert ".compile:" not in capsys.readouterr().out
    assert Explained(read_run(folder)).facts.header["compiled"] is False


@pytest.fixture()
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Lets the CPU count as a GPU on which all runs are long; counts the graphs."""
    counter, given = CompileCounter(), nn.Module.compile
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "may_compile", lambda trainer: True)
    monkeypatch.setattr(compilation, "WORTH_TRYING_S", 0.0)
    monkeypatch.setattr(compilation, "_launching_share", lambda call, device: 0.0)
    monkeypatch.setattr(compilation, "NEAR", 0.0)  # whatever is tried last is taken
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, mode, **more: given(self, backend=counter, **more)
    )
    return counter


def test_a_resumed_run_keeps_the_choice(
    recipe: Path,
    on_a_gpu: CompileCounter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Student and teacher are tried on the run's own pictures, and learn what they learn as they are written."""
    items = ["trainer.precision=32-true", "trainer.limit_val_batches=0"]
    with monkeypatch.context() as patched:
        patched.setattr(compilation, "may_compile", lambda trainer: False)
        plain = run(recipe, *items, "trainer.max_epochs=1")
    capsys.readouterr()
    compiled = run(recipe, *items, "trainer.max_epochs=1")
    lines = capsys.readouterr().out.splitlines()
    told = [line.partition(" ms a batch")[0] for line in lines if ".compile: " in line]
    assert [line.rpartition(" ")[0] for line in told] == [
        "model.student.compile: default:",
        "model.teacher.compile: default:",
    ]
    assert Explained(read_run(compiled)).facts.header["compiled"] is True
    stored = torch.load(compiled / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["kd_compiled"] == {"model.student": "default", "model.teacher": "default"}

    monkeypatch.setattr(compilation, "fastest_mode", None)  # nothing is tried again
    before = on_a_gpu.frame_count
    torch._dynamo.reset()
    assert main_resumed(compiled) == 0
    assert on_a_gpu.frame_count > before
    assert summary_of(compiled)["epochs"] == 2
    for step, value in losses(plain).items():  # the first epoch
        assert losses(compiled)[step] == pytest.approx(value, rel=1e-4)


def main_resumed(folder: Path) -> int:
    return train_main([f"resume={folder}", "trainer.max_epochs=2"])


def test_a_mode_of_a_checkpoint_is_checked(
    recipe: Path, on_a_gpu: CompileCounter, capsys: pytest.CaptureFixture[str]
) -> None:
    run(recipe, "trainer.max_epochs=1")
    file = run_of(recipe) / "checkpoints" / "last.ckpt"
    stored = torch.load(file, weights_only=True)
    torch.save(stored | {"kd_compiled": {"model.student": "fast"}}, file)
    assert main_resumed(run_of(recipe)) == 2
    assert "model.student.compile must be default or reduce-overhead, got 'fast'" in (
        capsys.readouterr().err
    )


def test_where_auto_compiles() -> None:
    """On GPUs alone, and not where numbers are to be equal from run to run."""
    for device, deterministic, expected in (
        ("cpu", False, False),
        ("cuda", False, True),
        ("cuda", True, False),
    ):
        trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
        torch.use_deterministic_algorithms(deterministic)
        try:
            assert compilation.may_compile(trainer) is expected
        finally:
            torch.use_deterministic_algorithms(False)

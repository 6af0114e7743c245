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
from tests._helpers import Command
from tests._runs import losses, run

CPU = torch.device("cpu")
MS = {"": 100.0, "default": 60.0, "reduce-overhead": 20.0}


@pytest.mark.parametrize(
    ("batches", "graphs", "changed", "taken", "tried"),
    [
        (2_999, True, {}, "", 1),
        (3_000, False, {}, "default", 2),
        (3_000, True, {}, "reduce-overhead", 3),
        (3_000, False, {"default": 98.0}, "", 2),  # gains less than the timing can be wrong by
        (3_000, False, {"default": None}, "", 2),
    ],
)
def test_a_long_run_takes_the_fastest_mode(
    monkeypatch: pytest.MonkeyPatch,
    batches: int,
    graphs: bool,
    changed: Any,
    taken: str,
    tried: int,
) -> None:
    """From 300 s of computing on; CUDA graphs where one process launches for most of the time; what a compiler refuses is
    said."""
    times = MS | changed
    seen: list[str] = []

    def ready(mode: str) -> Callable[[], str]:
        seen.append(mode)
        if times[mode] is None:
            raise RuntimeError("no kernel\nand more")
        return lambda: mode

    monkeypatch.setattr(compilation, "median_ms", lambda call, device: times[call()])
    monkeypatch.setattr(compilation, "_launching_share", lambda call, device: 1.0)
    mode, why = compilation.fastest_mode(ready, batches, CPU, graphs)
    assert mode == taken
    assert seen == [*MS][:tried]
    assert why.startswith(f"{taken or 'false'}: ")
    assert why.endswith(", default fails (no kernel)") is (times["default"] is None)


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
    refusal: Command,
) -> None:
    """Student and teacher are tried on the run's own pictures, and learn what they learn as they are written."""
    items = ["trainer.precision=32-true", "trainer.limit_val_batches=0"]
    with monkeypatch.context() as patched:
        patched.setattr(compilation, "may_compile", lambda trainer: False)
        plain = run(recipe, *items, "trainer.max_epochs=1")
    assert ".compile:" not in capsys.readouterr().out
    assert Explained(read_run(plain)).facts.header["compiled"] is False
    compiled = run(recipe, *items, "trainer.max_epochs=1")
    said = capsys.readouterr().out
    for key in ("model.student", "model.teacher"):
        assert f"{key}.compile: default: " in said
    assert Explained(read_run(compiled)).facts.header["compiled"] is True
    file = compiled / "checkpoints" / "last.ckpt"
    stored = torch.load(file, weights_only=True)
    assert stored["kd_compiled"] == {"model.student": "default", "model.teacher": "default"}

    again = [f"resume={compiled}", "trainer.max_epochs=2"]
    torch.save(stored | {"kd_compiled": {"model.student": "fast"}}, file)
    said = refusal("train", again)
    assert "model.student.compile must be default or reduce-overhead, got 'fast'" in said
    torch.save(stored, file)
    monkeypatch.setattr(compilation, "fastest_mode", None)  # nothing is tried again
    before = on_a_gpu.frame_count
    torch._dynamo.reset()
    assert train_main(again) == 0
    assert on_a_gpu.frame_count > before
    for step, value in losses(plain).items():  # the first epoch
        assert losses(compiled)[step] == pytest.approx(value, rel=1e-4)


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

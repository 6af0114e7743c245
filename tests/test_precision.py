"""What a run computes in: by the CPU's instructions, else by the clock, and the same on all processes."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kd.run.build
from kd.cli import train_main
from kd.fit_to_machine.precision import (
    bfloat16_time,
    choose_kernels,
    choose_precision,
    precision_of_cpu,
)
from kd.report.records import read_run
from tests._forks import run_ranks
from tests._runs import run_of


def never() -> float:
    raise AssertionError("the CPU says it")


@pytest.mark.parametrize(
    ("capabilities", "named"),
    [
        (
            {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True, "amx_bf16": False},
            "avx512_bf16",
        ),
        (
            {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True, "amx_bf16": True},
            "amx_bf16",
        ),
        ({"architecture": "aarch64", "neon": True, "bf16": True}, "bf16"),
    ],
)
def test_a_cpu_with_instructions_for_bfloat16_uses_them(
    capabilities: dict[str, object], named: str
) -> None:
    assert precision_of_cpu(capabilities, never) == (
        "bf16-mixed",
        f"precision: bf16-mixed, as this CPU has {named}",
    )


def test_a_factor_of_software_is_told_as_what_it_is() -> None:
    assert precision_of_cpu({}, lambda: 966.3) == (
        "32-true", "precision: 32-true, as this CPU has no bfloat16 instructions",
    )  # fmt: skip


@pytest.mark.parametrize(("times", "precision"), [(5.3, "32-true"), (0.6, "bf16-mixed")])
def test_without_them_the_clock_decides(times: float, precision: str) -> None:
    emulating = {
        "architecture": "x86_64",
        "avx512_f": True,
        "avx512_bw": True,
        "avx512_bf16": False,
        "amx_bf16": False,
    }
    told = (
        f"a product of matrices in bfloat16 takes {times} times as long as in float32 on this CPU"
    )
    assert precision_of_cpu(emulating, lambda: times) == (
        precision,
        f"precision: {precision}, as {told}",
    )
    assert precision_of_cpu({}, lambda: times)[0] == precision  # a torch that does not say


def test_the_measurement_is_quick_and_follows_the_instructions() -> None:
    assert bfloat16_time() > 0  # 0.3 to 110 were seen
    own = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    assert choose_precision("cpu") == precision_of_cpu(own, bfloat16_time)


def with_a_cpu_of_its_own(items: list[str]) -> int:
    """A rank of kd-train, whose machine computes in another precision than that of the other rank."""
    chosen = ("32-true", "bf16-mixed")[int(os.environ["LOCAL_RANK"])]
    kd.run.build.choose_precision = lambda accelerator: (chosen, "")
    return train_main(items)


def test_all_processes_take_rank_zeros_precision(recipe: Path) -> None:
    items = [f"recipe={recipe}", "config=ddp_2cpu", "trainer.max_epochs=1", "data.batch_size=4"]
    run_ranks(items, recipe.parent / "log", program=with_a_cpu_of_its_own)
    run = read_run(run_of(recipe))
    assert [header["precision"] for header in run.headers.values()] == ["32-true", "32-true"]
    assert run.summary["precision"] == "32-true"


@pytest.mark.parametrize(("device", "kind", "left_open", "expected"), [
    ("cuda", "cnn", True, ("high", True)), ("cuda", "cnn", False, ("high", False)),
    ("cuda", "vit", True, ("high", False)), ("cpu", "cnn", True, ("highest", False)),
])  # fmt: skip
def test_a_gpu_multiplies_in_tf32_and_a_cnn_tries_its_convolutions(
    device: str,
    kind: str,
    left_open: bool,
    expected: tuple[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    count = 2 if kind == "cnn" else 1
    model = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 3) for _ in range(count)))
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        choose_kernels(trainer, [model], "high", left_open)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == expected
    finally:
        torch.set_float32_matmul_precision(before)

"""A GPU that torch has no code for is refused by name, before anything is loaded."""

import pytest
import torch

from kd.errors import UserError
from kd.fit_to_machine.oldest_gpu import check_gpus, has_code

OF_TORCH_2_11 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 0), False),
        ((6, 1), False),
        ((7, 5), True),
        ((8, 9), True),
        ((9, 0), True),
        ((13, 0), True),
        ((11, 0), False),
    ],
)
def test_what_has_code(capability: tuple[int, int], runs: bool) -> None:
    assert has_code(capability, OF_TORCH_2_11) is runs


def test_code_of_one_architecture_alone_runs_on_no_other() -> None:
    assert has_code((9, 0), ["sm_90a"]) and not has_code((9, 1), ["sm_90a"])


@pytest.fixture()
def a_v100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: OF_TORCH_2_11)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla V100-SXM2-16GB")


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "cuda"])
def test_a_v100_is_refused(a_v100: None, accelerator: str) -> None:
    with pytest.raises(
        UserError, match=r"trainer.accelerator: Tesla V100-SXM2-16GB \(compute capability 7.0\)"
    ):
        check_gpus(accelerator)


def test_names_of_another_form_refuse_no_gpu(a_v100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch lists AMD's."""
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a", "gfx942"])
    check_gpus("auto")


def test_beside_it_the_cpu_trains(a_v100: None) -> None:
    check_gpus("cpu")

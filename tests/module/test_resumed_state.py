"""States of a stranger's checkpoint are compared with what they are for: torch's fused steps write past them."""

import copy
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.optim import get_optimizer_class, list_optimizers
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from kd.errors import UserError
from kd.models.sharding import shard
from kd.module.resumed_state import check_form, check_optimizers
from kd.optim import OptimSpec, build_optimizer, group_settings, take_words
from tests._forks import start, status_of
from tests._helpers import refuses
from tests._runs import run

NEED_A_GPU = ("bnb", "fused")  # bitsandbytes and apex
NAMES = [
    name for name in list_optimizers() if not name.startswith(NEED_A_GPU) and name != "adahessian"
]
ONE_OF_A_CLASS = list(
    {get_optimizer_class(name, bind_defaults=False): name for name in reversed(NAMES)}.values()
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 6), nn.LayerNorm(6))


def trained(name: str, model: nn.Module, steps: int = 3, **settings: Any) -> Optimizer:
    optimizer = build_optimizer([model], OptimSpec(name=name, lr=1e-3, **settings))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4, 4)).square().mean().backward()
        optimizer.step()
    return optimizer


def wrong_tensors(value: Tensor) -> Iterator[object]:
    """What must not be in the place of a state's tensor."""
    yield value.to(torch.int64) if value.is_floating_point() else value.float()
    yield value.to(torch.complex64)
    yield value.to(torch.bool)
    yield value.new_zeros(0)
    yield value.new_zeros(*value.shape, 2)
    yield (
        value.new_zeros(*(size + 1 for size in value.shape)) if value.dim() else value.new_zeros(1)
    )
    yield value.new_zeros(1, 1, 1, 1, 1)
    yield torch.full_like(value, float("nan")) if value.is_floating_point() else None
    yield torch.full_like(value, float("inf")) if value.is_floating_point() else None
    yield from ("text", None, 0.5, [], {})


GONE = object()
"""In the place of a value: it is missing."""
GROUP = ("param_groups", 0)
WRONG_OF_ALL: list[tuple[tuple[str | int, ...], object]] = [
    (("state", 99), {}),
    (("state", "words"), {}),
    (("param_groups", -1), GONE),
    ((*GROUP, "surplus"), 1),
    ((*GROUP, "lr"), torch.zeros(5)),
    ((*GROUP, "lr"), float("nan")),
    ((*GROUP, "weight_decay"), "much"),
    (("state",), []),
    (("param_groups",), {}),
]
"""Places in a state, and what must not be there."""


def changed(state: dict[str, Any], place: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A copy of a state with another value in a place."""
    copied = copy.deepcopy(state)
    *above, last = place
    node: Any = copied
    for part in above:
        node = node[part]
    if value is GONE:
        del node[last]
    else:
        node[last] = value
    return copied


def wrong_states(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same state with one wrong part."""
    for number, content in list(state["state"].items())[:3]:
        own = ("state", number)
        for key, value in content.items():
            wrong: Iterable[object] = (float("nan"), -1, "text", torch.zeros(3), [], 2**60)
            if isinstance(value, Tensor):
                wrong = wrong_tensors(value)
            if isinstance(value, Tensor | int | float):
                yield from (changed(state, (*own, key), each) for each in wrong)
            if len(content) > 1:  # an empty state is that of a parameter without a gradient so far
                yield changed(state, (*own, key), GONE)
        yield changed(state, (*own, "surplus"), torch.zeros(1))
        yield changed(state, own, [1])
        yield changed(state, own, None)
    numbers = state["param_groups"][0]["params"]
    for given in ([*numbers, 0], [-1] * len(numbers)):
        yield changed(state, (*GROUP, "params"), given)
    for place, value in WRONG_OF_ALL:
        yield changed(state, place, value)


def check(optimizer: Optimizer, state: object, model: nn.Module) -> None:
    weights = {name: value.detach() for name, value in model.named_parameters()}
    check_optimizers([optimizer], [state], weights, model, "resume: last.ckpt")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("kron")) for n in NAMES]
)
def test_each_optimizer_takes_its_own_state(name: str) -> None:
    model = network()
    state = copy.deepcopy(trained(name, model, steps=2).state_dict())
    empty = trained(name, model, steps=0)
    check(empty, empty.state_dict(), model)  # of a checkpoint before the first step
    check(empty, state, model)
    empty.load_state_dict(state)


def refuse_all(optimizer: Optimizer, state: dict[str, Any], model: nn.Module) -> int:
    """How many wrong states are refused; one that is not is loaded, and torch steps with it."""
    refused = 0
    for wrong in wrong_states(state):
        try:
            check(optimizer, wrong, model)
        except UserError as error:
            assert str(error).startswith("resume: ") and len(str(error).splitlines()) == 1
            refused += 1
            continue
        optimizer.load_state_dict(wrong)
        optimizer.step()
        raise AssertionError(f"not refused: {wrong['param_groups']}")
    return refused


def in_a_group(folder: Path) -> None:
    """Makes this process a group of its own, as strategies that shard need one."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)


def of_zero(folder: Path) -> tuple[Optimizer, dict[str, Any], nn.Module]:
    """``optim.zero``: torch's ZeroRedundancyOptimizer around AdamW, with its consolidated state."""
    in_a_group(folder)
    model = network()
    optimizer = trained("adamw", model, zero=True)
    assert isinstance(optimizer, ZeroRedundancyOptimizer)
    optimizer.consolidate_state_dict(0)
    return optimizer, copy.deepcopy(optimizer.state_dict()), model


def of_fsdp(folder: Path) -> tuple[Optimizer, dict[str, Any], nn.Module]:
    """FSDP2's shards, and the whole state that a checkpoint has of them."""
    in_a_group(folder)
    state = copy.deepcopy(trained("adamw", network()).state_dict())
    model = network()
    shard(model, init_device_mesh("cpu", (1,)))
    optimizer = build_optimizer([model], OptimSpec(name="adamw", lr=1e-3))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return optimizer, state, model


@pytest.mark.parametrize("make", [of_zero, of_fsdp])
def test_wrong_states_of_shards_end_no_process(make: Any, tmp_path: Path) -> None:
    """In a child: a state that gets through is stepped with, and torch writes past it."""

    def work(_: list[str]) -> int:
        optimizer, state, model = make(tmp_path)
        check(optimizer, state, model)
        assert refuse_all(optimizer, state, model) > 80
        return 0

    log = tmp_path / "log"
    assert status_of(start([], log, program=work)) == 0, log.read_text()[-1500:]


def test_wrong_states_of_each_optimizer_end_no_process(tmp_path: Path) -> None:
    """The same of each class of optimizers, fused where it can be, in one child, which must survive all of them."""

    def work(_: list[str]) -> int:
        for name in ONE_OF_A_CLASS:
            if name.startswith("kron"):
                continue
            for fused in (False, True) if name in ("adam", "adamw", "sgd") else (False,):
                model = network()
                options = {"kwargs": {"fused": True}} if fused else {}
                state = copy.deepcopy(trained(name, model, **options).state_dict())
                assert refuse_all(trained(name, model, steps=0, **options), state, model) > 15, name
        return 0

    log = tmp_path / "log"
    assert status_of(start([], log, program=work)) == 0, log.read_text()[-1500:]


def test_a_resumed_run_may_have_other_settings() -> None:
    model = network()
    state = trained("momentum", model, kwargs={"momentum": 0.0}).state_dict()
    check(
        trained("momentum", model, steps=0), state, model
    )  # a resumed run may change its settings
    check(
        trained("adamw", model, steps=0, kwargs={"betas": (0.8, 0.9)}),
        trained("adamw", model).state_dict(),
        model,
    )


@pytest.mark.parametrize(
    "name, kwargs", [("adamw", {"amsgrad": True}), ("rmsprop", {"centered": True, "momentum": 0.9})]
)
def test_kwargs_of_another_state_are_refused(name: str, kwargs: dict[str, Any]) -> None:
    """It failed with a KeyError in the first step."""
    model = network()
    state = trained(name, model, kwargs={"momentum": 0.9} if name == "rmsprop" else {}).state_dict()
    with refuses(r"state of 0.\w+: has no "):
        check(trained(name, model, steps=0, kwargs=kwargs), state, model)


def test_a_checkpoints_words_do_not_stay() -> None:
    """``amsgrad`` without its state fails in the first step."""
    model = network()
    state = trained("adamw", model).state_dict()
    for group in state["param_groups"]:
        group.update(amsgrad=True, fused=None, lr=0.5)
    optimizer = trained("adamw", model, steps=0)
    own = group_settings(optimizer)
    check(optimizer, state, model)
    optimizer.load_state_dict(state)
    take_words(optimizer, own)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5] * len(own)
    assert [group["fused"] for group in optimizer.param_groups] == [group["fused"] for group in own]


@pytest.mark.parametrize("name", ["adamw", "momentum", "adan", "lion", "nadam", "rmsprop"])
def test_a_weight_without_axes_may_have_negative_moments_but_no_negative_steps(name: str) -> None:
    """``skipinit_gain`` of timm's dm_nfnet_*, a scalar ``logit_scale``."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.zeros(()))

        def forward(self, pictures: Tensor) -> Tensor:
            return self.gain * pictures.abs() + 1  # its loss falls with the gain or rises, by turns

    model = Scaled()
    state = trained(name, model, steps=1).state_dict()
    (content,) = state["state"].values()
    for key, value in content.items():
        if isinstance(value, Tensor) and key not in ("step", "mu_product"):
            content[key] = -value.abs() - 0.5
    empty = trained(name, model, steps=0)
    check(empty, state, model)
    if isinstance(content.get("step"), Tensor):
        content["step"] = torch.tensor(-1.0)
        with refuses(r"gain\.step: must not be negative, got float32"):
            check(empty, state, model)


def test_the_form_of_other_states() -> None:
    own = {"ready": 3, "deep": {"lr": [0.1, 0.2], "on": True}, "none": None}
    check_form({"ready": 9, "deep": {"lr": [5, 0.5]}, "none": 4.0}, own, "loops")
    for wrong in ({"ready": 1.5}, {"ready": -1}, {"ready": "3"}, {"other": 1}, {"deep": {"lr": [1.0]}}, {"deep": []},
                  {"deep": {"lr": [float("nan"), 0.1]}}, {"none": "x"}, {"none": torch.zeros(1)}, {"ready": 2**60},
                  {"ready": 10**400}, {"deep": {"on": 1}}, []):  # fmt: skip
        with refuses(r"^loops"):
            check_form(wrong, own, "loops")


def written(folder: Path) -> dict[Path, int]:
    """When each file of a run was written, without its lock and the samples of the machine."""
    left_out = {".lock", "records"}
    files = (path for path in folder.rglob("*") if left_out.isdisjoint(path.parts))
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


def test_a_resumed_run_refuses_them_in_one_line(recipe: Path, tmp_path: Path) -> None:
    """Fused AdamW wrote past a moment of one number: status 139, or a damaged heap later."""
    folder = run(recipe, "trainer.max_epochs=1")
    file = folder / "checkpoints" / "last.ckpt"
    content = torch.load(file, weights_only=True)
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()
    moments = {n: state["exp_avg"] for n, state in content["optimizer_states"][0]["state"].items()}
    number = max(moments, key=lambda number: moments[number].numel())
    assert moments[number].numel() > 100
    moment = ("optimizer_states", 0, "state", number, "exp_avg")
    changes: list[tuple[str, tuple[str | int, ...], object]] = [
        ("exp_avg: must be float32", moment, torch.zeros(1)),
        ("fit_loop.epoch_progress", ("loops", "fit_loop", "epoch_progress"), "x"),
        ("lr_schedulers", ("lr_schedulers", 0, "step"), 1),
        ("loops: must be a mapping", ("loops",), [1]),
    ]
    for message, place, value in changes:
        torch.save(changed(content, place, value), file)
        before = written(folder)
        log = tmp_path / f"log{len(list(tmp_path.glob('log*')))}"
        assert status_of(start([f"resume={folder}", "trainer.max_epochs=2"], log)) == 2
        printed = log.read_text()
        assert f"resume: {file.resolve()}: " in printed
        assert message in printed
        assert "Traceback" not in printed
        assert before == written(folder)

"""Strategies that cut the student over the processes, and those that do not, by their protocol."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.distributed as dist
from pytorch_lightning import Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import kd
from kd.distill.sharding import Sharding
from kd.models.sharding import is_sharded, shard
from kd.optim import OptimSpec
from kd.strategies.ddp import DDP
from kd.strategies.deepspeed import DeepSpeed
from kd.strategies.fsdp import FSDP
from tests._forks import start, status_of
from tests._helpers import refuses


def test_who_shards_says_so_and_refuses_what_does_not_go_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "kd.strategies.deepspeed.find_spec", lambda name: name
    )  # it is made without the package
    found = {
        strategy: isinstance(strategy, Sharding) for strategy in (DDP(), FSDP(), DeepSpeed(stage=3))
    }
    assert list(found.values()) == [False, True, True]
    _, fsdp, deepspeed = found
    monkeypatch.setattr(FSDP, "device_mesh", {"data_parallel": None})
    assert (fsdp.clips_gradients, deepspeed.clips_gradients) == (False, True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    for refused, ema, zero in (("model.ema_decay", 0.9, False), ("optim.zero", None, True)):
        module = kd.DistillationModule(
            model, task=kd.Classification(3), ema_decay=ema, optim=OptimSpec(zero=zero)
        )
        for strategy in (fsdp, deepspeed):
            with refuses(refused):
                strategy.shard(module.student)


def test_fsdp_refuses_simkd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classifier is set from the projection, of which each process would have a part."""
    monkeypatch.setattr(FSDP, "device_mesh", {"data_parallel": None})
    student, teacher = (timm.create_model("resnet10t", num_classes=5) for _ in range(2))
    losses = {"simkd": kd.losses.SimKDLoss()}
    module = kd.DistillationModule(
        student, teacher, task=kd.Classification(5), losses=losses, task_loss_weight=0.0
    )
    with refuses("model.distill_losses: SimKDLoss .* trainer.strategy=ddp"):
        FSDP().shard(module.student)


def test_students_in_shards_are_validated_and_fitted_again(tmp_path: Path) -> None:
    """Lightning configures the model in each of its calls, and torch's ``fully_shard`` refuses a second time."""

    def work(_: list[str]) -> int:
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3))
        module = kd.DistillationModule(model, task=kd.Classification(3))
        pictures = TensorDataset(torch.rand(8, 3, 2, 2), torch.arange(8) % 3)
        loader = DataLoader(pictures, batch_size=4)
        trainer = Trainer(
            strategy=FSDP(),
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader, loader)
        assert is_sharded(module.student.model)
        trainer.validate(module, loader)
        trainer.fit(module, loader, loader)
        return 0

    log = tmp_path / "log"
    assert status_of(start([], log, program=work)) == 0, log.read_text()[-1500:]


def test_weights_travel_in_the_dtype_that_autocast_gives_them(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        dtypes = []
        model[0].register_forward_hook(lambda module, *_: dtypes.append(module.weight.dtype))
        shard(model, init_device_mesh("cpu", (1,)), gathered_as=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            answer = model(torch.ones(2, 4))
        answer.float().sum().backward()
        assert dtypes == [torch.bfloat16]
        kept = [parameter for parameter in model.parameters()]
        assert (
            {p.dtype for p in kept}
            == {p.grad.dtype for p in kept if p.grad is not None}
            == {torch.float32}
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("change", ["missing", "unknown", "both"])
def test_other_names_of_weights_are_refused_as_without_shards(change: str) -> None:
    """torch's ``set_model_state_dict`` takes this run's own value for a weight that a checkpoint lacks."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weights = model.state_dict()
    if change in ("missing", "both"):
        del weights["1.bias"], weights["0.weight"]
    if change in ("unknown", "both"):
        weights["2.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as without_shards:
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).load_state_dict(weights)
    strategy = FSDP()
    strategy._model = model
    content = {"state_dict": weights, "optimizer_states": []}
    strategy.checkpoint_io = SimpleNamespace(load_checkpoint=lambda _: content)  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as in_shards:
        strategy.load_checkpoint("last.ckpt")
    assert str(in_shards.value) == str(without_shards.value)

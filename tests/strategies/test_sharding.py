"""Strategies that cut the students over the processes, and those that do not, by their protocol."""

import pytest
from torch import nn

import kd
from kd.distill.sharding import Sharding
from kd.errors import UserError
from kd.optim import OptimSpec
from kd.strategies.ddp import DDP
from kd.strategies.deepspeed import DeepSpeed
from kd.strategies.fsdp import FSDP


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
            with pytest.raises(UserError, match=refused):
                strategy.shard(module.students)

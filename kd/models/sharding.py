"""A model in shards over the processes (FSDP2): each keeps 1/N of the weights and gathers a block when it is needed."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that a model repeats, inner before outer.

    They are the members with parameters of a ``ModuleList`` or ``Sequential`` that has two or more of their class.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)), nn.ReLU())
    >>> [type(block).__name__ for block in repeated_blocks(model)]
    ['Conv2d', 'Conv2d']
    """
    for parent in reversed(list(model.modules())):
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        counts = Counter(type(member) for member in parent)
        for member in parent:
            has_parameters = next(member.parameters(), None) is not None
            if counts[type(member)] > 1 and has_parameters:
                yield member


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    frozen: bool = False,
    gathered_as: torch.dtype | None = None,
) -> None:
    """Shards a model in place over ``mesh``, block by block; called on every rank.

    Args:
        model: to shard; from now on all processes must call it equally often.
        mesh: of one dimension.
        frozen: there is no backward pass: what is outside the blocks is freed after the forward pass as well.
        gathered_as: the dtype in which weights travel and compute, which autocast would give them anyway: with
            bfloat16 half as much travels. Gradients are averaged over the processes in float32, and the weights stay in
            their own dtype. None: weights travel as they are, and gradients in the dtype of the weights.
    """
    policy = MixedPrecisionPolicy()
    if gathered_as is not None:
        # inputs stay as they are: autocast casts them operator by operator, and keeps norms in float32
        policy = MixedPrecisionPolicy(
            gathered_as, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # weights in channels-last order can't be cut
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    own: dict[str, Any] = {}  # torch decides
    if frozen:
        own = {"reshard_after_forward": True}
    fully_shard(model, mesh=mesh, mp_policy=policy, **own)


def is_sharded(model: nn.Module) -> bool:
    """Whether :func:`shard` was called on the model."""
    return isinstance(model, FSDPModule)


def forget_forward(model: nn.Module) -> None:
    """Clears the order of blocks that FSDP notes in a forward pass for a backward pass, which does not come.

    Without it each pass would keep 50 bytes a block.

    Args:
        model: a sharded one after its forward; on any other nothing is done.
    """
    reset = getattr(model, "reset_iter_state", None)
    if reset is not None:
        reset()


def own(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor is returned as it is.

    FSDP2 cuts the first axis, ``(D0 / processes, ...)``; DeepSpeed's stage 3 cuts the flattened tensor, so that part has
    one axis. A part may be empty.
    """
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    part = getattr(tensor, "ds_tensor", None)
    size = getattr(tensor, "ds_numel", 0)
    if part is None:
        return tensor
    # Beyond the whole tensor's size there is padding, of any value.
    return part[: max(0, size - part.numel() * distributed.get_rank())]

"""FSDP2 for the student: weights, gradients and optimizer state in shards over the processes."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.optim import Optimizer

from kd.distill.student import Student
from kd.errors import UserError
from kd.lightning_internals import ShardedDataParallel
from kd.models.sharding import is_sharded, shard
from kd.module.resumed_state import check_optimizers, check_weights


class FSDP(ShardedDataParallel):
    """Every block of the student, the rest of it, and every loss with weights to train is sharded over all processes.

    Its checkpoints are those of the other strategies: a run resumes with any of them.

    Args:
        **kwargs: ``process_group_backend`` and ``timeout``, as for Lightning's ``ModelParallelStrategy``.
    """

    # see kd.distill.sharding.Sharding
    shards_weights = True
    clips_gradients = False  # kd.module.pace.clip does

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **kwargs)

    def shard(self, student: Student) -> None:
        """Shards the student, and the losses that have weights to train, in place; nothing where the student is sharded
        already.

        The module calls it (``configure_model``) on every rank, in a fit before the optimizer is made, and again where the
        same student is validated, tested or fitted afterwards. Under ``bf16-mixed`` the student's weights are gathered in
        bfloat16, which halves what is sent; the shards themselves stay float32.

        Raises:
            UserError: a moving average, ``optim.zero``, or SimKD.
        """
        if student.average is not None:
            raise UserError("model.ema_decay: must be null with FSDP, which shards the student")
        if student.optim.zero:
            raise UserError(
                "optim.zero: FSDP shards the optimizer's state already; leave config=zero out"
            )
        if student.objective.takeover is not None:  # reads the whole projection
            raise UserError(
                "model.distill_losses: SimKDLoss does not run with FSDP, which shards its projection; set "
                "trainer.strategy=ddp"
            )
        if is_sharded(student.model):  # in an earlier fit; torch can't shard it twice
            return
        mesh = self.device_mesh["data_parallel"]
        mixed = self.precision_plugin.precision == "bf16-mixed"
        gathered_as = None
        if mixed:
            gathered_as = torch.bfloat16
        shard(student.model, mesh, gathered_as=gathered_as)
        for loss in student.objective.losses.values():
            if any(parameter.requires_grad for parameter in loss.parameters()):
                shard(loss, mesh)  # a loss computes in float32, outside of autocast

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state on rank 0, in the form of a plain optimizer's ``state_dict``: parameters by number, in
        the order of the groups.

        Lightning calls it for a checkpoint. All ranks must call it: each state is gathered from all of them.

        Returns:
            ``state`` (parameter's number -> name of the state -> tensor on the CPU) and ``param_groups`` (settings,
                with the numbers under ``params``); empty on other ranks.
        """
        assert self.model is not None
        options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        plain = optimizer
        if isinstance(optimizer, LightningOptimizer):
            plain = optimizer.optimizer
        state = state_dict.get_optimizer_state_dict(self.model, plain, options=options)
        if not state.get("param_groups"):
            return state  # empty: another rank
        return _renamed(state, {name: i for i, name in enumerate(_names(state))})

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads weights and optimizer state of any strategy's checkpoint into the shards; Lightning calls it on every rank.

        Raises:
            UserError: weights of another kind than this run's (fractions, whole numbers), or optimizer states that do not
                fit.
            RuntimeError: weights are missing, have unknown names or other shapes; torch's message, as with the other
                strategies.

        Returns:
            The whole checkpoint, of which Lightning takes the rest (loops, callbacks, schedules).
        """
        assert self.model is not None
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path)
        weights = checkpoint["state_dict"]
        states = checkpoint["optimizer_states"]
        place = f"resume: {checkpoint_path}"
        _check_names(weights, self.model)
        check_weights(weights, self.model, place)
        check_optimizers(self.optimizers, states, weights, self.model, place)
        options = state_dict.StateDictOptions(full_state_dict=True)
        state_dict.set_model_state_dict(self.model, weights, options=options)
        by_parameter = {parameter: name for name, parameter in self.model.named_parameters()}
        for optimizer, state in zip(self.optimizers, states, strict=True):
            order = []  # names of the parameters, in the order of this run's optimizer
            for group in optimizer.param_groups:
                for p in group["params"]:
                    order.append(by_parameter[p])
            named = _renamed(state, dict(zip(_names(state), order, strict=True)))
            state_dict.set_optimizer_state_dict(self.model, optimizer, named, options=options)
        return checkpoint


def _check_names(weights: dict[str, Any], model: nn.Module) -> None:
    """Checks that a checkpoint has exactly the names of the model's weights: ``set_model_state_dict`` would silently keep
    this run's value of a weight that is missing.

    Raises:
        RuntimeError: weights are missing or unknown; the text is that of torch's ``load_state_dict``.
    """
    own = state_dict.get_model_state_dict(model)  # set_model_state_dict's names; shards stay shards
    missing = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in own]
    errors = []
    if missing:
        listed = ", ".join(f'"{name}"' for name in missing)
        errors.append(f"Missing key(s) in state_dict: {listed}. ")
    if unknown:
        listed = ", ".join(f'"{name}"' for name in unknown)
        errors.append(f"Unexpected key(s) in state_dict: {listed}. ")
    if errors:
        head = f"Error(s) in loading state_dict for {type(model).__name__}:"
        raise RuntimeError("\n\t".join([head, *errors]))


def _names(state: dict[str, Any]) -> list[Any]:
    """The parameters of an optimizer's state, by name or number as it has them, in the order of its groups."""
    return [name for group in state["param_groups"] for name in group["params"]]


def _renamed(state: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    """A copy of an optimizer's state with other names for its parameters; its tensors are shared.

    Args:
        state: ``state`` by parameter, and ``param_groups``.
        new: old name or number -> new one, of each parameter.
    """
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [new[name] for name in group["params"]]})
    return {
        "state": {new[name]: value for name, value in state["state"].items()},
        "param_groups": groups,
    }

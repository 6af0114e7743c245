"""DeepSpeed's ZeRO for the student: optimizer state, gradients and weights in shards, in the usual checkpoints."""

import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from lightning_fabric.plugins.collectives.torch_collective import default_pg_timeout
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from kd.distill.student import Student
from kd.errors import RunError, UserError, needs_extra
from kd.lightning_internals import run_closure

if TYPE_CHECKING:
    import deepspeed

PRECISIONS = ("32-true", "bf16-mixed")
"""The values of ``trainer.precision`` that it allows: weights are in float32 in both."""


class DeepSpeed(DDPStrategy):
    """The student and every loss with parameters under DeepSpeed's engine; the teacher stays outside of it.

    It learns what DDP learns: weights are in float32 (bf16-mixed is torch's autocast), gradients are averaged in
    float32, an accumulation ends with the epoch. Its checkpoints are those of the other strategies (whole tensors, the
    optimizer's state by number): a run resumes with any of them. Lightning's own ``DeepSpeedStrategy`` does none of this: it
    casts weights and batches, and writes a folder that is read with pickle.

    Source: ZeRO, Rajbhandari et al., arXiv 1910.02054.

    Args:
        stage: what is in shards: 1 the optimizer's state, 2 gradients as well, 3 weights as well.
        zero: further keys of the ``zero_optimization`` section of DeepSpeed's configuration, for example
            ``{"offload_optimizer": {"device": "cpu"}}``.
        process_group_backend: default: nccl on GPUs, gloo on CPUs.
        timeout: after which a collective fails.

    Raises:
        UserError: DeepSpeed is not installed, or ``zero`` holds ``stage``.
    """

    shards_weights = False  # of stage 3 it does; the count of memory leaves that out
    clips_gradients = True  # in its step; see kd.distill.sharding.Sharding

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        zero: dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        """Stores the arguments, and checks that DeepSpeed is installed without importing it; arguments and errors as of the
        class.
        """
        if zero and "stage" in zero:
            raise UserError(
                f"trainer.strategy.zero.stage: is trainer.strategy.stage, got {zero['stage']}"
            )
        if find_spec("deepspeed") is None:
            raise UserError(f"trainer.strategy: DeepSpeed {needs_extra('deepspeed')}")
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.stage = stage
        self._zero = zero or {}
        # the trained parameters of each group; the engine puts flat shards into the groups in their place
        self._trained: list[list[nn.Parameter]] = []

    @property
    def engine(self) -> "deepspeed.DeepSpeedEngine":
        """DeepSpeed's engine around the module: ``self.model`` after :meth:`setup_optimizers`."""
        return self.model

    def shard(self, student: Student) -> None:
        """Checks the student, but does not shard it yet: the engine needs the optimizer for that (:meth:`setup_optimizers`).

        The module calls it (``configure_model``) on every rank, in a fit before the optimizer is made.

        Raises:
            UserError: a moving average under stage 3, or ``optim.zero``.
        """
        if student.average is not None and self.stage == 3:
            raise UserError("model.ema_decay: must be null with stage 3, which shards the student")
        if student.optim.zero:
            raise UserError(
                "optim.zero: DeepSpeed shards the optimizer's state already; leave config=zero out"
            )

    def configure_ddp(self) -> None:
        """Does nothing: DeepSpeed's engine, made with the optimizer, takes the place of torch's DDP."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizer, and DeepSpeed's engine from it and the module.

        Lightning calls it on every rank, after the weights of a checkpoint were loaded. Afterwards ``self.model`` is the
        engine and ``self.optimizers`` holds its sharded optimizer. In the environment ``LOCAL_RANK`` and
        ``DS_ACCELERATOR`` are set where they were not.

        Raises:
            UserError: an optimizer, a precision or a clipping that does not work here (:meth:`_check`).
        """
        super().setup_optimizers(trainer)
        (optimizer,) = self.optimizers
        self._check(trainer, optimizer)
        self._trained = [list(group["params"]) for group in optimizer.param_groups]
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank))
        # else DeepSpeed would use a GPU of the machine, also where the run trains on the CPU
        os.environ.setdefault("DS_ACCELERATOR", self.root_device.type)
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # else DeepSpeed takes the GPU that is numbered as the local rank, whatever trainer.devices says
        place = None
        if self.root_device.type == "cuda":
            place = Namespace(device_rank=self.root_device.index)
        self.model, sharded, _, _ = deepspeed.initialize(
            args=place,
            model=self.model,
            optimizer=optimizer,
            config=self._config(trainer),
            dist_init_required=False,
        )
        self.engine.set_gradient_accumulation_boundary(True)
        self.optimizers = [sharded]

    def _check(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Refuses an optimizer, a precision or a clipping that does not work with DeepSpeed here.

        Raises:
            UserError: an optimizer other than AdamW, Adam and SGD, a precision outside :data:`PRECISIONS`, or clipping by
                value; names the key.
        """
        if not isinstance(optimizer, (AdamW, Adam, SGD)):
            raise UserError(
                f"optim: must be AdamW, Adam or SGD with DeepSpeed, got {type(optimizer).__name__}"
            )
        if trainer.precision not in PRECISIONS:
            known = " or ".join(PRECISIONS)
            raise UserError(
                f"trainer.precision: must be {known} with DeepSpeed, got '{trainer.precision}'"
            )
        if trainer.gradient_clip_algorithm == "value":
            raise UserError("trainer.gradient_clip_algorithm: DeepSpeed clips by norm, got 'value'")

    def _config(self, trainer: Trainer) -> dict[str, Any]:
        """DeepSpeed's own configuration, by its keys (``ds_config.json``); batches and accumulation stay Lightning's.

        Gradients are clipped to the norm ``trainer.gradient_clip_val``; 0 or None there means no clipping.
        """
        return {
            "train_micro_batch_size_per_gpu": 1,  # DeepSpeed's log alone reads it: Lightning makes the batches,
            "gradient_accumulation_steps": 1,  # divides the loss, and ends an accumulation with the epoch
            "gradient_clipping": trainer.gradient_clip_val or 0.0,
            "zero_optimization": {"stage": self.stage, **self._zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "torch_autocast": {
                "enabled": trainer.precision == "bf16-mixed",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],  # else their gradients are rounded before they are averaged
            },
        }

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, a backward pass only adds to the gradients, and no step follows. Lightning enters this for all batches of
        an accumulation but the last.

        In stage 1 each process adds up its own gradients; the last batch's backward pass, outside, averages the sums over
        the processes. In stages 2 and 3, which keep the sums in shards, each batch's gradients are averaged.
        """
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object
    ) -> Tensor:
        """The engine's backward pass of the loss, a scalar, between Lightning's hooks for it; returns the loss, detached.
        Lightning calls it.
        """
        module = self.lightning_module
        assert module is not None
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.engine.backward(loss)
        return self.precision_plugin.post_backward(loss, module)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        """Forward and backward pass by the closure (:func:`kd.lightning_internals.run_closure`), then the engine's step,
        which clips the gradients. Lightning calls it for the last batch of an accumulation.

        Args:
            optimizer: the engine's.
            closure: computes the loss and its gradients.
            model: of Lightning's interface.
            kwargs: likewise.

        Returns:
            What the closure returned.

        Raises:
            RunError: the engine has skipped its step, as a gradient is NaN or infinite.
        """
        assert self.lightning_module is not None
        loss = run_closure(self.precision_plugin, self.lightning_module, optimizer, closure)
        self.engine.step()
        if not self.engine.was_step_applied():
            step = self.lightning_module.global_step
            raise RunError(
                f"a gradient was NaN or infinite in step {step}; the last checkpoint is from before"
            )
        return loss

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's weights by name as whole tensors on the CPU, on rank 0; {} on others. All ranks must call it."""
        assert self.lightning_module is not None
        state = {}
        for name, tensor in self.lightning_module.state_dict(keep_vars=True).items():
            value = _whole(tensor)
            if self.is_global_zero:
                state[name] = value.detach().to("cpu", copy=True)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state on rank 0, in the form of a plain optimizer's ``state_dict``: parameters by number, in
        the order of the groups.

        Lightning calls it for a checkpoint. All ranks must call it: each state is gathered from all of them.

        Returns:
            ``state`` (parameter's number -> name of the state -> tensor on the CPU; empty before the first step, and
                on other ranks) and ``param_groups`` (settings, with the numbers under ``params``).
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        states = list(optimizer.state.values())
        # empty before the first step
        example: dict[str, Tensor] = {}
        if states:
            example = states[0]
        _link_states(optimizer)
        state: dict[int, dict[str, Tensor]] = {}
        for number, parameter in enumerate(chain(*self._trained) if example else []):
            whole = {}
            for key in example:
                if key == "step":  # the same for all, and in no shards
                    whole[key] = example[key]
                else:
                    whole[key] = safe_get_full_optimizer_state(parameter, key)  # by all ranks
            if self.is_global_zero:
                state[number] = {key: value.to("cpu", copy=True) for key, value in whole.items()}
        numbers = count()
        pairs = zip(optimizer.param_groups, self._trained, strict=True)
        groups = [{**group, "params": [next(numbers) for _ in trained]} for group, trained in pairs]
        return {"state": state, "param_groups": groups}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Sets this rank's shards of the optimizer's state, and the groups' settings, from any strategy's checkpoint.

        Lightning calls it on every rank when a run resumes. The weights were loaded earlier, before they were sharded.

        Args:
            checkpoint: as loaded, the same on all ranks; ``optimizer_states`` holds one whole state.
        """
        (optimizer,) = self.optimizers
        (saved,) = checkpoint["optimizer_states"]
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for key, value in saved_group.items():
                if key != "params":
                    group[key] = value
        states = saved["state"]
        if not states:
            return
        _make_room(optimizer, next(iter(states.values())))
        for number, parameter in enumerate(chain(*self._trained)):
            for key, value in states.get(number, {}).items():
                if key != "step":  # _make_room has copied it
                    _set_state(parameter, value.to(self.root_device), key)


def _whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor that stage 3 has sharded: the whole of it, of a trained weight the optimizer's float32 copy. A tensor
    that is not sharded is returned itself.

    All ranks must call it, in the same order. The engine's prefetching of weights is not disturbed.
    """
    import deepspeed

    if not hasattr(tensor, "ds_id"):
        return tensor
    if tensor.requires_grad:
        return deepspeed.utils.safe_get_full_fp32_param(tensor)
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def _make_room(optimizer: Optimizer, example: dict[str, Tensor]) -> None:
    """Makes an optimizer state for each shard, as the first step would: DeepSpeed's setters can only change a state that
    exists.

    Args:
        optimizer: whose shards have no state yet; changed in place.
        example: the saved state of one parameter. Each shard gets a state with the same names: a copy of ``step``, and
            zeros for all others.
    """
    first_group = optimizer.param_groups[0]
    step_on_device = first_group.get("fused") or first_group.get("capturable")
    # under stage 3 the shards are here, and the groups are empty between steps
    shards = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    for shard in shards or [p for group in optimizer.param_groups for p in group["params"]]:
        state = {}
        for key, value in example.items():
            if key == "step":
                state[key] = value.to(shard.device if step_on_device else "cpu", copy=True)
            else:
                state[key] = torch.zeros_like(shard)
        optimizer.state[shard] = state
    _link_states(optimizer)


def _link_states(optimizer: Any) -> None:
    """Makes DeepSpeed link weights and optimizer states again, so that its ``safe_get_*`` and ``safe_set_*`` functions find
    each weight's state.

    DeepSpeed itself links them only once, after the step of the first group, when the other groups have no state yet. Under
    stage 3 there are no links, and nothing happens here.
    """
    if hasattr(optimizer, "_hp_optimizer_states_linked"):  # stages 1 and 2
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _set_state(parameter: nn.Parameter, whole: Tensor, key: str) -> None:
    """Sets one state of a parameter's optimizer from the whole tensor; each rank keeps its shard.

    Args:
        parameter: of the student, as the engine holds it.
        whole: of the parameter's whole shape, on the strategy's device.
        key: the state's name: ``exp_avg``, ``momentum_buffer``, ...
    """
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if not hasattr(parameter, "ds_tensor"):  # stages 1 and 2
        safe_set_full_optimizer_state(parameter, whole, key)
        return
    # DeepSpeed's setter of whole tensors of stage 3 does not pad them to equal shards
    size = parameter.ds_tensor.numel()  # of a shard
    padding = size * torch.distributed.get_world_size() - whole.numel()
    padded = F.pad(whole.flatten(), (0, padding))
    shard = padded.narrow(0, size * torch.distributed.get_rank(), size)
    safe_set_local_optimizer_state(parameter, shard, key)

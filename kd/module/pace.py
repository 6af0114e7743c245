"""What a Trainer's step needs beside its losses: pace, random numbers, share of an accumulation, log."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.plugins.precision import DeepSpeedPrecision, FSDPPrecision, HalfPrecision
from torch.optim import Optimizer

from kd.data.batch import as_batch
from kd.distill.sharding import Sharding
from kd.lightning_internals import loggers_take_this_step
from kd.optim import Pace


def pace_of(trainer: Trainer, batch_size: int | None) -> Pace:
    """How a run goes through its optimizer steps, from Lightning's counts, which need its training loader to be made.

    Args:
        trainer: of the run.
        batch_size: pictures of a process's batch; None: not known, as the loader is the user's own.
    """
    accumulate = trainer.accumulate_grad_batches
    global_batch = None
    if batch_size is not None:
        global_batch = batch_size * trainer.world_size * accumulate
    total = trainer.estimated_stepping_batches
    if total < 0:  # Lightning's word for a loader without a length and no max_steps
        total = math.inf
    batches = trainer.num_training_batches
    # an epoch's last step takes the batches that are left, however few
    per_epoch = batches
    if not math.isinf(batches):
        per_epoch = math.ceil(batches / accumulate)
    return Pace(total, per_epoch, global_batch, fused=not scales_gradients(trainer))


def scales_gradients(trainer: Trainer) -> bool:
    """Whether gradients are scaled against underflow (``precision=16-mixed``)."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def keep_targets_exact(trainer: Trainer) -> None:
    """Makes Lightning's half precisions (``bf16-true``), FSDP's and DeepSpeed's leave a batch's targets as they are.

    Lightning would round them with the other inputs. It replaces a method of the trainer's precision plugin; nothing is
    done with other precisions.
    """
    if not isinstance(trainer.precision_plugin, HalfPrecision | FSDPPrecision | DeepSpeedPrecision):
        return
    plugin: Any = trainer.precision_plugin
    convert = type(plugin).convert_input

    def convert_input(data: object) -> Mapping[str, object]:
        """A batch in the run's precision, its target as it was."""
        batch: dict[str, object] = dict(as_batch(data))
        target = batch.pop("target", None)
        return {**convert(plugin, batch), "target": target}

    plugin.convert_input = convert_input


def seed_step(seed: int, device: torch.device) -> None:
    """Seeds torch's random numbers of the host and of the device, from which dropout and the like draw."""
    # not torch.manual_seed: it takes a stack trace for each kind of device that is absent, 0.8 ms
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def window_factor(batches: float, accumulate: int, batch_idx: int, first: int = 0) -> float:
    """Factor of a batch's loss: above 1 in an optimizer step that accumulates fewer batches than the trainer divides by,
    else 1.

    So this step, too, follows the mean of its batches. It is an epoch's last one, or the first one in an epoch that a run
    resumes within: of 10 batches, 4 to a step, the last two have the factor 2.

    Args:
        batches: how many the epoch has in this process; infinite: not known, and no last step is short.
        accumulate: batches of an optimizer step; the trainer divides each loss by it.
        batch_idx: number of the batch in the epoch, from 0.
        first: number of the first batch of the epoch in this run.

    >>> [window_factor(6, 4, batch_idx) for batch_idx in range(6)]
    [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    >>> [window_factor(6, 3, batch_idx, first=2) for batch_idx in range(2, 6)]
    [3.0, 1.0, 1.0, 1.0]
    """
    start = batch_idx - batch_idx % accumulate
    end = min(start + accumulate, batches)
    return accumulate / (end - max(start, first))


def logs_now(trainer: Trainer) -> bool:
    """Whether this step's values are logged: Lightning's ``log`` takes 0.7 ms a value, with or without a logger.

    True every ``trainer.log_every_n_steps`` optimizer steps, in an epoch's first and last batch and in the run's last
    step. Called from ``on_train_batch_start`` to ``training_step``, for the step under way. An epoch's first batch is logged
    for ``trainer.callback_metrics``, which the bar reads, also where no logger takes it.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    return (
        loggers_take_this_step(trainer)
        or trainer.is_last_batch
        or loop.batch_idx == 0
        or trainer.global_step + 1 == trainer.max_steps
    )


def clip(
    module: LightningModule, optimizer: Optimizer, value: float | None, algorithm: str | None
) -> None:
    """Clips the optimizer's gradients, in place; also those of a fused optimizer, which Lightning refuses to clip under
    ``bf16-mixed``.

    With a strategy that clips in its own step (DeepSpeed) nothing is done. Scaled gradients (``16-mixed``) are left to
    Lightning's method, which refuses them where the optimizer's step itself would unscale them.

    Args:
        module: attached to its trainer.
        optimizer: has the parameters.
        value: the largest norm of all gradients together, or the largest size of any number in them; None or
            0: no clipping.
        algorithm: ``norm`` or ``value``; None: ``norm``.
    """
    strategy = module.trainer.strategy
    if not value or (isinstance(strategy, Sharding) and strategy.clips_gradients):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if scales_gradients(module.trainer):
        module.clip_gradients(optimizer, value, algorithm)
    elif algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)

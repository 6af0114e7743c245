"""When a run may be stopped or saved: between two optimizer steps, with all ranks at the same one."""

from pytorch_lightning import Trainer

SYNC_EVERY = 10  # batches between two agreements of the ranks: each costs a collective


def after_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether an optimizer step has just ended (gradients of an unfinished accumulation are in no checkpoint)."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def ranks_meet(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the ranks may agree on something now: after a step; with several ranks only every few batches."""
    if not after_step(trainer, batch_idx):
        return False
    every = -(-SYNC_EVERY // trainer.accumulate_grad_batches) * trainer.accumulate_grad_batches
    return trainer.world_size == 1 or (batch_idx + 1) % every == 0 or trainer.is_last_batch

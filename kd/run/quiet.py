"""Leaves the terminal to the run."""

import logging
import warnings


def quiet_libraries() -> None:
    """Silences Lightning's hardware lines and tips, and warnings that call for nothing."""
    for name in ("pytorch_lightning", "lightning_fabric", "timm", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        ".*does not have many workers.*",
        ".*isinstance\\(treespec, LeafSpec\\).*",
        ".*exists and is not empty.*",
        ".*`_scheduled_optimizer_step`.*",
        ".*number of training batches.*smaller than the logging interval.*",
        ".*dataloader is not resumable.*",
        ".*your dataloader is not resumable.*",
        ".*lr_scheduler.step.*before.*optimizer.step.*",
        ".*in eval mode at the start of training.*",
        ".*It is recommended to use `self.log.*sync_dist=True.*",
        ".*Total length of `\\w*Loader` across ranks is zero.*",
        ".*You have overridden `on_before_batch_transfer`.*",
    ):
        warnings.filterwarnings("ignore", message=message)

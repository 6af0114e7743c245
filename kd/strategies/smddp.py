"""SageMaker's data-parallel collectives (smddp) under Lightning's DDP."""

from typing import Any

import torch

from kd.errors import UserError
from kd.lightning_internals import prepare_data_without_groups
from kd.strategies.ddp import DDP

HOOK = "smdistributed.dataparallel.torch.torch_smddp"  # importing it registers the backend with torch.distributed


class SMDDPStrategy(DDP):
    """DDP over the ``smddp`` process-group backend.

    The library exists only inside SageMaker's training images, for torch 2.4.1 and earlier. It has no ``new_group``
    and can't share a job with nccl or gloo groups, so compressed gradients and sharded strategies don't go with it;
    ``optim.zero`` does: torch's ZeroRedundancyOptimizer broadcasts and gathers in the group that is there.

    Args:
        **kwargs: as for Lightning's ``DDPStrategy``.

    Raises:
        UserError: the library is not installed, or gradients should be compressed.
    """

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("compression"):
            raise UserError(f"trainer.strategy.compression: smddp reduces by itself, not '{kwargs['compression']}'")
        try:
            super().__init__(backend="smddp", module=HOOK, **kwargs)
        except UserError as error:
            raise UserError(
                f"trainer.strategy: smddp needs the module {HOOK}, which only SageMaker's training images have; "
                "elsewhere use config=nodes_4x8"
            ) from error

    def setup_distributed(self) -> None:
        """Joins the process group.

        Raises:
            UserError: there is a group of another backend already.
        """
        if torch.distributed.is_initialized() and torch.distributed.get_backend() != "smddp":
            raise UserError(
                f"trainer.strategy: smddp can't share a job with {torch.distributed.get_backend()}: start it alone"
            )
        prepare_data_without_groups()
        super().setup_distributed()

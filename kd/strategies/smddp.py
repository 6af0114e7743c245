"""SageMaker's data-parallel collectives (smddp) under Lightning's DDP."""

from importlib import import_module
from typing import Any

from pytorch_lightning.strategies import DDPStrategy

from kd.errors import UserError

HOOK = "smdistributed.dataparallel.torch.torch_smddp"  # importing it registers the backend with torch.distributed


class SMDDPStrategy(DDPStrategy):
    """DDP over the ``smddp`` process-group backend.

    The library exists only inside SageMaker's training images; it has no ``new_group`` and can't share a job with
    nccl or gloo groups, so ``optim.zero`` and sharded strategies don't go with it.

    Args:
        **kwargs: as for Lightning's ``DDPStrategy``.

    Raises:
        UserError: the library is not installed.
    """

    def __init__(self, **kwargs: Any) -> None:
        try:
            import_module(HOOK)
        except ImportError as error:
            raise UserError(
                f"trainer.strategy: smddp needs the module {HOOK}, which only SageMaker's training images have; "
                "elsewhere use config=nodes_4x8"
            ) from error
        super().__init__(process_group_backend="smddp", **kwargs)

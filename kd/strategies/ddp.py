"""Lightning's DDP over any process-group backend, with compressed gradients."""

from importlib import import_module
from typing import Any, Literal

import torch
from lightning_fabric.utilities.seed import reset_seed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from kd.errors import UserError
from kd.lightning_internals import HookedDDP, prepare_data_without_groups

LEAST_START = 2
"""The least ``powersgd_start_step``: DDP sorts its buckets in the first two steps, so torch compresses after these."""


class DDP(HookedDDP):
    """DDP over a backend that a module registers, or with gradients that are compressed before they travel.

    Args:
        backend: name of the process-group backend, in any case of letters; default: nccl on GPUs, gloo on CPUs.
        module: imported first; importing it registers the backend with ``torch.distributed``.
        compression: ``bf16`` halves what travels and rounds; ``powersgd`` sends factors of a low rank (arXiv
            1905.13727). What its error feedback has gathered is in no checkpoint: a resumed run starts it anew.
        powersgd_rank: rank of the factors: more is closer to the gradient, and more to send. Other compressions do
            not read it.
        powersgd_start_step: optimizer steps with uncompressed gradients before ``powersgd`` begins, at least
            :data:`LEAST_START`.
        **kwargs: as for Lightning's ``DDPStrategy`` and torch's ``DistributedDataParallel`` (``static_graph``,
            ``timeout``, ``gradient_as_bucket_view``, ...).

    Raises:
        UserError: the module is not installed, or does not register the backend; compression over smddp; a rank
            below 1, with which torch sends nothing or fails, or a step below :data:`LEAST_START`.
    """

    def __init__(
        self,
        backend: str | None = None,
        module: str | None = None,
        compression: Literal["bf16", "powersgd"] | None = None,
        powersgd_rank: int = 2,
        powersgd_start_step: int = 1000,
        **kwargs: Any,
    ) -> None:
        """Checks the arguments, and imports the backend's module, which registers the backend before the processes meet;
        arguments and errors as of the class.
        """
        if backend is not None:
            backend = backend.lower()  # as torch registers and reports it
        if backend == "smddp" and compression:
            raise UserError(
                f"trainer.strategy.compression: must be null with smddp, got '{compression}'"
            )
        if powersgd_rank < 1:
            raise UserError(f"trainer.strategy.powersgd_rank: must be >= 1, got {powersgd_rank}")
        if powersgd_start_step < LEAST_START:
            raise UserError(
                f"trainer.strategy.powersgd_start_step: must be >= {LEAST_START}, got {powersgd_start_step}"
            )
        if module is not None:
            _import(module, backend)
        super().__init__(process_group_backend=backend, **kwargs)
        if module is not None:
            self._third_party = backend
        else:
            self._third_party = None
        self._compression = compression
        self._powersgd_rank = powersgd_rank
        self._powersgd_start_step = powersgd_start_step

    def setup_distributed(self) -> None:
        """Joins the process group; Lightning calls it in every process, before the model is placed.

        Without ``module`` Lightning's own method does it. For a backend that a module registers two things differ: it gets
        no ``device_id``, and Lightning's barrier around ``prepare_data``, for which Lightning makes a gloo group, is removed
        for the rest of the process.

        Raises:
            UserError: a module registers the backend, and the process is in a group of another backend.
        """
        if not self._third_party:
            super().setup_distributed()
            return
        joined = None
        if torch.distributed.is_initialized():
            joined = torch.distributed.get_backend()
        if joined not in (None, self._third_party):
            raise UserError(
                f"trainer.strategy: {self._third_party} can't share a job with {joined}: start it alone"
            )
        prepare_data_without_groups()
        reset_seed()
        self.join_process_group()

    def register_hooks(self) -> None:
        """Registers the hook that compresses gradients, on GPUs and CPUs; without compression the user's ``ddp_comm_hook``,
        which Lightning registers on GPUs alone.

        Called once a fit, when ``self.model`` is wrapped in torch's DDP; the hook then runs for each bucket of gradients in
        the backward pass.
        """
        if self._compression is None:
            super().register_hooks()
            return
        assert isinstance(self.model, DistributedDataParallel)
        if self._compression == "bf16":
            self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)
            return
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=self._powersgd_rank,
            start_powerSGD_iter=self._powersgd_start_step,
        )
        self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class SMDDPStrategy(DDP):
    """DDP over the ``smddp`` process-group backend, which exists only inside SageMaker's training images.

    Raises:
        UserError: the library is not installed, or gradients should be compressed.
    """

    def __init__(self, **kwargs: object) -> None:
        super().__init__("smddp", "smdistributed.dataparallel.torch.torch_smddp", **kwargs)  # type: ignore[arg-type]


def _import(module: str, backend: str | None) -> None:
    """Imports ``module``, which must register the process-group backend.

    Args:
        module: its dotted name.
        backend: name of the process-group backend, in lower case.

    Raises:
        UserError: the module is not installed, or ``backend`` is None or still unknown to torch afterwards.
    """
    try:
        import_module(module)
    except ImportError as error:
        raise UserError(
            f"trainer.strategy: the backend {backend} needs the module {module}: {error}"
        ) from error
    if backend not in torch.distributed.Backend.backend_list:
        raise UserError(f"trainer.strategy.backend: {module} registers no backend '{backend}'")

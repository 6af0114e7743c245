"""All uses of Lightning's private names; ``tests/test_lightning_internals.py`` tests each by itself."""

from contextlib import nullcontext
from typing import Any

from lightning_fabric.loggers.csv_logs import _ExperimentWriter
from lightning_fabric.utilities.distributed import _init_dist_connection
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.trainer.connectors import data_connector

CSVWriter = _ExperimentWriter  # Writes a CSVLogger's file


def trainer_of(module: LightningModule) -> Trainer | None:
    """The trainer that a module is attached to, or None, where the public attribute raises."""
    return module._trainer


def loggers_take_this_step(trainer: Trainer) -> bool:
    """Whether ``trainer.log_every_n_steps`` is due, as Lightning's loggers decide."""
    return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % max(1, trainer.log_every_n_steps) == 0  # type: ignore[attr-defined]


def runs_in_child_processes(trainer: Trainer) -> bool:
    """Whether the strategy runs training in child processes alone (``ddp_spawn``, ``ddp_notebook``)."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def log_this_step(trainer: Trainer) -> None:
    """Gives the step's values to the loggers now: for a step that does not reach its end."""
    trainer._logger_connector.update_train_step_metrics()


def log_last_step(trainer: Trainer) -> None:
    """Gives the step's values to the loggers where ``trainer.log_every_n_steps`` is not due."""
    connector = trainer._logger_connector
    if not loggers_take_this_step(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        connector.log_metrics(connector.metrics["log"])


def make_loader_again(trainer: Trainer) -> None:
    """Makes Lightning request the training loader again before the next epoch."""
    trainer.fit_loop._combined_loader = None


def prepare_data_without_groups() -> None:
    """Removes the barrier for which Lightning makes a gloo group, which not every backend allows."""
    data_connector._InfiniteBarrier = nullcontext  # type: ignore[assignment,misc]


class HookedDDP(DDPStrategy):
    """DDP whose gradient hooks and process group a subclass may choose."""

    def _register_ddp_hooks(self) -> None:
        self.register_hooks()

    def register_hooks(self) -> None:
        """Registers communication hooks on ``self.model``; as it is: Lightning's own, on GPUs alone."""
        super()._register_ddp_hooks()

    def join_process_group(self) -> None:
        """Joins it without Lightning's ``device_id``, which other packages' backends may not take."""
        self.set_world_ranks()
        environment: Any = self.cluster_environment
        _init_dist_connection(environment, self._get_process_group_backend(), timeout=self._timeout)

"""All uses of Lightning's private names; ``tests/test_lightning_internals.py`` tests most of them, each by itself."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import FrameType
from typing import Any

from lightning_fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning_fabric.utilities.distributed import _init_dist_connection
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.trainer.connectors import data_connector
from torch.optim import Optimizer


def trainer_of(module: LightningModule) -> Trainer | None:
    """The trainer that a module is attached to; None without one, where the public attribute ``trainer`` raises.

    A module has none in a loop of the user's own, and while a checkpoint's weights are loaded without a Trainer.
    """
    return module._trainer


def loggers_take_this_step(trainer: Trainer) -> bool:
    """Whether the step under way is one of every ``trainer.log_every_n_steps`` optimizer steps, as Lightning counts them.

    0, with which Lightning logs no step, counts as 1 here. To be called inside a step, up to ``on_train_batch_end``: only
    then does Lightning count the step. (Lightning also logs a step in which ``should_stop`` is set; that is not read here.)
    :func:`kd.module.pace.logs_now` adds the first and last batch of an epoch and the run's last step.
    """
    every = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
    steps_done = trainer.fit_loop.epoch_loop._batches_that_stepped
    return (steps_done + 1) % every == 0


def runs_in_child_processes(trainer: Trainer) -> bool:
    """Whether the strategy runs the whole training in child processes (``ddp_spawn``, ``ddp_fork``, ``ddp_notebook``,
    XLA's).
    """
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def log_this_step(trainer: Trainer) -> None:
    """Gives the step's values to the loggers now; for a step in which the run is stopped, as Lightning does so only at a
    step's end.

    Lightning's own conditions hold: the batch ends an optimizer step, and ``log_every_n_steps`` is due, ``should_stop`` is
    set or ``fast_dev_run`` is on. Else nothing is logged.
    """
    trainer._logger_connector.update_train_step_metrics()


def log_last_step(trainer: Trainer) -> None:
    """Makes Lightning give the values of an epoch's last step to the loggers, once, whether it would by itself or not.

    Called in ``on_train_batch_end``. Lightning decides after this hook, by ``trainer.log_every_n_steps``, by
    ``fast_dev_run``, and by ``should_stop``, which any later callback may set. So the method that decides is replaced on
    this trainer, until Lightning next calls it. With ``log_every_n_steps=0``, by which no step is logged, nothing changes.
    """
    if trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]  # no step is logged
        return
    connector = trainer._logger_connector

    def take_once() -> None:
        """Puts Lightning's own method back, then logs; Lightning calls this in its place."""
        del connector.update_train_step_metrics
        if trainer.is_last_batch:
            connector.log_metrics(connector.metrics["log"])
        else:  # an error ended the epoch on the way here, and another training has begun
            connector.update_train_step_metrics()

    connector.update_train_step_metrics = take_once  # type: ignore[method-assign]


def make_loader_again(trainer: Trainer) -> None:
    """Makes Lightning discard the training loader that it has, and request a new one before it next trains.

    For a loader that was made before the checkpoint was read: the checkpoint says with which samples the epoch begins.
    """
    trainer.fit_loop._combined_loader = None


def without_sigterm_broadcasts(trainer: Trainer) -> None:
    """Removes two broadcasts of Lightning's: the one in each training batch, by which all processes learn whether the first
    has received SIGTERM, and the one in its signal handler.

    Each batch of several processes would wait for the first process, and for the device. During the training
    :class:`kd.callbacks.preemption.Preemption` handles signals. Before and after it Lightning's handler is active: it still
    sets ``received_sigterm``, and sends SIGTERM to the processes that this one has started. To be called before the
    training.
    """
    connector = trainer._signal_connector

    def note(number: int, _: FrameType | None) -> None:
        """Lightning's handler, without its broadcast."""
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(number)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note  # type: ignore[method-assign,assignment]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def prepare_data_without_groups() -> None:
    """Removes Lightning's barrier around ``prepare_data``, for which it makes a gloo group that not every backend allows.

    It is removed for the rest of the process, from all trainers. To be called before Lightning calls ``prepare_data``, which
    it does once the process group is joined.
    """
    data_connector._InfiniteBarrier = nullcontext  # type: ignore[assignment,misc]


def set_timeout(strategy: Strategy, seconds: float) -> None:
    """Sets the time-out of the process group that a strategy will join, unless the user gave the strategy a ``timeout``.

    A ``timeout`` that equals Lightning's default (30 minutes) counts as not given. A strategy of a single process, which
    has no time-out, stays as it is.

    Args:
        strategy: has not joined yet.
        seconds: wanted (``rank_timeout_s``).
    """
    timeout = getattr(strategy, "_timeout", None)
    if timeout == default_pg_timeout:
        strategy._timeout = timedelta(seconds=seconds)  # type: ignore[attr-defined]


def timeout_of(strategy: Strategy) -> float:
    """Seconds after which a collective of a strategy's process group fails; Lightning's default, 1800, where the strategy
    has no time-out.
    """
    timeout = getattr(strategy, "_timeout", None) or default_pg_timeout
    return timeout.total_seconds()


def run_closure(
    precision: Precision, module: LightningModule, optimizer: Optimizer, closure: Callable[[], Any]
) -> object:
    """Runs a step's closure (forward, backward), then the hooks ``on_before_optimizer_step`` and
    ``configure_gradient_clipping``. It does not step the optimizer: the calling strategy does so next.

    Returns:
        What the closure returns: the loss, or None where ``training_step`` gave none. The hooks run all the same.
    """
    return precision._wrap_closure(module, optimizer, closure)


def purge_from(logger: TensorBoardLogger, step: int) -> None:
    """Makes TensorBoard drop the events of ``step`` and later steps that are in the logger's folder already. To be called
    before the logger's first use.
    """
    logger._kwargs["purge_step"] = step


class ShardedDataParallel(ModelParallelStrategy):
    """A strategy whose mesh has all processes on its axis ``data_parallel``.

    A subclass gives Lightning ``tensor_parallel_size=1``, the length of the other axis.
    """

    def setup_environment(self) -> None:
        """Joins the process group and makes the mesh, with all processes on its axis ``data_parallel``; Lightning's default
        would be ``num_nodes``.
        """
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


class HookedDDP(DDPStrategy):
    """DDP whose gradient hooks and process group a subclass may choose."""

    def _register_ddp_hooks(self) -> None:
        self.register_hooks()

    def register_hooks(self) -> None:
        """Registers communication hooks on ``self.model``; a subclass may replace this method to register its own.

        Here it is Lightning's: the hook that the strategy's argument ``ddp_comm_hook`` names, and on GPUs alone.
        """
        super()._register_ddp_hooks()

    def join_process_group(self) -> None:
        """Joins the process group without Lightning's ``device_id``, which other packages' backends may not take.

        For a subclass that replaces Lightning's ``setup_distributed``: the subclass calls ``reset_seed`` first, as
        Lightning's does, then this method.
        """
        self.set_world_ranks()
        environment: Any = self.cluster_environment
        _init_dist_connection(environment, self._get_process_group_backend(), timeout=self._timeout)

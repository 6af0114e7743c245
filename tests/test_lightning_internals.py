"""Each private name of Lightning that we lean on: an upgrade that breaks one breaks the test of its name."""

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.connectors import data_connector
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from kd import lightning_internals as internals


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(5, 1), batch_size=1)  # type: ignore[arg-type]


class Logged:
    """A logger's steps."""

    def __init__(self, module: Line, folder: Path, every: int, *callbacks: Callback) -> None:
        from pytorch_lightning.loggers import CSVLogger

        self.logger = CSVLogger(folder)
        self.steps: list[int] = []
        self.logger.log_metrics = lambda metrics, step=None: self.steps.append(step)  # type: ignore[method-assign,assignment]
        self.trainer = Trainer(max_epochs=1, log_every_n_steps=every, logger=self.logger, callbacks=list(callbacks),
                               accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False,
                               enable_model_summary=False)  # fmt: skip
        self.trainer.fit(module)


class Each(Callback):
    """Calls a function after each step."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self.act(trainer)


def test_trainer_of() -> None:
    module = Line()
    assert internals.trainer_of(module) is None
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module.trainer = trainer
    assert internals.trainer_of(module) is trainer


def test_loggers_take_this_step(tmp_path: Path) -> None:
    due: list[bool] = []
    found = Logged(
        Line(),
        tmp_path,
        2,
        Each(lambda trainer: due.append(internals.loggers_take_this_step(trainer))),
    )
    assert due == [False, True, False, True, False]
    assert found.steps == [1, 3]


def test_log_last_step(tmp_path: Path) -> None:
    last = Each(lambda trainer: internals.log_last_step(trainer) if trainer.is_last_batch else None)
    assert Logged(Line(), tmp_path, 2, last).steps == [1, 3, 4]


def test_log_last_step_of_a_training_that_stops_is_logged_once(tmp_path: Path) -> None:
    """Lightning's loggers take the step at which ``should_stop`` is set themselves."""

    def stop(trainer: Trainer) -> None:
        if trainer.is_last_batch:
            trainer.should_stop = True
            internals.log_last_step(trainer)

    assert Logged(Line(), tmp_path, 2, Each(stop)).steps == [1, 3, 4]


def test_log_last_step_that_a_later_callback_stops_is_logged_once(tmp_path: Path) -> None:
    """Whether the training stops is known only after all callbacks."""

    def stop(trainer: Trainer) -> None:
        trainer.should_stop = trainer.should_stop or trainer.is_last_batch

    last = Each(lambda trainer: internals.log_last_step(trainer) if trainer.is_last_batch else None)
    assert Logged(Line(), tmp_path, 2, last, Each(stop)).steps == [1, 3, 4]
    assert Logged(Line(), tmp_path, 5, last, Each(stop)).steps == [4]


def test_log_this_step(tmp_path: Path) -> None:
    now = Each(lambda trainer: internals.log_this_step(trainer))
    assert Logged(Line(), tmp_path, 2, now).steps == [
        1,
        1,
        3,
        3,
    ]  # as at the step's end: where it is due


def test_runs_in_child_processes() -> None:
    def trainer(strategy: str) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            logger=False,
            enable_checkpointing=False,
        )

    assert internals.runs_in_child_processes(trainer("ddp_spawn"))
    assert not internals.runs_in_child_processes(trainer("ddp"))


def test_make_loader_again() -> None:
    module, made = Line(), []
    module.train_dataloader = lambda: made.append(1) or Line.train_dataloader(module)  # type: ignore[method-assign,func-returns-value]

    class Again(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            internals.make_loader_again(trainer)

    Trainer(max_epochs=2, callbacks=[Again()], accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False).fit(module)  # fmt: skip
    assert len(made) == 2


@pytest.mark.parametrize("removed", [True, False])
def test_without_sigterm_broadcasts(removed: bool) -> None:
    """Of two processes, as far as Lightning sees. Where it broadcasts nothing by itself, the function can go."""
    sent: list[Any] = []
    patches = pytest.MonkeyPatch()

    class AsTwo(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            patches.setattr(Trainer, "world_size", 2)
            patches.setattr(torch.distributed, "is_initialized", lambda: True)
            patches.setattr(torch.distributed, "broadcast", lambda *a, **_: sent.append(a))

        def on_train_batch_end(self, *_: object) -> None:
            signal.raise_signal(signal.SIGTERM)
            patches.undo()

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, max_epochs=1, callbacks=[AsTwo()])  # fmt: skip
    if removed:
        internals.without_sigterm_broadcasts(trainer)
    with pytest.raises(SIGTERMException):
        trainer.fit(Line())
    assert trainer.received_sigterm
    assert len(sent) == (0 if removed else 2)  # of the batch, and of the handler


def test_prepare_data_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(data_connector, "_InfiniteBarrier")
    monkeypatch.setattr(data_connector, "_InfiniteBarrier", data_connector._InfiniteBarrier)
    internals.prepare_data_without_groups()
    assert data_connector._InfiniteBarrier is nullcontext


def test_run_closure_runs_it_with_lightnings_hooks() -> None:
    hooks: list[str] = []

    class Hooked(Line):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            hooks.append("before step")

    module = Hooked()
    Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False).fit(module)  # fmt: skip
    hooks.clear()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loss = internals.run_closure(
        module.trainer.precision_plugin, module, optimizer, lambda: torch.tensor(2.0)
    )
    assert loss == 2.0
    assert hooks == ["before step"]


def test_sharded_data_parallel_has_one_axis_over_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[object] = []
    strategy = internals.ShardedDataParallel(tensor_parallel_size=1)
    strategy.num_nodes = 2
    strategy.parallel_devices = [torch.device("cpu")] * 3
    above = internals.ModelParallelStrategy
    monkeypatch.setattr(
        above, "setup_environment", lambda self: lengths.append(self._data_parallel_size)
    )
    strategy.setup_environment()
    assert lengths == [6]


def test_hooked_ddp_registers_its_own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Mine(internals.HookedDDP):
        def register_hooks(self) -> None:
            asked.append("hooks")

    Mine()._register_ddp_hooks()
    assert asked == ["hooks"]
    assert hasattr(DDPStrategy, "_register_ddp_hooks")


def test_hooked_ddp_joins_a_process_group_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        internals,
        "_init_dist_connection",
        lambda *items, **named: given.update(items=items, **named),
    )
    strategy = internals.HookedDDP(process_group_backend="gloo")
    monkeypatch.setattr(type(strategy), "set_world_ranks", lambda self: None)
    strategy.join_process_group()
    assert given["items"][1] == "gloo"
    assert "device_id" not in given

"""``kd.Monitor``: watches a training, its machine and its learning; of kd's own runs and of any other."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Self, TypeVar, cast

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from kd.clock import annotate, outside_of_the_step
from kd.config.suggest import near
from kd.errors import UserError, first_line
from kd.monitor.cloudwatch import CloudWatch
from kd.monitor.control import Control
from kd.monitor.health import Health
from kd.monitor.kernels import Kernels
from kd.monitor.keys import MonitorSpec
from kd.monitor.loop import PlainLoop
from kd.monitor.numbers import RunNumbers
from kd.monitor.otlp import Otlp
from kd.monitor.phases import Phases
from kd.monitor.prometheus import Prometheus
from kd.monitor.results import BeginResults, WatchedResults, records_folder
from kd.monitor.stopping import Stopping
from kd.monitor.system import System
from kd.monitor.watch import Watch
from kd.monitor.watched import Watched, WatchedLoop
from kd.settings import MonitorSettings
from kd.storage.elsewhere import Json

Batch = TypeVar("Batch")
BETWEEN = "between epochs"  # no part of a step, in a plain loop


class Monitor(Callback):
    """Records what limits a training, for ``kd-report FOLDER``; a callback of Lightning's Trainer.

    It takes any LightningModule, data and strategy. The phases of each step, the machine's cores and GPUs, gradients
    and activations are recorded; rules act while the training runs; the report and a verdict are written at its end.
    In a loop of your own::

        with kd.Monitor("runs/mine") as watch:
            for batch in watch(loader):
                with watch.phase("forward"):
                    loss = model(batch)

    Args:
        folder: where the records go, a folder or a URL (``s3://bucket/name/run``); one training has one folder.
        settings: keys of ``monitor``, see :class:`kd.settings.MonitorSettings`.

    Raises:
        UserError: an unknown key, or a value that it does not take; ``folder`` is a URL without a folder of runs.

    >>> Monitor("runs/mine", max_hours=8).spec.max_hours
    8.0
    >>> Monitor("runs/mine", max_hour=8)
    Traceback (most recent call last):
    kd.errors.UserError: kd.Monitor: no key 'max_hour'; did you mean 'max_hours'?
    """

    parts: list[Callback]
    """What records and acts, in the order in which the trainer calls it; [] where monitoring is off."""

    def __init__(self, folder: str | Path, **settings: object) -> None:
        """Checks the settings; nothing is written before the training begins.

        Args:
            folder: of the run, or its URL in an object store.
            settings: keys below ``monitor``.

        Raises:
            UserError: an unknown key or a wrong value; a URL in which no run can lie.
        """
        self._place = str(folder)
        self._loop: PlainLoop | None = None
        self._begin(Watched(records_folder(self._place)), _spec_of(settings))

    def _begin(self, watched: Watched, spec: MonitorSpec) -> None:
        """Makes the monitor's parts for a training that is not kd's.

        Lightning and the plain loop call them in the order of :attr:`parts`. Where a plain loop begins, this is called
        again, and new parts take the place of the old ones.
        """
        stopping = Stopping()
        results = WatchedResults(self._place, _changed(spec), stopping)
        self._stopping = stopping
        self._results = results
        self._watch(watched, spec, stopping.stop_for)
        if spec.enabled:
            # the folder is made before a part opens a file in it; summary and page are written after all have closed
            self.parts = [BeginResults(results), stopping, *self.parts, results]

    @classmethod
    def of_own_run(
        cls, watched: Watched, spec: MonitorSpec, stop_for: Callable[[str], None]
    ) -> Self:
        """The monitor of a run of kd's own, which has its own settings, summary and way to stop.

        Args:
            watched: reads the run.
            spec: the settings ``monitor``.
            stop_for: stops the run for a rule of this name.
        """
        monitor = cls.__new__(cls)
        monitor._watch(watched, spec, stop_for)
        return monitor

    def _watch(self, watched: Watched, spec: MonitorSpec, stop_for: Callable[[str], None]) -> None:
        """Makes :attr:`parts`, in the order in which the trainer calls them; [] where the setting ``enabled`` is false.

        The settings and the part ``phases`` are kept as attributes in any case.

        Args:
            watched: the training.
            spec: which parts there are.
            stop_for: is called with the rule's name where one stops the run.
        """
        self.spec = spec
        self.phases = Phases(watched, spec.costs(), spec.nvtx, spec.communication)
        self.parts = []
        if not spec.enabled:
            return
        system = System(watched, spec.interval_s)
        health = Health(watched, spec.health_every, spec.activations)
        kernels = Kernels(watched, spec.kernels_at, spec.kernels_steps, spec.kernels_memory)
        watch = None
        self.parts += [self.phases, system, *watched.parts()]
        if spec.rules_every_s or spec.max_hours or spec.budget:
            watch = Watch(watched, stop_for, spec)
            self.parts.append(watch)
        self.parts += [health, kernels, Control(watched, health, kernels, self.phases)]
        numbers = RunNumbers(self.phases, system, health, watch)
        if spec.prometheus_port is not None:
            self.parts.append(Prometheus(numbers, spec.prometheus_port, spec.prometheus_host))
        if spec.otlp is not None:
            self.parts.append(Otlp(numbers, spec.otlp, spec.send_every_s))
        if spec.cloudwatch is not None:
            self.parts.append(CloudWatch(numbers, spec.cloudwatch, spec.send_every_s))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts the parts after itself among the trainer's callbacks, once, for a fit alone: Lightning calls them from here
        on, this hook included.
        """
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        are_there = any(part in callbacks for part in self.parts)
        if stage != "fit" or are_there:
            return
        place = callbacks.index(self) + 1
        callbacks[place:place] = self.parts

    # -- a plain loop --------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        """Begins a plain loop, with new parts; the folder is made with the first batch."""
        self._begin(WatchedLoop(records_folder(self._place)), self.spec)
        return self

    def __call__(self, loader: Iterable[Batch], model: nn.Module | None = None) -> Iterator[Batch]:
        """The batches of an epoch; a rule or a limit that stops the training ends them early.

        With the first batch the parts begin; each call is an epoch, which counts once its batches are used up. Every
        process must call it. The time until the next call is no part of a step. A loop that breaks off has used the batch
        that it got last.

        Args:
            loader: anything that gives batches; it may differ from epoch to epoch.
            model: that trains on several processes (``DistributedDataParallel``): what its gradients travel is timed as
                the phase ``communication``. The first call's counts.
        """
        if not self.spec.enabled:
            yield from loader
            return
        if self._loop is None:
            self._loop = PlainLoop(model)
            self._loop.expect(loader)
            for hook in ("setup", "on_fit_start", "on_train_start"):
                self._call(hook, *(["fit"] if hook == "setup" else []))
        loop = self._loop
        self._end_batch(loop)
        loop.expect(loader)
        self.phases.clock.within(None)
        batches = loop.batches = loop.fetch(loader)
        try:
            for index, batch in enumerate(batches):
                self._call("on_train_batch_start", batch, index)
                loop.open_batch = index
                yield batch
                self._end_batch(loop)
            loop.current_epoch += 1
        finally:  # also where the user's loop breaks off
            if self._loop is loop and loop.batches is batches:
                loop.batches = None
                self.phases.clock.within(BETWEEN)

    def _end_batch(self, loop: PlainLoop) -> None:
        """Ends the batch that is open, where one is."""
        if loop.open_batch is not None:
            self._call("on_train_batch_end", None, None, loop.open_batch)
            loop.global_step += 1
            loop.open_batch = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is the step's phase of this name: ``with watch.phase("forward"): ...``.

        Args:
            name: one of :data:`kd.report.records.PHASES`; ``validation``, which is no part of a step; any other name
                shows in kernel profiles alone.
        """
        if name != "validation":
            with annotate(name):
                yield
            return
        with outside_of_the_step(name):
            yield
        if self._loop is not None and self._loop.batches is None:
            self.phases.clock.within(BETWEEN)

    def log(self, loss: Tensor | float) -> None:
        """Records the loss of the present step of a plain loop, for the page and the rules; nothing waits for a GPU.

        Args:
            loss: a number, or a tensor of one; it must not be changed in place afterwards.

        Raises:
            UserError: a tensor of several numbers.
        """
        loss = torch.as_tensor(loss)
        if loss.numel() != 1:
            raise UserError(f"watch.log: must be one number, got shape {tuple(loss.shape)}")
        if self._loop is not None:
            self._results.log_loss(cast(Trainer, self._loop), loss)

    @property
    def stopped(self) -> str:
        """The rule or limit that has stopped the training; "" while none has."""
        return self._stopping.stopped

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends a plain loop: its parts write what is left, and the error where one ended it; the error passes on.

        Nothing where no epoch has begun.
        """
        if self._loop is None:
            return
        if error is None:
            self._end_batch(self._loop)
            self._call("on_train_end")
            self._call("on_fit_end")
        else:
            self._call("on_exception", error)
        self._loop = None

    def _call(self, hook: str, *values: object) -> None:
        """Calls a hook of all parts, as Lightning does: with the loop as the trainer, no module, and ``values``."""
        for part in self.parts:
            getattr(part, hook)(self._loop, None, *values)


def _spec_of(settings: Mapping[str, object]) -> MonitorSpec:
    """The settings of ``kd.Monitor``, checked.

    Raises:
        UserError: an unknown key or a wrong value; it names the key without ``monitor.``, as the user has written it.
    """
    known = [field.name for field in fields(MonitorSettings)]
    for name in settings:
        if name not in known:
            raise UserError(f"kd.Monitor: no key '{name}'{near(name, known)}")
    try:
        return MonitorSpec(**cast(Json, settings))
    except (TypeError, ValueError) as error:
        names = "|".join(known)
        # before the name of a setting alone: a path or an address may hold the word too
        outer_key = rf"(?<![\w./-])monitor\.(?=(?:{names})\b)"
        reason = re.sub(outer_key, "", first_line(error))
        raise UserError(f"kd.Monitor: {reason}") from error


def _changed(spec: MonitorSpec) -> Json:
    """The settings that are not the defaults, by name without ``monitor.``."""
    defaults = asdict(MonitorSettings())
    return {name: value for name, value in asdict(spec).items() if value != defaults[name]}

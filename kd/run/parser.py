"""The typed configuration, and the objects of a run. The only file that knows jsonargparse."""

import copy
import json
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, fields
from functools import cache
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings
from jsonargparse._common import parsing_settings
from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning_fabric.utilities.seed import seed_everything
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.io import AsyncCheckpointIO

from kd.callbacks.best import Best
from kd.callbacks.export import Export
from kd.callbacks.fidelity import FidelityRecord
from kd.callbacks.finite import Finite
from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.callbacks.learning_rate import LastStep, LearningRate
from kd.callbacks.loggers import RUN, Loggers, check_packages, in_folder
from kd.callbacks.nodes import Nodes
from kd.callbacks.phases import Phases
from kd.callbacks.predictions import Predictions
from kd.callbacks.preemption import Preemption
from kd.callbacks.preflight import Preflight
from kd.callbacks.probe import FeatureProbe
from kd.callbacks.progress import Progress
from kd.callbacks.rank_watch import RankWatch
from kd.callbacks.run_folder import RunFolder, unclaimed
from kd.callbacks.summary import Summary
from kd.data.datamodule import DistillationDataModule
from kd.distill.fitting import check_batch
from kd.errors import UserError
from kd.fit_to_machine.precision import choose_kernels, choose_precision
from kd.launch.cluster import Cluster
from kd.launch.processes import check_processes, started
from kd.lightning_internals import runs_in_child_processes, set_timeout
from kd.module.distillation import DistillationModule
from kd.monitor.keys import MonitorSpec, monitors
from kd.optim import OptimSpec
from kd.report.metric import PROBE, less_is_better
from kd.run.assemble import assemble
from kd.run.build import arguments_of, made
from kd.run.checks import (
    check_losses,
    check_student,
    check_values,
    loggers_with_folders,
    told_by_key,
)
from kd.run.files import BEGIN, END, flatten
from kd.run.messages import one_line
from kd.run.request import TRUSTED
from kd.run.trust import ALL, check_resolved, importable, remember
from kd.settings import CheckpointSpec, Settings, TrainerSettings
from kd.ship.export import save_student
from kd.storage.run_urls import on_disk
from kd.strategies.checkpoint_files import CheckpointFiles
from kd.teachers import shared_teachers
from kd.teachers.open_cache import check_precision

FAST = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # for what was dumped here; never for files from elsewhere


_permissions = threading.RLock()  # jsonargparse has one set of permissions for all of a process


@contextmanager
def imports_allowed(trusted: list[str]) -> Iterator[None]:
    """Inside, jsonargparse imports the listed classes and what ``trusted`` names; afterwards what it did before.

    Another thread's parse waits: its files may name less.
    """
    with _permissions:
        before = dict(parsing_settings)
        # the library's own function only adds to the permissions, so that each call starts from what they were
        set_parsing_settings(
            import_path_denylist=[] if ALL in trusted else ["*"],
            import_path_allowlist=importable(trusted),
            instantiate_subclass_spec_in_any=False,
        )
        try:
            yield
        finally:
            parsing_settings.update(before)


class Parser(ArgumentParser):
    """jsonargparse's parser, whose errors are one line with the nearest key."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises a UserError instead of printing the usage and exiting."""
        raise UserError(one_line(message)) from ex


@cache
def _whole_parser() -> Parser:  # one a process: it takes longer to build than to use
    header = [f"pytorch_lightning=={version('pytorch-lightning')}"]
    parser = Parser(
        parser_mode="omegaconf+", exit_on_error=False, allow_abbrev=False, dump_header=header
    )
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    for own in fields(Settings):
        if own.default is not MISSING:
            parser.add_argument(f"--{own.name}", type=own.type, default=own.default)
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, sub_configs=True)
    parser.set_defaults({f"trainer.{own.name}": own.default for own in fields(TrainerSettings)})
    parser.add_function_arguments(assemble, "model", skip={"data", "optim"}, sub_configs=True)
    parser.set_defaults({"model.task": {"class_path": "kd.tasks.Classification"}})
    parser.add_class_arguments(DistillationDataModule, "data", fail_untyped=False, sub_configs=True)
    for key, spec in (
        ("optim", OptimSpec),
        ("checkpoint", CheckpointSpec),
        ("monitor", MonitorSpec),
    ):
        parser.add_class_arguments(spec, key)
    parser.link_arguments("seed", "data.seed")
    return parser


class KDCLI:
    """Parses recipe, overlays and overrides into one typed configuration, and builds the objects."""

    def __init__(self, args: list[str]) -> None:
        self.cluster: Cluster | None = None
        self._marker: Path | None = None
        own = list(takewhile(lambda item: item.startswith(TRUSTED), args))
        self.trusted = [item.removeprefix(TRUSTED) for item in own]
        self.student_configs: dict[str, str] = {}
        self.recipe_lr: float | None = None  # the learning rate of the recipe's file
        self._yaml, self._plain = "", dict[str, Any]()  # made after a change alone
        with warnings.catch_warnings(action="ignore"):
            self.parser = _whole_parser()
            with imports_allowed(self.trusted):
                self.config = self._parse(args[len(own) :])
            found = self.as_dict()
            check_resolved(found, self.trusted)
            check_values({**found, "name": self.config.name})

    def change(self, settings: Mapping[str, Any]) -> None:
        """Sets values in the resolved configuration, by dotted keys that exist; built objects do not follow."""
        for key, value in settings.items():
            self._yaml, self._plain = "", {}
            *groups, name = key.split(".")
            node = self.config
            for group in groups:
                node = node[group]
            node[name] = value

    def build(self, cluster: Cluster | None = None, marker: Path | None = None) -> None:
        """Builds data, module and trainer from the configuration.

        Args:
            cluster: of the launcher; None: this machine.
            marker: file that names the run's folder for a restarted job.
        """
        self.cluster, self._marker = cluster, marker
        with warnings.catch_warnings(action="ignore"):
            self._build()

    def _parse(self, items: list[str]) -> Namespace:
        try:
            config = self.parser.parse_args(items)
        except UserError as error:
            if "trainer.logger: needs save_dir" not in str(error):
                raise
            items.append(loggers_with_folders(items) or f"--trainer.logger.save_dir={RUN}")
            config = self.parser.parse_args(items)
        except OmegaConfBaseException as error:
            text = " ".join(str(error).split("full_key")[0].split())
            raise UserError(f"{error.full_key}: {text}") from error
        strategy = config.trainer.strategy
        if (
            isinstance(strategy, str) and "." in strategy
        ):  # a class path alone; the parser takes it for a name
            config = self.parser.parse_args(
                [*items, f"--trainer.strategy={json.dumps({'class_path': strategy})}"]
            )
            if isinstance(config.trainer.strategy, str):
                raise UserError(f"trainer.strategy: no class '{strategy}'")
        return config

    def _build_loggers(self, specs: list[dict[str, Any]]) -> list[Logger]:
        return [cast(Logger, made(Logger, spec, "trainer.logger", self.trusted)) for spec in specs]

    def check_groups(self) -> None:
        """Reports mistakes in the groups that are built in a run alone: before machines cost money."""
        for key, spec in (("monitor", MonitorSpec), ("optim", OptimSpec)):
            made(spec, self.as_dict()[key], key, self.trusted)

    def _seed(self) -> None:
        logging.getLogger("lightning_fabric.utilities.seed").setLevel(logging.WARNING)
        seed_everything(self.config.seed, workers=True, verbose=False)

    def _build(self) -> None:
        self._seed()
        self.precision_note = ""
        if self.config.trainer.precision is None:
            chosen, self.precision_note = choose_precision(str(self.config.trainer.accelerator))
            self.change({"trainer.precision": chosen})
        try:
            with shared_teachers() if self.config.students else nullcontext():
                given = self.config.as_dict()
                trainer = self._in_run_folder(given["trainer"])
                trainer["logger"] = self._plain_loggers(given["trainer"]["logger"])
                self._given = arguments_of(Trainer, trainer, "trainer", self.trusted)
                data = made(DistillationDataModule, given["data"], "data", self.trusted)
                self.datamodule = cast(DistillationDataModule, data)
                self.model = self._together() if self.config.students else self._module(self.config)
                self.trainer = self.instantiate_trainer()
        except Exception as error:
            raise told_by_key(error, self.as_dict()) from error
        for name, module in self.model.students.named().items():
            key = f"students.{name}.model" if name else "model"
            check_losses(module.objective, key, len(self.datamodule.info.classes))
            check_batch(
                module.objective.active, self.datamodule.batch_size, self.trainer.world_size
            )
        self.datamodule.splits.check_fraction()
        if self.model.teacher is not None:
            check_precision(self.model.teacher, self.datamodule, self.model.students.wanted)
        if runs_in_child_processes(
            self.trainer
        ):  # the run would be in a child process, and lost with it
            raise UserError(
                f"trainer.strategy: '{self.config.trainer.strategy}' is not supported; take ddp"
            )

    def _in_run_folder(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """The trainer's settings with ``RUN`` replaced; a profiler that names no folder gets the run's."""
        profiler = trainer["profiler"]
        if (
            isinstance(profiler, dict)
            and (profiler.get("init_args") or {}).get("dirpath", ...) is None
        ):
            trainer = {
                **trainer,
                "profiler": {**profiler, "init_args": {**profiler["init_args"], "dirpath": RUN}},
            }
        return in_folder(trainer, unclaimed(on_disk(self.config.runs_dir) / self.config.recipe))

    def _plain_loggers(self, given: object) -> object:
        """Lightning's own value of ``trainer.logger``; loggers with arguments are built once the run has a folder."""
        self.loggers = [
            spec
            for spec in (given if isinstance(given, list) else [given])
            if isinstance(spec, dict)
        ]
        for spec in self.loggers:
            check_packages(spec)
        return False if self.loggers else given

    def instantiate_trainer(self) -> Trainer:
        """The trainer, with kd's callbacks and checkpoints beside the recipe's own.

        Raises:
            UserError: a monitored metric that the run does not have.
        """
        config = self.config
        taught = bool(self.model.teacher and self.model.teacher.has_head)
        known = [f"val/{name}" for name in self.model.task.metric_names(taught)]
        monitor = config.checkpoint.monitor or f"val/{self.model.task.monitored}"
        if config.checkpoint.monitor and not self.model.students.measured and not config.resume:
            raise UserError(
                "checkpoint.monitor: nothing trains the student's classifier, so there is no validation "
                "metric; the last epoch is exported"
            )
        if monitor in {f"val/{name}" for name in PROBE} - set(known):
            raise UserError(
                f"checkpoint.monitor: {monitor} needs labelled pictures: data.probe.root=DIR"
            )
        if monitor not in known:
            raise UserError(
                f"checkpoint.monitor: must be one of {', '.join(known)}, got '{monitor}'"
            )
        usual = "min" if less_is_better(monitor) else "max"
        mode = config.checkpoint.mode or usual
        if mode != usual and type(self.model.task).__module__.startswith("kd."):
            raise UserError(
                f"checkpoint.mode: {mode} would keep the worst epoch by {monitor}; leave it out"
            )
        resume = Path(config.resume) if config.resume else None
        preflight = Preflight(config.preflight, on_disk(config.runs_dir) / config.recipe)
        where = resume.resolve() / "checkpoints" if resume else None
        last = LastCheckpoint(
            where, config.checkpoint.every_n_steps, config.checkpoint.every_n_minutes
        )
        text = self.as_yaml()
        remember(text, self.as_dict())
        self.folder = RunFolder(
            on_disk(config.runs_dir) / config.recipe, text, resume, self._marker, config.name
        )
        preemption = Preemption(last)
        watching = monitors(MonitorSpec(**config.monitor), preemption)
        best = Best(monitor, mode, self.student_configs, save_student)
        self.summary = Summary(self.folder, preflight, preemption, config.recipe, config.seed, best)
        loggers = Loggers(self.loggers, self._build_loggers, flatten(self.as_dict()))
        nodes = Nodes(self.cluster.launcher if self.cluster else None)
        self.rank_watch = RankWatch(config.rank_timeout_s)
        ours: list[Callback] = [
            nodes,
            self.rank_watch,
            preflight,
            FeatureProbe(preflight),
            self.folder,
            loggers,
            LearningRate(),
            LastStep(),
            Finite(self._rate()),
            preemption,
            *watching,
            best,
            FidelityRecord(preflight, best),
            self.summary,
            last,
            *([Predictions()] if self.model.task.draws else []),
        ]
        if config.trainer.enable_progress_bar is not False:
            ours.append(Progress(next((w.so_far for w in watching if isinstance(w, Phases)), None)))
        own = self._given["callbacks"] or []
        callbacks = [*(own if isinstance(own, list) else [own]), *ours]
        given = {
            **self._given,
            "callbacks": callbacks,
            "enable_progress_bar": False,
            "plugins": self._plugins(),
        }
        try:
            trainer = Trainer(**given)
        except UserError:
            raise
        except (
            Exception
        ) as error:  # all that Lightning and the packages it looks for have against the settings
            raise UserError(
                f"trainer: {' '.join(str(error).split())[:300] or type(error).__name__}"
            ) from error
        if not any(
            isinstance(plugin, ClusterEnvironment) for plugin in self._given["plugins"] or []
        ):
            check_processes(trainer)
        if (
            str(config.trainer.precision) in ("16", "16-mixed")
            and trainer.strategy.root_device.type == "cpu"
        ):
            instead = "a CPU would train in bf16-mixed; take bf16-mixed or 32-true"
            raise UserError(f"trainer.precision: {config.trainer.precision} needs a GPU, {instead}")
        students = [student.model for student in self.model.students.named().values()]
        models = [*students, *([self.model.teacher.model] if self.model.teacher else [])]
        benchmark = config.trainer.benchmark is None and not config.trainer.deterministic
        choose_kernels(trainer, models, config.matmul_precision, benchmark)
        trainer.callbacks.insert(0, Export(best, save_student))  # type: ignore[attr-defined]
        self.rank_watch.timeout_s = set_timeout(trainer.strategy, config.rank_timeout_s)
        files = CheckpointFiles()
        trainer.strategy.checkpoint_io = (
            AsyncCheckpointIO(files) if config.checkpoint.asynchronous else files
        )
        return trainer

    def _rate(self) -> str:
        """The learning rate, and the recipe's where it is another one."""
        rate = f"optim.lr={self.config.optim.lr:g}"
        if self.recipe_lr in (None, self.config.optim.lr):
            return rate
        return f"{rate} (the recipe's: {self.recipe_lr:g})"

    def _plugins(self) -> list[object] | None:
        plugins: list[object] = []
        configured = self._given["plugins"]
        if isinstance(configured, list | tuple):
            plugins += configured
        elif configured:
            plugins.append(configured)
        # Lightning takes SLURM's or Kubernetes' variables for the job's, though this process starts the others itself
        existing = started()
        alone = existing is None or existing.by in ("mpirun", "another program")
        if alone and not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
            plugins.append(LightningEnvironment())
        return plugins or None

    def _module(self, config: Namespace) -> DistillationModule:
        settings = config.as_dict()
        optim = cast(OptimSpec, made(OptimSpec, settings["optim"], "optim", self.trusted))
        arguments = arguments_of(assemble, settings["model"], "model", self.trusted)
        return assemble(self.datamodule.info, optim=optim, **arguments)

    def _together(self) -> DistillationModule:
        modules: dict[str, DistillationModule] = {}
        for name, differences in self.config.students.items():
            check_student(name, differences or {})
            items: list[str] = []
            for key, value in (differences or {}).items():
                text = value if isinstance(value, str) else json.dumps(value)
                items.append(f"--{key}={text}")
            with imports_allowed(self.trusted):
                config = self.parser.parse_args(items, self.config.clone())
            config.students = None
            self.student_configs[name] = self._dump(config)
            remember(self.student_configs[name], yaml.load(self.student_configs[name], FAST))
            self._seed()
            modules[name] = self._module(config)
        return DistillationModule.together(modules)

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as nested dicts of plain values; a copy."""
        self._plain = self._plain or yaml.load(self.as_yaml(), FAST)
        return copy.deepcopy(self._plain)

    def as_yaml(self) -> str:
        """The resolved configuration; ``kd-train FILE`` repeats the run."""
        self._yaml = self._yaml or self._dump(self.config.clone())
        return self._yaml

    def _dump(self, config: Namespace) -> str:
        config.resume = config.name = None
        with imports_allowed(self.trusted):
            text = self.parser.dump(config, skip_none=False, skip_validation=True)
        return BEGIN + text + END

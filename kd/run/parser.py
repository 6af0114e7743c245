"""The typed configuration: LightningCLI with our keys. The only file that knows jsonargparse."""

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import MISSING, fields
from functools import reduce
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning_fabric.plugins.environments import ClusterEnvironment
from lightning_fabric.utilities.seed import seed_everything
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.io import AsyncCheckpointIO

from kd.callbacks.best import Best
from kd.callbacks.export import Export
from kd.callbacks.fidelity import FidelityRecord
from kd.callbacks.finite import Finite
from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.callbacks.learning_rate import LastStep, LearningRate
from kd.callbacks.loggers import RUN, Loggers, check_packages
from kd.callbacks.nodes import Nodes
from kd.callbacks.phases import Phases
from kd.callbacks.predictions import Predictions
from kd.callbacks.preemption import Preemption
from kd.callbacks.preflight import Preflight
from kd.callbacks.probe import FeatureProbe
from kd.callbacks.progress import Progress
from kd.callbacks.run_folder import RunFolder
from kd.callbacks.summary import Summary
from kd.data.datamodule import DistillationDataModule
from kd.distill.fitting import check_batch
from kd.errors import UserError, causes
from kd.fit_to_machine.precision import choose_kernels, choose_precision
from kd.launch.cluster import Cluster
from kd.lightning_internals import runs_in_child_processes
from kd.module.distillation import DistillationModule
from kd.monitor.keys import MonitorSpec, monitors
from kd.optim import OptimSpec
from kd.report.metric import PROBE, less_is_better
from kd.run.assemble import assemble
from kd.run.checks import Unbuilt, build, check_losses, check_student, check_values, loggers_with_folders, told_by_key
from kd.run.files import BEGIN, END, flatten
from kd.run.messages import one_line
from kd.run.request import TRUSTED
from kd.run.settings import CheckpointSpec, Settings, TrainerSettings
from kd.run.trust import ALL, check_resolved, importable, remember
from kd.ship.export import save_student
from kd.storage.run_urls import on_disk
from kd.strategies.checkpoint_files import CheckpointFiles
from kd.teachers import shared_teachers
from kd.teachers.open_cache import check_precision

FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # for what was dumped here; never for files from elsewhere
_built: list[LightningArgumentParser] = []  # one a process: it takes longer to build than to use


class Parser(LightningArgumentParser):
    def instantiate_classes(self, cfg: Namespace) -> Namespace:
        failed: list[Unbuilt] = []

        def noted(kind: type, *args: object, **arguments: object) -> object:
            try:
                return build(kind, *args, **arguments)
            except Unbuilt as error:
                failed.append(error)
                raise

        try:
            return self.instantiate(cfg, instantiators=[(noted, object, True)])
        except Exception as error:
            if failed and not any(isinstance(cause, Unbuilt) for cause in causes(error)):
                raise failed[-1] from failed[-1].reason  # where several types are tried only the texts are left
            raise

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(one_line(message, list(known_keys(self)))) from ex


def known_keys(parser: LightningArgumentParser) -> Iterator[str]:
    """All keys that the command line takes, the short ones of losses and sources aside."""
    for action in parser._actions:
        if action.dest and action.dest not in ("help", "config", "print_config"):
            yield action.dest


def _add_model(parser: LightningArgumentParser) -> None:
    parser.add_function_arguments(assemble, "model", skip={"data", "optim"}, sub_configs=True)
    parser.set_defaults({"model.task": {"class_path": "kd.tasks.Classification"}})


class KDCLI(LightningCLI):
    """Parses recipe, overlays and overrides into one typed configuration, and builds the objects."""

    def __init__(self, args: list[str]) -> None:
        self.cluster: Cluster | None = None
        self._marker: Path | None = None
        own = list(takewhile(lambda item: item.startswith(TRUSTED), args))
        self._trusted = [item.removeprefix(TRUSTED) for item in own]
        self.student_configs: dict[str, str] = {}
        self._yaml, self._plain = "", dict[str, Any]()  # made after a change alone
        with warnings.catch_warnings(action="ignore"):
            super().__init__(
                assemble,
                DistillationDataModule,
                save_config_callback=None,
                trainer_defaults={own.name: own.default for own in fields(TrainerSettings)},
                parser_class=Parser,
                parser_kwargs={"parser_mode": "omegaconf+", "exit_on_error": False, "allow_abbrev": False},
                args=args[len(own) :],
                run=False,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )

    def change(self, settings: Mapping[str, Any]) -> None:
        for key, value in settings.items():
            self._yaml, self._plain = "", {}
            *path, last = key.split(".")
            reduce(lambda node, part: node[part], path, self.config)[last] = value

    def build(self, cluster: Cluster | None = None, marker: Path | None = None) -> None:
        self.cluster, self._marker = cluster, marker
        with warnings.catch_warnings(action="ignore"):
            self._build()

    def setup_parser(self, *arguments: Any) -> None:
        if not _built:
            super().setup_parser(*arguments)
            _built.append(self.parser)
        self.parser = _built[0]

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for own in fields(Settings):
            if own.default is not MISSING:
                parser.add_argument(f"--{own.name}", type=own.type, default=own.default)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """As Lightning's, but what is below ``model`` stays settings: one set of them may make several students."""
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        _add_model(parser)
        parser.add_lightning_class_args(DistillationDataModule, "data")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(OptimSpec, "optim")
        parser.add_class_arguments(CheckpointSpec, "checkpoint")
        parser.add_class_arguments(MonitorSpec, "monitor")
        parser.link_arguments("seed", "data.seed")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        items = list(args or [])
        set_parsing_settings(
            import_path_denylist=[] if ALL in self._trusted else ["*"],
            import_path_allowlist=importable(self._trusted),
            instantiate_subclass_spec_in_any=False,
        )
        try:
            self.config: Namespace = parser.parse_args(items)
        except UserError as error:
            if "trainer.logger: needs save_dir" not in str(error):
                raise
            items.append(loggers_with_folders(items) or f"--trainer.logger.save_dir={RUN}")
            self.config = parser.parse_args(items)
        except OmegaConfBaseException as error:
            text = " ".join(str(error).split("full_key")[0].split())
            raise UserError(f"{error.full_key}: {text}") from error
        strategy = self.config.trainer.strategy
        if isinstance(strategy, str) and "." in strategy:  # a class path alone; the parser takes it for a name
            self.config = parser.parse_args([*items, f"--trainer.strategy={json.dumps({'class_path': strategy})}"])
            if isinstance(self.config.trainer.strategy, str):
                raise UserError(f"trainer.strategy: no class '{strategy}'")
        found = self.as_dict()
        check_resolved(found, self._trusted)
        check_values({**found, "name": self.config.name})

    def _set_seed(self) -> None:
        """Nothing: settings are parsed without."""

    def instantiate_classes(self) -> None:
        """Nothing: :meth:`build` does, when all settings are known."""

    def check_groups(self) -> None:
        """Reports mistakes in the groups that are built in a run alone: before machines cost money."""
        config = self.as_dict()
        for key, spec in (("monitor", MonitorSpec), ("optim", OptimSpec)):
            try:
                spec(**config[key])
            except UserError:
                raise
            except ValueError as error:  # it begins with the argument's name
                raise UserError(f"{key}." + str(error).replace(" ", ": ", 1)) from error

    def _seed(self) -> None:
        logging.getLogger("lightning_fabric.utilities.seed").setLevel(logging.WARNING)
        seed_everything(self.config.seed, workers=True, verbose=False)

    def _build(self) -> None:
        self._seed()
        self.precision_note = ""
        if self.config.trainer.precision is None:
            chosen, self.precision_note = choose_precision(str(self.config.trainer.accelerator))
            self.change({"trainer.precision": chosen})
        self._set_loggers_aside()
        try:
            with shared_teachers() if self.config.students else nullcontext():
                self.config_init = self.parser.instantiate_classes(self.config)
                self.datamodule = self.config_init.data
                self.model = self._together() if self.config.students else self._module(self.config_init)
                self.trainer = self.instantiate_trainer()
        except Exception as error:
            raise told_by_key(error, self.as_dict()) from error
        for name, module in self.model.students.named().items():
            key = f"students.{name}.model" if name else "model"
            check_losses(module.objective, key, len(self.datamodule.info.classes))
            check_batch(module.objective.active, self.datamodule.batch_size, self.trainer.world_size)
        self.datamodule.splits.check_fraction()
        if self.model.teacher is not None:
            check_precision(self.model.teacher, self.datamodule, self.model.students.wanted)
        if runs_in_child_processes(self.trainer):  # the run would be in a child process, and lost with it
            raise UserError(f"trainer.strategy: '{self.config.trainer.strategy}' is not supported; take ddp")

    def _set_loggers_aside(self) -> None:
        self._logger = self.config.trainer.logger
        loggers = self.as_dict()["trainer"]["logger"]
        self.loggers = [x for x in (loggers if isinstance(loggers, list) else [loggers]) if isinstance(x, dict)]
        for spec in self.loggers:
            check_packages(spec)
        if self.loggers:
            self.config.trainer.logger = False

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config
        taught = bool(self.model.teacher and self.model.teacher.has_head)
        known = [f"val/{name}" for name in self.model.task.metric_names(taught)]
        monitor = config.checkpoint.monitor or f"val/{self.model.task.monitored}"
        has_best = any(module.is_measured for module in self.model.students.named().values())
        if config.checkpoint.monitor and not has_best and not config.resume:
            raise UserError("checkpoint.monitor: nothing trains the student's classifier, so there is no validation "
                            "metric; the last epoch is exported")  # fmt: skip
        if monitor in {f"val/{name}" for name in PROBE} - set(known):
            raise UserError(f"checkpoint.monitor: {monitor} needs labelled pictures: data.probe.root=DIR")
        if monitor not in known:
            raise ValueError(f"monitor must be one of {', '.join(known)}, got '{monitor}'")
        usual = "min" if less_is_better(monitor) else "max"
        mode = config.checkpoint.mode or usual
        if mode != usual and type(self.model.task).__module__.startswith("kd."):
            raise UserError(f"checkpoint.mode: {mode} would keep the worst epoch by {monitor}; leave it out")
        resume = Path(config.resume) if config.resume else None
        preflight = Preflight(config.preflight, on_disk(config.runs_dir) / config.recipe)
        where = resume.resolve() / "checkpoints" if resume else None
        last = LastCheckpoint(where, config.checkpoint.every_n_steps, config.checkpoint.every_n_minutes)
        text = self.as_yaml()
        remember(text, self.as_dict())
        self.folder = RunFolder(on_disk(config.runs_dir) / config.recipe, text, resume, self._marker, config.name)
        preemption = Preemption(last)
        watching = monitors(MonitorSpec(**config.monitor), preemption)
        best = Best(monitor, mode, self.student_configs, save_student)
        self.summary = Summary(self.folder, preflight, preemption, config.recipe, config.seed, best)
        loggers = Loggers(self.loggers, build_loggers, flatten(self.as_dict()))
        nodes = Nodes(self.cluster.launcher if self.cluster else None)
        ours: list[Callback] = [
            nodes, preflight, FeatureProbe(preflight), self.folder, loggers, LearningRate(), LastStep(), Finite(),
            preemption, *watching, best, FidelityRecord(preflight, best), self.summary, last,
            *([Predictions()] if self.model.task.draws else []),
        ]  # fmt: skip
        if config.trainer.enable_progress_bar is not False:
            ours.append(Progress(next((w.so_far for w in watching if isinstance(w, Phases)), None)))
        self.trainer_defaults = {**self.trainer_defaults, "callbacks": ours}
        try:
            trainer = super().instantiate_trainer(enable_progress_bar=False, plugins=self._plugins(), **kwargs)
        except UserError:
            raise
        except Exception as error:  # all that Lightning and the packages it looks for have against the settings
            raise UserError(f"trainer: {' '.join(str(error).split())[:300] or type(error).__name__}") from error
        students = [student.model for student in self.model.students.named().values()]
        models = [*students, *([self.model.teacher.model] if self.model.teacher else [])]
        benchmark = config.trainer.benchmark is None and not config.trainer.deterministic
        choose_kernels(trainer, models, config.matmul_precision, benchmark)
        trainer.callbacks.insert(0, Export(best, save_student))  # type: ignore[attr-defined]
        files = CheckpointFiles()
        trainer.strategy.checkpoint_io = AsyncCheckpointIO(files) if config.checkpoint.asynchronous else files
        return trainer

    def _plugins(self) -> list[object] | None:
        own = self.config_init.trainer.plugins
        plugins = [*own] if isinstance(own, list | tuple) else [own] if own else []
        environment = self.cluster.environment() if self.cluster else None
        if environment and not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
            plugins.append(environment)
        return plugins or None

    def _module(self, built: Namespace) -> DistillationModule:
        return assemble(self.datamodule.info, optim=built.optim, **built.model)

    def _together(self) -> DistillationModule:
        parser = Parser(parser_mode="omegaconf+", exit_on_error=False, allow_abbrev=False)
        parser.add_class_arguments(OptimSpec, "optim")
        _add_model(parser)
        found: dict[str, DistillationModule] = {}
        for name, own in self.config.students.items():
            check_student(name, own or {})
            items = [f"--{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in (own or {}).items()]
            settings = parser.parse_args(items, Namespace(optim=self.config.optim, model=self.config.model).clone())
            config = Namespace({**vars(self.config.clone()), **vars(settings), "students": None})
            config.trainer.logger = self._logger
            self.student_configs[name] = self._dump(config)
            remember(self.student_configs[name], yaml.load(self.student_configs[name], FAST))
            self._seed()
            found[name] = self._module(parser.instantiate_classes(settings))
        return DistillationModule.together(found)

    def as_dict(self) -> dict[str, Any]:
        self._plain = self._plain or yaml.load(self.as_yaml(), FAST)
        return copy.deepcopy(self._plain)

    def as_yaml(self) -> str:
        self._yaml = self._yaml or self._dump(self.config.clone())
        return self._yaml

    def _dump(self, config: Namespace) -> str:
        config.resume = config.name = None
        return BEGIN + self.parser.dump(config, skip_none=False, skip_validation=True) + END


def build_loggers(specs: list[dict[str, Any]]) -> list[Logger]:
    parser = Parser(parser_mode="omegaconf+", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--loggers", type=list[Logger], default=[])
    return parser.instantiate_classes(parser.parse_object({"loggers": specs})).loggers

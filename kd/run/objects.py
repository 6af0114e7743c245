"""The objects of a run from its settings: data, module, trainer and folder."""

import copy
import logging
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.plugins.io import AsyncCheckpointIO

from kd.callbacks.asked_answers import AskedAnswers
from kd.callbacks.best import Best
from kd.callbacks.export import Export
from kd.callbacks.fidelity import FidelityRecord
from kd.callbacks.finite import Finite
from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.callbacks.learning_rate import LastStep, LearningRate
from kd.callbacks.loggers import Loggers, in_folder
from kd.callbacks.nodes import Nodes
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
from kd.distill.objective import Objective
from kd.errors import UserError
from kd.fit_to_machine.oldest_gpu import check_gpus
from kd.fit_to_machine.precision import choose_kernels, choose_precision
from kd.launch.child import trains_teacher
from kd.launch.cluster import Cluster, is_rank_zero
from kd.launch.processes import check_processes, started
from kd.lightning_internals import runs_in_child_processes, set_timeout
from kd.losses import LogitLoss
from kd.module.distillation import DistillationModule
from kd.monitor.monitor import Monitor
from kd.monitor.own_run import OwnRun
from kd.report.metric import PROBE, less_is_better
from kd.run.assemble import assemble
from kd.run.build import arguments_of, built
from kd.run.checks import with_key
from kd.run.files import flatten
from kd.run.resolve import Tree, change
from kd.run.run import Run
from kd.run.streams import quiet_libraries
from kd.run.trust import remember
from kd.settings import (
    DataSettings,
    LearningSettings,
    MonitorSettings,
    OptimSettings,
    TrainerSettings,
)
from kd.ship.export import save_student
from kd.storage.run_urls import on_disk
from kd.strategies.checkpoint_files import CheckpointFiles
from kd.teachers import match_answers, shared_teachers
from kd.teachers.open_cache import check_precision


def build(run: Run, cluster: Cluster | None = None, marker: Path | None = None) -> None:
    """Gives a run its data, module, trainer and folder; nothing is written.

    Args:
        run: its settings are resolved.
        cluster: of the launcher; None: this machine.
        marker: file that names the run's folder for a restarted job.

    Raises:
        UserError: settings that do not fit each other, the data or the machine.
    """
    quiet_libraries()
    run.cluster = cluster
    run.marker = marker
    with warnings.catch_warnings(action="ignore"):
        _seed(run)
        accelerator = str(run.config["trainer"]["accelerator"])
        check_gpus(accelerator)
        if run.config["trainer"]["precision"] is None:
            precision, run.precision_note = choose_precision(accelerator)
            run.change({"trainer.precision": precision})
        try:
            with shared_teachers() if run.config["students"] else nullcontext():
                run.trainer_arguments = _trainer_arguments(run)
                run.data = _data(run)
                if run.config["students"]:
                    run.module = _together(run)
                else:
                    run.module = _module(run, run.config)
                run.trainer = make_trainer(run)
                match_answers(run.module.teacher, run.data)
        except Exception as error:
            raise with_key(error, run.config) from error
        _check_built(run)


def check_groups(run: Run) -> None:
    """Reports mistakes in the groups that are built in a run alone: before machines cost money."""
    built(MonitorSettings, run.config["monitor"], "monitor", run.trusted)
    built(OptimSettings, run.config["optim"], "optim", run.trusted)


def _check_built(run: Run) -> None:
    """Checks that need built objects: losses and classes, batch size and processes, precision, how processes start."""
    for name, module in run.module.students.named().items():
        key = "model"
        if name:
            key = f"students.{name}.model"
        check_losses(module.objective, key, len(run.data.info.classes))
        check_batch(module.objective.active, run.data.batch_size, run.trainer.world_size)
    run.data.splits.check_fraction()
    if run.module.teacher is not None:
        check_precision(run.module.teacher, run.data, run.module.students.wanted)
    # the run would be in a child process, and lost with it
    if runs_in_child_processes(run.trainer):
        strategy = run.config["trainer"]["strategy"]
        raise UserError(f"trainer.strategy: '{strategy}' is not supported; take ddp")


def check_losses(objective: Objective, key: str, classes: int) -> None:
    """Rejects losses over logits that are NaN or infinite on four made-up answers.

    Args:
        objective: of a student.
        key: where its settings are, for messages.
        classes: C of the data.
    """
    trial = None
    if classes:
        trial = objective.task.trial(classes)
    if trial is None:
        return
    shape, target = trial
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(shape, generator=generator) for _ in range(2))
    for name, loss in objective.losses.items():
        if not isinstance(loss, LogitLoss) or loss.needs_index:
            continue
        try:
            logits = student.clone().requires_grad_()
            value = copy.deepcopy(loss)(logits, teacher, target)
            value.backward()
        except Exception:
            continue
        if not (
            value.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
        ):
            numbers = []
            for setting, number in vars(loss).items():
                if isinstance(number, float):
                    numbers.append(f"{setting}={number:g}")
            given = ", ".join(numbers)
            raise UserError(
                f"{key}.distill_losses.{name}: is not finite on a trial batch ({given})"
            )


def _data(run: Run) -> DistillationDataModule:
    """The data of a run; pictures that were listed before torch was imported are not listed again.

    They are taken over once: a run that is built again lists its own, as data may hold out some of them.
    """
    settings = {**run.config["data"], "seed": run.config["seed"]}
    splits = run.splits
    run.splits = None
    if splits is not None:
        settings["source"] = splits.source
    data: DistillationDataModule = built(DataSettings, settings, "data", run.trusted)
    if splits is not None:
        data.splits = splits
    return data


def _seed(run: Run) -> None:
    logging.getLogger("lightning_fabric.utilities.seed").setLevel(logging.WARNING)
    seed_everything(run.config["seed"], workers=True, verbose=False)


def _trainer_arguments(run: Run) -> dict[str, Any]:
    """Arguments of Lightning's Trainer; loggers with arguments are built once the run has a folder."""
    runs = on_disk(run.config["runs_dir"]) / run.config["recipe"]
    settings = in_folder(run.config["trainer"], unclaimed(runs))
    loggers = run.config["trainer"]["logger"]
    specs = loggers
    if not isinstance(loggers, list):
        specs = [loggers]
    run.loggers = [spec for spec in specs if isinstance(spec, dict)]
    if run.loggers:
        settings = {**settings, "logger": False}
    return arguments_of(TrainerSettings, settings, "trainer", run.trusted)


def _module(run: Run, config: Tree) -> DistillationModule:
    optim = built(OptimSettings, config["optim"], "optim", run.trusted)
    arguments = arguments_of(LearningSettings, config["model"], "model", run.trusted)
    return assemble(run.data.info, optim=optim, **arguments)


def _together(run: Run) -> DistillationModule:
    """One module of several students; each has the run's settings but for those of its own."""
    modules: dict[str, DistillationModule] = {}
    for name, differences in run.config["students"].items():
        config = change(run.config, [differences or {}], run.trusted)
        config["students"] = None
        text = run.as_yaml(config)
        run.student_configs[name] = text
        remember(text, config)
        _seed(run)
        modules[name] = _module(run, config)
    return DistillationModule.together(modules)


def make_trainer(run: Run) -> Trainer:
    """The trainer, with kd's callbacks and checkpoints beside the recipe's own, and the run's folder.

    Raises:
        UserError: a monitored metric that the run does not have, or what Lightning has against the settings.
    """
    callbacks = run.trainer_arguments["callbacks"] or []
    if not isinstance(callbacks, list):
        callbacks = [callbacks]
    best = _best(run)
    arguments = {
        **run.trainer_arguments,
        "callbacks": [*callbacks, *_callbacks(run, best)],
        "enable_progress_bar": False,
        "plugins": _plugins(run.trainer_arguments["plugins"]),
    }
    try:
        trainer = Trainer(**arguments)
    except UserError:
        raise
    except Exception as error:  # all that Lightning and its packages have against the settings
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"trainer: {text}") from error
    _check_trainer(run, trainer)
    students = [student.model for student in run.module.students.named().values()]
    models = [*students, *([run.module.teacher.model] if run.module.teacher else [])]
    settings = run.config["trainer"]
    benchmark = settings["benchmark"] is None and not settings["deterministic"]
    choose_kernels(trainer, models, run.config["matmul_precision"], benchmark)
    trainer.callbacks.insert(0, Export(best, save_student))  # type: ignore[attr-defined]
    run.rank_watch.timeout_s = set_timeout(trainer.strategy, run.config["rank_timeout_s"])
    files = CheckpointFiles()
    asynchronous = run.config["checkpoint"]["asynchronous"]
    trainer.strategy.checkpoint_io = AsyncCheckpointIO(files) if asynchronous else files
    return trainer


def _best(run: Run) -> Best:
    """The callback that keeps the best epoch, by a metric that the run has.

    Raises:
        UserError: a metric that the run has not, or a mode that would keep the worst epoch.
    """
    settings = run.config["checkpoint"]
    task = run.module.task
    taught = bool(run.module.teacher and run.module.teacher.has_head)
    known = [f"val/{name}" for name in task.metric_names(taught)]
    monitor = settings["monitor"] or f"val/{task.monitored}"
    is_validated = bool(run.module.students.measured)
    # A resumed run keeps the metric that it was begun with.
    if settings["monitor"] and not is_validated and not run.config["resume"]:
        raise UserError(
            "checkpoint.monitor: nothing trains the student's classifier, so there is no validation "
            "metric; the last epoch is exported"
        )
    if monitor in {f"val/{name}" for name in PROBE} - set(known):
        raise UserError(
            f"checkpoint.monitor: {monitor} needs labelled pictures: data.probe.root=DIR"
        )
    if monitor not in known:
        raise UserError(f"checkpoint.monitor: must be one of {', '.join(known)}, got '{monitor}'")
    usual = "min" if less_is_better(monitor) else "max"
    mode = settings["mode"] or usual
    if mode != usual and type(task).__module__.startswith("kd."):
        raise UserError(
            f"checkpoint.mode: {mode} would keep the worst epoch by {monitor}; leave it out"
        )
    return Best(monitor, mode, run.student_configs, save_student)


def _callbacks(run: Run, best: Best) -> list[Callback]:
    """kd's own callbacks in the order in which they are called; the run gets its folder and its summary."""
    config = run.config
    runs = on_disk(config["runs_dir"]) / config["recipe"]
    resumed_run = None
    if config["resume"]:
        resumed_run = Path(config["resume"])
    checkpoints = None
    if resumed_run:
        checkpoints = resumed_run.resolve() / "checkpoints"
    settings = config["checkpoint"]
    last = LastCheckpoint(checkpoints, settings["every_n_steps"], settings["every_n_minutes"])
    text = run.as_yaml()
    remember(text, config)
    run.folder = RunFolder(runs, text, resumed_run, run.marker, config["name"])
    preflight = Preflight(config["preflight"], runs)
    preemption = Preemption(last, speaks=is_rank_zero() and not trains_teacher())
    spec = built(MonitorSettings, config["monitor"], "monitor", run.trusted)
    monitor = Monitor.of_own_run(OwnRun(), spec, preemption.stop_for)
    run.summary = Summary(run.folder, preflight, preemption, config["recipe"], config["seed"], best)
    run.rank_watch = RankWatch(config["rank_timeout_s"])
    callbacks: list[Callback] = [
        Nodes(run.cluster.launcher if run.cluster else None),
        run.rank_watch,
        preflight,
        FeatureProbe(preflight),
        run.folder,
        AskedAnswers(),
        Loggers(run.loggers, run.build_loggers, flatten(run.written)),
        LearningRate(),
        LastStep(),
        Finite(_rate(run)),
        preemption,
        monitor,
        best,
        FidelityRecord(preflight, best),
        run.summary,
        last,
    ]
    if run.module.task.draws:
        callbacks.append(Predictions())
    if config["trainer"]["enable_progress_bar"] is not False:
        callbacks.append(
            Progress(
                monitor.phases.so_far if spec.enabled else None, "teacher: " * trains_teacher()
            )
        )
    return callbacks


def _check_trainer(run: Run, trainer: Trainer) -> None:
    """Checks of the Trainer: launched processes, and a precision that a CPU does not have."""
    plugins = run.trainer_arguments["plugins"] or []
    if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        check_processes(trainer)
    precision = str(run.config["trainer"]["precision"])
    on_cpu = trainer.strategy.root_device.type == "cpu"
    if on_cpu and precision in ("16", "16-mixed"):
        instead = "a CPU would train in bf16-mixed; take bf16-mixed or 32-true"
        raise UserError(f"trainer.precision: {precision} needs a GPU, {instead}")


def _rate(run: Run) -> str:
    """The learning rate, and the recipe's where it is another one."""
    lr = run.config["optim"]["lr"]
    rate = f"optim.lr={lr:g}"
    if run.recipe_lr in (None, lr):
        return rate
    return f"{rate} (the recipe's: {run.recipe_lr:g})"


def _plugins(configured: object) -> list[object] | None:
    """The Trainer's plugins: the configured ones, and Lightning's own environment where this process starts the
    others.
    """
    plugins: list[object] = []
    if isinstance(configured, list):
        plugins += configured
    elif configured:
        plugins.append(configured)
    # Lightning takes SLURM's or Kubernetes' variables for the job's, though this process starts the others itself
    existing = started()
    alone = existing is None or existing.by in ("mpirun", "another program")
    if alone and not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        plugins.append(LightningEnvironment())
    return plugins or None

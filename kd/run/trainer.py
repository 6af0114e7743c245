"""A run's trainer, with kd's callbacks, and its folder."""

from pathlib import Path

from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.plugins.io import AsyncCheckpointIO

from kd.callbacks.best import Best
from kd.callbacks.export import Export
from kd.callbacks.fidelity import FidelityRecord
from kd.callbacks.finite import Finite
from kd.callbacks.last_checkpoint import LastCheckpoint
from kd.callbacks.learning_rate import LastStep, LearningRate
from kd.callbacks.loggers import Loggers
from kd.callbacks.nodes import Nodes
from kd.callbacks.preemption import Preemption
from kd.callbacks.preflight import Preflight
from kd.callbacks.probe import FeatureProbe
from kd.callbacks.progress import Progress
from kd.callbacks.run_folder import RunFolder
from kd.callbacks.summary import Summary
from kd.config.trees import flatten
from kd.errors import UserError, plain
from kd.fit_to_machine.precision import choose_kernels
from kd.launch.child import trains_teacher
from kd.launch.cluster import is_rank_zero
from kd.launch.processes import check_processes, started
from kd.lightning_internals import set_timeout, without_sigterm_broadcasts
from kd.monitor.monitor import Monitor
from kd.monitor.own_run import OwnRun
from kd.report.metric import less_is_better
from kd.run.gate import remember
from kd.run.run import Run
from kd.ship.export import save_student
from kd.storage.run_urls import folder_of_recipe
from kd.storage.shown import masked
from kd.strategies.checkpoint_files import CheckpointFiles, fail_together


def make_trainer(run: Run) -> Trainer:
    """The trainer, with kd's callbacks and checkpoints beside the recipe's own, and the run's folder.

    Args:
        run: with data, module and ``trainer_arguments`` (:func:`kd.run.build.build`); it gets its folder and its summary.

    Raises:
        UserError: a monitored metric that the run does not have, another number of processes than the launcher has
            started, fp16 on a CPU, or what Lightning has against the settings.
    """
    plugins = _as_list(run.trainer_arguments["plugins"])
    best = _best(run)
    arguments = {
        **run.trainer_arguments,
        "callbacks": [*_as_list(run.trainer_arguments["callbacks"]), *_callbacks(run, best)],
        "enable_progress_bar": False,  # kd's own callback draws it
        "plugins": _with_environment(plugins) or None,
    }
    try:
        trainer = Trainer(**arguments)
    except UserError:
        raise
    except Exception as error:  # all that Lightning and its packages have against the settings
        raise UserError(f"trainer: {plain(error)}") from error
    if not _has_environment(plugins):
        check_processes(trainer)
    precision = str(run.config["trainer"]["precision"])
    if precision in ("16", "16-mixed") and trainer.strategy.root_device.type == "cpu":
        raise UserError(
            f"trainer.precision: {precision} needs a GPU, a CPU would train in bf16-mixed; take bf16-mixed or 32-true"
        )
    models = [run.module.student.model]
    if run.module.teacher:
        models.append(run.module.teacher.model)
    settings = run.config["trainer"]
    benchmark = settings["benchmark"] is None and not settings["deterministic"]
    choose_kernels(trainer, models, run.config["matmul_precision"], benchmark)
    # the student's file is written before any callback reports on it
    trainer.callbacks.insert(0, Export(best, save_student))  # type: ignore[attr-defined]
    set_timeout(trainer.strategy, run.config["rank_timeout_s"])
    files = CheckpointFiles()
    asynchronous = run.config["checkpoint"]["asynchronous"]
    trainer.strategy.checkpoint_io = AsyncCheckpointIO(files) if asynchronous else files
    fail_together(trainer.strategy)
    without_sigterm_broadcasts(trainer)
    return trainer


def _best(run: Run) -> Best:
    """The callback that keeps the best epoch, by a metric that the run has; without a validation metric it keeps none.

    Raises:
        UserError: a metric that the run has not, or a mode that would keep the worst epoch by a metric of kd's tasks.
    """
    settings = run.config["checkpoint"]
    task = run.module.task
    taught = bool(run.module.teacher and run.module.teacher.has_head)
    known = [f"val/{name}" for name in task.metric_names(taught)]
    monitor = settings["monitor"] or f"val/{task.monitored}"
    is_validated = run.module.student.is_measured
    # A resumed run keeps the metric that it was begun with.
    if settings["monitor"] and not is_validated and not run.config["resume"]:
        raise UserError(
            "checkpoint.monitor: nothing trains the student's classifier, so there is no validation "
            "metric; the last epoch is exported"
        )
    if monitor not in known:
        raise UserError(f"checkpoint.monitor: must be one of {', '.join(known)}, got '{monitor}'")
    usual = "min" if less_is_better(monitor) else "max"
    mode = settings["mode"] or usual
    if mode != usual and type(task).__module__.startswith("kd."):
        raise UserError(
            f"checkpoint.mode: {mode} would keep the worst epoch by {monitor}; leave it out"
        )
    return Best(monitor, mode)


def _callbacks(run: Run, best: Best) -> list[Callback]:
    """kd's own callbacks in the order in which they are called, but for :class:`LastCheckpoint`: Lightning calls it last.

    The run gets its folder and its summary; its settings are noted as started here (:func:`kd.run.gate.remember`).
    """
    config = run.config
    runs = folder_of_recipe(config["runs_dir"], config["recipe"])
    resumed_run = Path(config["resume"]) if config["resume"] else None
    checkpoints = resumed_run.resolve() / "checkpoints" if resumed_run else None
    settings = config["checkpoint"]
    last = LastCheckpoint(checkpoints, settings["every_n_steps"], settings["every_n_minutes"])
    text = run.as_yaml()
    remember(text, config)
    run.folder = RunFolder(runs, text, resumed_run, run.marker, config["name"])
    preflight = Preflight(config["preflight"], runs)
    preemption = Preemption(last, speaks=is_rank_zero() and not trains_teacher())
    monitor = Monitor.of_own_run(OwnRun(), run.monitor, preemption.stop_for)
    run.summary = Summary(run.folder, preflight, preemption, config["recipe"], config["seed"], best)
    callbacks: list[Callback] = [
        Nodes(run.cluster.launcher if run.cluster else None),
        preflight,
        FeatureProbe(preflight),
        run.folder,
        Loggers(run.loggers, run.build_loggers, flatten(masked(run.written))),
        LearningRate(),
        LastStep(),
        Finite(f"optim.lr={run.config['optim']['lr']:g}"),
        preemption,
        monitor,
        best,
        FidelityRecord(preflight, best),
        run.summary,
        last,
    ]
    if config["trainer"]["enable_progress_bar"] is not False:
        phases = monitor.phases.so_far if run.monitor.enabled else None
        callbacks.append(Progress(phases, "teacher: " * trains_teacher()))
    return callbacks


def _as_list(value: object) -> list[object]:
    """A built setting that may be one object, a list of them, or None, as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _with_environment(plugins: list[object]) -> list[object]:
    """The user's plugins, with Lightning's own environment added where no launcher of a cluster has started the processes.

    That is where this process starts the others, or mpirun or a program that sets Lightning's variables has started them.
    An environment among the user's plugins takes its place. Without one Lightning would take SLURM's or Kubernetes'
    variables for those of a launcher that has started each process.
    """
    existing = started()
    is_alone = existing is None or existing.by in ("mpirun", "another program")
    if is_alone and not _has_environment(plugins):
        return [*plugins, LightningEnvironment()]
    return plugins


def _has_environment(plugins: list[object]) -> bool:
    """Whether a cluster's environment of the user's own is among the plugins: it says how many processes there are."""
    return any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)

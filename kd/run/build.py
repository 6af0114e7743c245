"""Objects from the settings that :mod:`kd.run.resolve` has merged and typed, and nothing else builds any.

:func:`build` builds a whole run, :func:`data_of` and those after it a part of one, :func:`built` any value of a setting.
Classes are those that :func:`kd.run.trust.class_named` gives for a place: the list's, and those that the user trusts.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeAlias, cast, get_type_hints

from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning import Callback
from pytorch_lightning.loggers import Logger
from pytorch_lightning.profilers import Profiler
from pytorch_lightning.strategies import Strategy
from torch import nn

from kd.callbacks.loggers import RUN, in_folder
from kd.callbacks.run_folder import unclaimed
from kd.config import parts as listed
from kd.config.kinds import (
    AnyClass,
    fields,
    fitted,
    read,
)
from kd.config.suggest import near
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import Source
from kd.data.splits import DataSpec
from kd.distill.fitting import check_batch
from kd.errors import UserError, cause_of_kind, raised_from
from kd.fit_to_machine.precision import choose_precision
from kd.launch.cluster import Cluster, is_rank_zero
from kd.launch.processes import processes_asked_for
from kd.lightning_internals import runs_in_child_processes
from kd.losses import DistillLoss, Projection
from kd.models import Preprocess, StudentSpec, TeacherSpec
from kd.module.distillation import DistillationModule
from kd.monitor.keys import MonitorSpec
from kd.optim import OptimSpec
from kd.run.assemble import assemble
from kd.run.batch_size import may_shrink, smaller_batch
from kd.run.checks import make_object
from kd.run.pictures import source_key
from kd.run.resolve import Tree, change, resolve
from kd.run.run import Run
from kd.run.streams import quiet_libraries
from kd.run.trust import Trust, class_named, parameters_of, trusted_class
from kd.settings import (
    LearningSettings,
    MonitorSettings,
    OptimSettings,
    StudentSettings,
    TeacherSettings,
    TrainerSettings,
    teachers_in,
)
from kd.ship.export.student import builder_in, load_student, untrained_student
from kd.storage.run_urls import folder_of_recipe
from kd.storage.student_metadata import student_metadata_in
from kd.tasks import Classification, Task
from kd.tasks.label_free import label_free_metrics
from kd.teachers import RunTeacher, attach_answers

BUILT: dict[type, Callable[..., object]] = {
    StudentSettings: StudentSpec,
    TeacherSettings: TeacherSpec,
    OptimSettings: OptimSpec,
    MonitorSettings: MonitorSpec,
    DataSpec: DistillationDataModule,
}
"""What groups of settings become, where they do not stay what they are."""
BASES: dict[str, tuple[type, str]] = {
    "source": (Source, "kd.data.sources"), "task": (Task, "kd.tasks"), "projection": (Projection, "kd.losses"),
    "loss": (DistillLoss, "kd.losses.LogitLoss, or FeatureLoss to compare layers"),
    "strategy": (Strategy, "pytorch_lightning.strategies"), "callback": (Callback, "pytorch_lightning"),
    "logger": (Logger, "pytorch_lightning.loggers"), "profiler": (Profiler, "pytorch_lightning.profilers"),
}  # fmt: skip
"""What a class of each kind inherits from, and where a user imports that from."""
Built: TypeAlias = Any
"""An object of the class that settings name, or a plain value."""
BUILD = "build(self, num_classes: int, img_size: tuple[int, int] | None) -> nn.Module, with these annotations"
"""How a builder's method is declared, for messages."""


def build(run: Run, cluster: Cluster | None = None, marker: Path | None = None) -> None:
    """Gives a run its data, module, monitor's settings, trainer and folder, which is made once it trains.

    The order matters: the seed comes before all that draws, the data's classes before the module, and the module before
    the trainer, whose callbacks read it. Also called again for the same run with changed settings (``kd-size``).

    Args:
        run: its settings are resolved, and its teachers have their weights
            (:func:`kd.run.train_first.train_teacher_if_missing`).
        cluster: of the launcher; None: this machine.
        marker: file that names the run's folder for a restarted job.

    Raises:
        UserError: settings that do not fit each other, the data or the machine.
    """
    from kd.run.trainer import make_trainer  # commands that only evaluate do without its callbacks

    quiet_libraries()
    run.cluster = cluster
    run.marker = marker
    with warnings.catch_warnings(action="ignore"):
        _seed(run)
        accelerator = str(run.config["trainer"]["accelerator"])
        if run.config["trainer"]["precision"] is None:
            precision, run.precision_note = choose_precision(accelerator)
            run.change({"trainer.precision": precision})
        try:
            run.trainer_arguments = _trainer_arguments(run)
            # pictures that were listed before are taken over once: a run that is built again may hold out some
            splits, run.splits = run.splits, None
            sources = {source_key(run.config): splits.source} if splits else None
            run.data = data_of(run.config, run.trusted, sources, trains=True)
            if splits:
                run.data.splits = splits
            run.module = _module(run, run.config)
            _fit_batch(run)
            run.monitor = built(MonitorSettings, run.config["monitor"], "monitor", run.trusted)
            run.trainer = make_trainer(run)
            attach_answers(run.module.teacher, run.data)
        except Exception as error:
            raise cause_of_kind(error, UserError) or error from error
        _check_built(run)


def _fit_batch(run: Run) -> None:
    """Makes the batch smaller where pictures are few (:func:`smaller_batch`); the first process reports it.

    Left as set: a batch that was typed, that of a resumed run, and that of a student which starts from random weights after
    all, unless all pictures are fewer than one batch of all processes.
    """
    if not may_shrink(run.config, run.overrides):
        return
    pictures = run.data.info.train
    size = smaller_batch(run.config, pictures)
    if size is None:
        return
    asked = run.config["data"]["batch_size"]
    processes = processes_asked_for(run.config["trainer"])
    fills_a_batch = asked == "auto" or pictures >= asked * processes
    if run.module.student.start == "scratch" and fills_a_batch:
        return
    if is_rank_zero():
        print(
            f"data.batch_size: {size} in place of {asked}, for {pictures} training pictures",
            flush=True,
        )
    run.change({"data.batch_size": size})
    run.data.batch_size = size
    run.data.auto -= {"batch_size"}


def _module(run: Run, config: Tree, teacher: RunTeacher | None = None) -> DistillationModule:
    """The module: student, teachers, losses and the optimizer's settings.

    Args:
        run: has the data.
        config: all settings.
        teacher: built of these settings before; None: it is built.
    """
    optim = built(OptimSettings, config["optim"], "optim", run.trusted)
    arguments = arguments_of(LearningSettings, config["model"], "model", run.trusted)
    return assemble(run.data.info, optim=optim, built=teacher, **arguments)


def module_of(run: Run, differences: Mapping[str, Any]) -> DistillationModule:
    """The module of a built run with other settings of its student; teacher, data and seed are the run's.

    Args:
        run: stays as it is.
        differences: settings by dotted keys, such as ``model.student.arch``.
    """
    config = change(run.config, [differences], run.trusted)
    _seed(run)
    return _module(run, config, run.module.teacher)


def _trainer_arguments(run: Run) -> dict[str, Any]:
    """Arguments of Lightning's Trainer, with ``RUN`` in them replaced by what stands for the run's folder until it has one
    (:func:`kd.callbacks.run_folder.unclaimed`).

    Sets :attr:`Run.loggers`, the settings of loggers that are classes (``true``: Lightning's CSVLogger), and
    ``run.build_loggers``: they are built once the run has its folder. Where there are any, the Trainer gets no logger.
    """
    runs = folder_of_recipe(run.config["runs_dir"], run.config["recipe"])
    given = run.config["trainer"]
    settings = {**given, "default_root_dir": given["default_root_dir"] or RUN}
    settings = in_folder(settings, unclaimed(runs))
    loggers = given["logger"]
    if loggers is True:
        loggers = {"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": {}}
    specs = loggers
    if not isinstance(loggers, list):
        specs = [loggers]
    run.loggers = [spec for spec in specs if isinstance(spec, dict)]
    run.build_loggers = partial(_loggers, run.trusted)
    if run.loggers:
        settings = {**settings, "logger": False}
    return arguments_of(TrainerSettings, settings, "trainer", run.trusted)


def _loggers(trusted: Trust, specs: Sequence[Mapping[str, Any]]) -> list[Logger]:
    """Loggers of their class paths and arguments (``specs``); ``trusted`` as in :func:`data_of`."""
    return [built(listed.part("logger"), spec, "trainer.logger", trusted) for spec in specs]


def _seed(run: Run) -> None:
    """Seeds Python, NumPy and torch with the setting ``seed``, and the loaders' processes by it."""
    logging.getLogger("lightning_fabric.utilities.seed").setLevel(logging.WARNING)
    seed_everything(run.config["seed"], workers=True, verbose=False)


def _check_built(run: Run) -> None:
    """Checks that need built objects: whether the batch is large enough for the losses, whether ``data.val_fraction`` has an
    effect, and whether the Trainer would move the run into a child process; a UserError names the setting.
    """
    objective = run.module.student.objective
    check_batch(objective.active, run.data.batch_size, run.trainer.world_size)
    run.data.splits.check_fraction()
    # the run would be in a child process, and lost with it
    if runs_in_child_processes(run.trainer):
        strategy = run.config["trainer"]["strategy"]
        raise UserError(f"trainer.strategy: '{strategy}' is not supported; take ddp")


def data_of(
    config: Mapping[str, Any],
    trusted: Trust,
    listed_sources: dict[str, Any] | None = None,
    trains: bool = False,
) -> DistillationDataModule:
    """The data of resolved settings.

    Args:
        config: all settings.
        trusted: what the user trusts beside the list of classes.
        listed_sources: sources whose pictures were listed before, :attr:`kd.run.request.Request.listed`; the one of
            these settings is taken from it.
        trains: for a training; for all others the engine ``ray`` is replaced by loading on this machine.
    """
    data = {**config["data"], "seed": config.get("seed", 0)}
    source = (listed_sources or {}).pop(source_key(config), None)
    data |= {} if source is None else {"source": source}
    if data.get("engine") == "ray" and not trains:
        data |= {"engine": "torch", "tier": None, "num_workers": "auto"}
    module = built(DataSpec, data, "data", trusted)
    return cast(DistillationDataModule, module)


def task_of(config: Mapping[str, Any], trusted: Trust) -> Task:
    """The task of resolved settings, classification where none is named; ``trusted`` as in :func:`data_of`."""
    task = built(listed.part("task"), config["model"].get("task"), "model.task", trusted)
    return cast(Task | None, task) or Classification()


def metrics_of(config: dict[str, Any], trusted: Trust) -> list[str]:
    """Names of the validation metrics (``acc1``) of a run with the settings ``config``, the primary one first.

    Nothing but the task is built.

    ``trusted``: classes that the user trusts.
    """
    model = config["model"]
    if not model["student"].get("head", True):
        probe = config["data"].get("probe") or {}
        losses = model["distill_losses"] or {}
        return label_free_metrics(losses, bool(probe.get("root")))
    task = task_of(config, trusted)
    has_teacher = bool(model["teacher"] or model.get("teachers"))
    names = task.metric_names(has_teacher)
    others = [name for name in names if name != task.primary]
    return [task.primary, *others]


def teacher_specs(config: Mapping[str, Any], trusted: Trust) -> dict[str, TeacherSpec]:
    """The settings of a run's teachers by name; a single teacher's name is empty.

    Args:
        config: all settings.
        trusted: classes that the user trusts.
    """
    specs: dict[str, TeacherSpec] = {}
    for key, settings in teachers_in(config["model"]).items():
        name = key.removeprefix("model.teachers.").removeprefix("model.teacher")
        spec = built(TeacherSettings, settings, key, trusted)
        specs[name] = cast(TeacherSpec, spec)
    return specs


def student_in(trusted: Trust) -> tuple[nn.Module, Preprocess, list[str]]:
    """The model in ``student.safetensors`` with its weights, its input, and the names of its classes by class id.

    Args:
        trusted: what the user trusts in this file, which says itself what its model is.
    """
    file = _file_of(trusted)
    return load_student(file, trusted_class(builder_in(file), trusted))


def untrained_student_in(trusted: Trust, seed: int) -> nn.Module:
    """The model of ``student.safetensors`` with new random weights; ``trusted`` as in :func:`student_in`."""
    file = _file_of(trusted)
    return untrained_student(file, seed, trusted_class(builder_in(file), trusted))


def task_in(trusted: Trust) -> Task:
    """The task of the model in ``student.safetensors``, as the file says; without a word of it, classification.

    Args:
        trusted: what the user trusts in this file.

    Raises:
        UserError: the file names a class that is no task, or is not trusted.
    """
    file = _file_of(trusted)
    content = student_metadata_in(file).task
    if "${" in str(content):
        raise UserError(f"{file}: task looks up {str(content)[:80]}")
    try:
        settings = resolve([{"model.task": content}], trusted)
        task = built(listed.part("task"), settings["model"]["task"], "model.task", trusted)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    if task is None:
        return Classification()
    if not isinstance(task, Task):
        raise UserError(
            f"{file}: task: must be a class with its arguments, got {str(content)[:80]}"
        )
    return task


def _file_of(trusted: Trust) -> Path:
    """The file that a trust belongs to, which must be one: that in the settings is for no student's file."""
    assert trusted.file is not None
    return trusted.file


def built(kind: object, value: object, key: str, trusted: Trust) -> Built:
    """The object of a value: a group's, a class's with its arguments where its type takes a class, or the value itself.

    Args:
        kind: its type, as :mod:`kd.settings` or the class above it declares it.
        value: resolved.
        key: the setting, for messages.
        trusted: what the user trusts beside the list of classes.

    Returns:
        Of a dict without a class, or a list, the same with its entries built.

    Raises:
        UserError: names ``key``, also where a class refuses its arguments.
    """
    of = read(kind)
    group = of.group
    takes_class = of.part is not None
    if of.part is not None and isinstance(value, dict) and "class_path" in value:
        return _instance(value, of.part, key, trusted)
    if isinstance(value, dict) and group is not None:
        return make_object(BUILT.get(group, group), arguments_of(group, value, key, trusted), key)
    if isinstance(value, dict):
        inner = of.entries
        entries = {}
        for name, entry in value.items():
            entries[name] = built(inner, entry, f"{key}.{name}", trusted)
        return entries
    if isinstance(value, list):
        inner = kind if takes_class else of.items
        return [built(inner, item, key, trusted) for item in value]
    return value


def arguments_of(group: type, given: Mapping[str, Any], key: str, trusted: Trust) -> dict[str, Any]:
    """The arguments of what a group of settings becomes, by name; those that it does not know are left out.

    Args:
        group: the class of settings.
        given: its values, by name.
        key: the group's place, for messages.
        trusted: classes that the user trusts.
    """
    known = fields(group)
    arguments = {}
    for name, value in given.items():
        if name in known:
            kind = known[name].kind
            arguments[name] = built(kind, value, f"{key}.{name}", trusted)
    return arguments


def _instance(value: Mapping[str, Any], kind: str, key: str, trusted: Trust) -> object:
    """An object of ``class_path`` and ``init_args``.

    Args:
        value: holds these two.
        kind: what the place takes (``loss``); empty: a class of the user's is above it.
        key: the setting, for messages.
        trusted: what the user trusts beside the list of classes.

    Raises:
        UserError: a class that is not allowed there, or whatever it raises as it is built, in one line.
    """
    name = value["class_path"]
    cls = class_named(name, kind, key, trusted)
    _check_base(cls, kind, key)
    given = value.get("init_args") or {}
    _check_arguments(cls, given, key)
    one = listed.listed_class(name, kind)
    kinds = one.fields if one else _kinds(cls)
    arguments = {}
    try:
        for argument, inner in given.items():
            kind_below = kinds.get(argument, Any)
            value_below = fitted(kind_below, inner)
            if one is None or argument not in kinds:  # it may take a class, which the user trusts
                kind_below = Annotated[kind_below, AnyClass("")]
            arguments[argument] = built(kind_below, value_below, f"{key}.{argument}", trusted)
        return make_object(cls, arguments, key)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        problem = f"{cls.__name__} can't be built: {reason[:200]}{raised_from(error, reason)}"
        raise cause_of_kind(error, UserError) or UserError(f"{key}: {problem}") from error


def _check_arguments(cls: type, given: Mapping[str, Any], key: str) -> None:
    """Refuses arguments that a class does not have, before any of them is built."""
    parameters = parameters_of(cls)
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [*parameters]
    for word in given:
        if word not in known:
            takes = f"{cls.__name__} takes {', '.join(known) or 'no arguments'}"
            raise UserError(f"{key}.{word}: {takes}{near(word, known)}")


def _check_base(cls: type, kind: str, key: str) -> None:
    """Refuses, by a UserError, a class that is not of the kind that a place takes.

    The kind is known by the class's base. A builder, or a teacher in its place, needs no base, and is known by its methods.
    """
    if kind == "builder" and not _builds(cls) and not _answers(cls, key):
        is_student = key.endswith("student.builder")
        what = "no Builder" if is_student else "neither a Builder nor a Teacher"
        other = "" if is_student else ", or answer(self, batch, wanted) and identity(self)"
        raise UserError(f"{key}: {cls.__name__} is {what}: it needs the method {BUILD}{other}")
    base, home = BASES.get(kind, (object, ""))
    if not issubclass(cls, base):
        parent = home if " " in home else f"{home}.{base.__name__}"
        raise UserError(
            f"{key}: {cls.__name__} is no {base.__name__}: it must inherit from {parent} (recipes/OWN_PARTS.md)"
        )


def _builds(cls: type) -> bool:
    """Whether a class builds a model: it has the method ``build`` of a :class:`Builder`.

    The method is recognised by the names of its annotated arguments, and by an annotation of its result.
    """
    method = getattr(cls, "build", None)
    if method is None:
        return False
    # as text: what they name may be imported for type checkers alone
    return [*getattr(method, "__annotations__", {})] == ["num_classes", "img_size", "return"]


def _answers(cls: type, key: str) -> bool:
    """Whether a class has the methods of a :class:`~kd.teachers.Teacher`, at the place ``key`` of one."""
    has_methods = all(callable(getattr(cls, name, None)) for name in ("answer", "identity"))
    return has_methods and not key.endswith("student.builder")


def _kinds(cls: type) -> Mapping[str, object]:
    """The types of the arguments of a user's class, by name, that its annotations name."""
    with suppress(NameError, TypeError):  # plain values are what it gets
        return get_type_hints(cls.__init__)  # type: ignore[misc]
    return {}

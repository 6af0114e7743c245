"""``kd-train``: trains a student. Heavy imports wait until there is something to train."""

import gc
import os
import signal

from kd.config.parts import classes
from kd.errors import UserError
from kd.launch import sagemaker
from kd.launch.cluster import Cluster, is_rank_zero, recognise_launcher
from kd.launch.ray_nodes import check_secret, nodes_of, prepare_data
from kd.machine import in_job, log_nccl
from kd.run import keys
from kd.run.needs import check_downloads, check_named, check_needs
from kd.run.options import take_options
from kd.run.paths import SETTINGS, files_listed, list_of_kind, names
from kd.run.place import check_start, finished_before, place_of, resumed_by
from kd.run.request import Request, merge
from kd.run.run import Run
from kd.storage.mirror import Mirror
from kd.storage.objects import is_url

OTHER_COMMANDS = {
    "validate": "kd-eval RUN_FOLDER",
    "test": "kd-eval RUN_FOLDER split=test",
    "predict": "kd-predict RUN_FOLDER PICTURES",
}
"""Words of LightningCLI that other commands stand for."""
HELP = """\
  kd-train recipe=NAME [config=OVERLAY ...] [key=value ...]
  kd-train resume=RUN_FOLDER [key=value ...]

  recipe=NAME       a recipe (below), or a YAML file; a run folder's config.yaml repeats that run
  config=OVERLAY    where and how it runs (kd-train --list); may be given several times
  key=value         any setting; --key=value and --key value mean the same
  --list            all recipes and overlays; --list losses, sources, tasks or models what they are made of;
                    --list classes: all classes that a file from elsewhere may name
  --keys [PART]     every setting, or those with PART in their names; with recipe=, data.source=, ... those of
                    its classes too
  --help GROUP      the settings of a group: --help data.augment
  --print_config    the resolved settings; saved to a file they can be run again
  --version         kd's version

Often used keys:
  data.source=ImageFolder data.source.root=DIR      your own pictures: DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg
                    (DIR/test/<class>/*.jpg: for certificates and cascades)
  model.teacher.arch, .checkpoint, .img_size, .pretrained    any timm model; safetensors, .pth or a run folder
  model.student.arch, .checkpoint, .img_size, .pretrained    likewise
  model.distill_losses.kd.temperature, .weight      model.task_loss_weight
  data.batch_size  data.num_workers  data.img_size  data.augment.mixup  optim.lr  optim.zero
  trainer.max_epochs  trainer.devices  trainer.precision  (all of Lightning's Trainer)
  seed  name  runs_dir  resume  labels_alone

Recipes:
{recipes}  recipe=distill                another name of grocery_vit, the recipe for your own pictures and teacher
Exit status: 0 done, 1 failed (the run folder says why), 2 wrong use, 130 Ctrl-C, 143 SIGTERM, 129 a closed terminal
(all three leave a checkpoint).
"""
FLAGS = (
    "--list",
    "--keys",
    "--print_config",
    "--version",
)
"""Options that take no value."""


def run(request: Request) -> int | None:
    """Trains, or prints what a flag asks for (``--list``, ``--keys``, ``--print_config``, ...).

    Each process of a job that a launcher started runs it, with the same command line. In containers that SageMaker starts it
    also serves (the word "serve"), and on machines of a job that prepare data it does that.

    Returns:
        The exit status; None where neither a recipe nor a run is named.

    Raises:
        UserError: a mistake in the command line or the settings.
    """
    if request.rest == ["serve"]:
        serve_items = sagemaker.endpoint_items()
        if serve_items:  # SageMaker has started an endpoint's container
            from kd.commands import serve

            to_serve = Request(rest=serve_items[:1], overrides=serve_items[1:])
            return serve.run(to_serve, take_options(serve.OPTIONS, to_serve))
    information = _information(request)
    if information:
        print(information, end="")
        return 0
    container = sagemaker.container()
    if container:
        _take_over(container, request)
    _as_lightning_cli(request)
    if request.rest:
        raise _unknown_word(request.rest[0])
    if not (request.recipe or request.resume):
        return None
    if "print_config" in request.flags:
        _join_cluster(request)
        resumed_by(request)
        run = Run.of(request)
        print(run.as_yaml(), end="")
        return 0
    cluster = recognise_launcher()
    check_secret(cluster)
    if cluster and cluster.role == "data":
        return prepare_data(cluster)
    if not in_job():  # in a job the signal warns of the end
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    gc.disable()  # collections during the imports take 1.2 s and find nothing
    try:
        run = to_train(request)
        if run.finished:
            end_again(run)
            return 0
        from kd.run.fit import fit
    finally:
        gc.enable()

    with nodes_of(run.cluster, run.config["data"]["engine"]):
        status = fit(run)
    if container and status == 0 and run.trainer.is_global_zero:
        assert run.folder.path is not None
        container.deliver(run.folder.path)
    return status


def to_train(request: Request) -> Run:
    """The run that a command line describes, in its place, with all objects; :func:`kd.run.fit.fit` trains it.

    A teacher without weights is trained first. A new run's folder is not made yet.

    Args:
        request: with a recipe or ``resume``; the launcher's settings, and of a resumed run its recipe, are set in it.

    Returns:
        The run. Of one that the command line resumes and that has no step left, on this disk and outside SageMaker's
            jobs, nothing is built: :attr:`Run.finished` is set.

    Raises:
        UserError: a mistake in the settings, or something that they name and is not there.
    """
    cluster = _join_cluster(request)
    machines = request.value_of("trainer.num_nodes") or request.cluster.get("trainer.num_nodes", 1)
    together = str(machines) != "1"
    resumed = resumed_by(request, together)
    run = Run.of(request)
    request.check_read(run.config)
    check_needs(run.config)
    by_url = is_url(run.config["runs_dir"]) or bool(resumed and resumed.url)
    job = cluster.job if cluster else None
    if not by_url and sagemaker.container():  # a later job of SageMaker's may get its folder
        job = "checkpoints"
    elif not by_url and resumed:  # a store may lack some of it
        run.finished = finished_before(resumed.folder, run.config["trainer"])
        if run.finished:
            return run
    run.place = place_of(run.config, resumed, job, request.named(), together)
    if run.place.folder:
        check_start(run.place.folder, run.config)
    run.change({"resume": str(run.place.folder) if run.place.folder else None})
    check_named(run.config, resumed=run.place.folder is not None)
    from kd.run.pictures import list_to_train

    run.splits = list_to_train(run.config, run.overrides)
    if is_rank_zero():
        for line in request.notes:
            print(line, flush=True)
        print(f"{run.config['recipe']}: loading torch, pictures and models ...", flush=True)
    from kd.run.train_first import train_teacher_if_missing

    train_teacher_if_missing(run)
    check_downloads(run.config)
    mirror = None
    if is_url(run.place.runs_dir):
        mirror = Mirror(run.place.runs_dir, "runs_dir")
    from kd.run.build import build

    build(run, cluster, run.place.marker)
    run.folder.mirror = mirror
    return run


def _take_over(container: sagemaker.Container, request: Request) -> None:
    """Changes a command line that SageMaker has started: hyperparameters become settings, channels become folders.

    Raises:
        UserError: a setting is on the command line too, with another value, or is no key; or a channel is missing.
    """
    if request.rest == ["train"]:  # what SageMaker starts an image with that names no command
        request.rest = []
    merge(request, container.settings, "SageMaker's hyperparameters")
    request.overlays = [sagemaker.channel_folder(name) for name in request.overlays]
    if request.recipe:
        request.recipe = sagemaker.channel_folder(request.recipe)
    if request.value_of("runs_dir") is None:
        request.overrides.append(f"runs_dir={container.runs_dir}")


def _join_cluster(request: Request) -> Cluster | None:
    """Joins the job of the launcher that started this process: its settings and environment variables are set.

    Variables that are set already stay. A launcher that starts one process on each machine is passed over where the
    command line says how many machines there are (``trainer.num_nodes``); recipe and overlays do not count.

    Args:
        request: gets the launcher's settings, unless it names ``trainer.num_nodes``.

    Returns:
        The job; None without a launcher, or for one that is passed over.
    """
    cluster = recognise_launcher()
    if cluster is None:
        return None
    if request.value_of("trainer.num_nodes") is None:
        request.cluster = cluster.settings()
    elif not cluster.starts_each_process:
        return None
    for name, value in cluster.variables.items():
        os.environ.setdefault(name, value)
    if cluster.num_nodes > 1:
        log_nccl()
    return cluster


def end_again(run: Run) -> None:
    """What the first process does for a resumed run that has no step left: compares it with labels alone where
    ``labels_alone`` asks for it, or says that it is done.

    Raises:
        UserError: as of :func:`kd.run.labels_alone.compare_with_labels_alone`.
    """
    assert run.finished is not None
    if is_rank_zero() and run.config["labels_alone"]:
        from kd.run.labels_alone import compare_with_labels_alone

        compare_with_labels_alone(run, run.finished.folder)
    elif is_rank_zero():
        print(run.finished.message, flush=True)


def _as_lightning_cli(request: Request) -> None:
    """Takes what a user of LightningCLI types, ``fit --config FULL.yaml``: the file becomes the request's recipe.

    Raises:
        UserError: an overlay by name without a recipe.
    """
    if request.rest[:1] == ["fit"]:
        del request.rest[0]
    if request.recipe or request.resume or not request.overlays:
        return
    if not request.overlays[0].endswith(SETTINGS):
        raise UserError(
            f"config={request.overlays[0]}: an overlay needs a recipe (recipe=NAME; kd-train --list)"
        )
    request.recipe = request.overlays.pop(0)


def _unknown_word(word: str) -> UserError:
    """The message for a word that is neither a setting nor a flag: it may be a recipe's or overlay's name alone."""
    meant = {
        **{name: f"config={name}" for name in names("configs")},
        **{name: f"recipe={name}" for name in names("recipes")},
        **OTHER_COMMANDS,
    }
    hint = f"recipes recipe=NAME ({', '.join(names('recipes'))})"
    if word in meant:
        hint = f"did you mean '{meant[word]}'?"
    return UserError(f"what is '{word}'? Settings are key=value, {hint}")


def _information(request: Request) -> str:
    """The text that ``--version``, ``--list`` or ``--keys`` prints; "" without such a flag.

    ``request.about`` is what follows the flag: what to list, or a part of keys' names; "": all.
    """
    if "version" in request.flags:
        import kd

        return f"kd {kd.__version__}\n"
    if "list" in request.flags:
        return list_of_kind(request.about)
    if "keys" in request.flags:
        return _keys(request, request.about)
    return ""


def usage(request: Request) -> str:
    """The help of ``kd-train``, with the recipes, or the settings of a group or class that ``--help`` names;
    :mod:`kd.command_line` prints it in place of ``HELP``.
    """
    about = request.about
    if not about:
        return HELP.format(recipes=files_listed("recipes", "recipe="))
    for one in classes():
        if about in one.names:
            return keys.keys_listed(dict(one.arguments), "")
    return _keys(request, f"{about}.")


def _keys(request: Request, part: str) -> str:
    """The settings with a part in their names, and those of the classes that the command line names."""
    return keys.keys_listed({**keys.schema(), **request.class_keys()}, part)

"""``kd-train``: trains a student. Heavy imports wait until there is something to train."""

import gc
import signal
from importlib import import_module

from kd.errors import UserError
from kd.launch import sagemaker
from kd.launch.cluster import recognise
from kd.launch.ray_nodes import check_secret, nodes_of, prepare_data
from kd.machine import in_job
from kd.run import files, keys
from kd.run.paths import find, listed, listing, names
from kd.run.place import resumed_by
from kd.run.request import Request
from kd.run.run import Run, join_cluster, take_over

HELP = """\
kd-train: trains a small, fast student from a big vision model.

  kd-train recipe=NAME [config=OVERLAY ...] [key=value ...]
  kd-train resume=RUN_FOLDER [key=value ...]

  recipe=NAME       a recipe (below), or a YAML file; a run folder's config.yaml repeats that run
  config=OVERLAY    where and how it runs (kd-train --list); may be given several times
  key=value         any setting; --key=value and --key value mean the same
  --list            all recipes and overlays; --list losses, sources, tasks or models what they are made of;
                    --list classes: all classes that a file from elsewhere may name
  --keys [PART]     every setting, or those with PART in their names; with recipe= those of its losses too
  --help GROUP      the settings of a group: --help data.augment
  --print_config    the resolved settings; saved to a file they can be run again
  --version         kd's version

Often used keys:
  data.source=ImageFolder data.source.root=DIR      your own pictures: DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg
  model.teacher.arch, .checkpoint, .img_size, .pretrained    any timm model; safetensors, .pth or a run folder
  model.student.arch, .checkpoint, .img_size, .pretrained    likewise
  model.distill_losses.kd.temperature, .weight      model.task_loss_weight
  data.batch_size  data.num_workers  data.img_size  data.augment.mixup  optim.lr  optim.zero
  trainer.max_epochs  trainer.devices  trainer.precision  (all of Lightning's Trainer)
  seed  name  runs_dir  resume

Recipes:
{recipes}
Exit status: 0 done, 1 failed (the run folder says why), 2 wrong use, 130 Ctrl-C, 143 SIGTERM, 129 a closed terminal
(all three leave a checkpoint).
"""


def run(request: Request) -> int:
    """Trains, or prints what a flag asks for (``--list``, ``--keys``, ``--print_config``, ...); returns the exit
    status.

    Raises:
        UserError: a mistake in the command line or the settings.
    """
    if request.rest == ["serve"] and (served := sagemaker.endpoint_items()):
        return import_module("kd.commands.serve").run(
            Request(rest=served[:1], overrides=served[1:])
        )
    container = sagemaker.container()
    if container:
        take_over(container, request)
    if request.rest:
        word, known = request.rest[0], names("recipes")
        kind = "recipe" if word in known else "config" if word in names("configs") else ""
        hint = (
            f"did you mean '{kind}={word}'?"
            if kind
            else f"recipes recipe=NAME ({', '.join(known)})"
        )
        raise UserError(f"what is '{word}'? Settings are key=value, {hint}")
    if "version" in request.flags:
        import kd

        print(f"kd {kd.__version__}")
        return 0
    if {"list", "keys", "help"} & request.flags or not (request.recipe or request.resume):
        print(_information(request), end="")
        return 0
    if "print_config" in request.flags:
        join_cluster(request)
        resumed_by(request)
        print(Run.of(request).cli.as_yaml(), end="")
        return 0
    cluster = recognise()
    check_secret(cluster)
    if cluster and cluster.role == "data":
        return prepare_data(cluster)
    if not in_job():  # there it warns of the end: nothing is lost before the first step
        signal.signal(
            signal.SIGUSR2, signal.SIG_IGN
        )  # until the monitor handles it, it must not kill
    gc.disable()  # collections during the imports take 1.2 s and find nothing
    try:
        run = Run.to_train(request)
        from kd.run.fit import fit
    finally:
        gc.enable()

    cli = run.cli
    with nodes_of(cli.cluster, run.config["data"]["engine"]):
        status = fit(run)
    if container and status == 0 and cli.trainer.is_global_zero:
        assert cli.folder.path is not None
        container.deliver(cli.folder.path)
    return status


def _information(request: Request) -> str:
    if "list" in request.flags:
        return listed(request.about)
    if "keys" in request.flags or request.about:
        recipe = {} if request.recipe is None else files.read(find("recipes", request.recipe))
        known = {**keys.schema(), **keys.of_recipe(recipe)[0]}
        return keys.table(known, request.about if "keys" in request.flags else f"{request.about}.")
    return HELP.format(recipes=listing("recipes", "recipe="))

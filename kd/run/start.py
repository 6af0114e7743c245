"""From a command line to a run that can train: its launcher, its settings, its place, its objects."""

import atexit
import os
import subprocess
import sys
from pathlib import Path

from kd.launch import sagemaker
from kd.launch.child import PARENT
from kd.launch.cluster import Cluster, is_rank_zero, recognise
from kd.machine import cache_dir, log_nccl
from kd.run.keys import arguments
from kd.run.needs import check_downloads, check_needs, teachers_in
from kd.run.place import check_start, finished_before, place_of, resumed_by
from kd.run.present import check_named
from kd.run.request import Request, merge
from kd.run.resolve import Tree
from kd.run.run import Run
from kd.storage.mirror import Mirror
from kd.storage.objects import is_url

DRAW = """\
import contextlib, pathlib, sys
from kd.launch.child import end_with_parent
end_with_parent()
with contextlib.suppress(Exception):  # the run itself builds the set too, and reports what fails
    from kd.data.foodtag import build
    build(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
"""


def to_train(request: Request) -> Run:
    """The run that a command line describes, in its place, with all objects; :func:`kd.run.fit.fit` trains it.

    A resumed run without a step left has :attr:`Run.finished` alone.
    """
    cluster = join_cluster(request)
    machines = request.value_of("trainer.num_nodes") or ""
    if cluster is None or cluster.num_nodes == 1:
        together = machines.isdigit() and int(machines) > 1
    else:
        together = True
    resumed = resumed_by(request, together)
    run = Run.of(request)
    request.check_read(run.config)
    check_needs(run.config, request.overlays)
    by_url = is_url(run.config["runs_dir"]) or bool(resumed and resumed.url)
    if resumed and not by_url and not sagemaker.container():  # a store may lack some of it
        trainer = run.config["trainer"]
        limits = {"epochs": trainer["max_epochs"], "steps": trainer["max_steps"]}
        run.finished = finished_before(resumed.folder, limits, request.overrides)
        if run.finished:
            return run
    job = cluster.job if cluster else None
    if sagemaker.container() and not by_url:  # a later job of SageMaker's may get its folder
        job = "checkpoints"
    run.place = place_of(run.config, resumed, job, request.overrides, together)
    if run.place.folder:
        check_start(run.place.folder, run.config)
    run.change({"resume": str(run.place.folder) if run.place.folder else None})
    check_named(run.config, resumed=run.place.folder is not None)
    from kd.run.pictures import list_to_train

    run.splits = list_to_train(run.config)
    if is_rank_zero():
        for line in request.notes:
            print(line, flush=True)
        parts = "torch and pictures"
        if teachers_in(run.config["model"]):
            parts = "torch, pictures and teacher"
        print(f"{run.config['recipe']}: loading {parts} ...", flush=True)
        _draw_ahead(run.config["data"]["source"], cache_dir())
    run.with_teacher()
    check_downloads(run.config)
    mirror = None
    if is_url(run.place.runs_dir):
        mirror = Mirror(run.place.runs_dir)
    run.recipe_lr = request.recipe_lr()
    from kd.run.objects import build

    build(run, cluster, run.place.marker)
    run.folder.mirror = mirror
    return run


def take_over(container: sagemaker.Container, request: Request) -> None:
    """Changes a command line that SageMaker has started: hyperparameters become settings, channels become folders.

    Raises:
        UserError: a setting is on the command line too, or a channel is missing.
    """
    if request.rest == ["train"]:  # what SageMaker starts an image with that names no command
        request.rest = []
    merge(request, container.settings, "SageMaker's hyperparameters")
    request.overlays = [sagemaker.folder_of(name) for name in request.overlays]
    if request.recipe:
        request.recipe = sagemaker.folder_of(request.recipe)
    else:
        request.recipe = None
    if request.value_of("runs_dir") is None:
        request.overrides.append(f"runs_dir={container.runs_dir}")


def join_cluster(request: Request) -> Cluster | None:
    """The launcher's job; where it starts one process on each machine, unless the settings say how many there are."""
    cluster = recognise()
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


def _draw_ahead(source: Tree | None, folder: Path) -> None:
    """Begins to draw FoodTag's pictures beside the imports, where they are missing; the run waits for the rest."""
    if source is None or not source["class_path"].endswith(".FoodTagMini"):
        return
    usual = {name: argument.value for name, argument in arguments("FoodTagMini").items()}
    init_args = source["init_args"]
    sizes = [str(size) for size in init_args.values()]
    drawn = f"foodtag-mini-*-{'x'.join(sizes)}"
    if init_args != usual or any(folder.glob(drawn)):
        return
    command = [sys.executable, "-c", DRAW, str(folder), *sizes]
    process = str(os.getpid())
    environment = {**os.environ, PARENT: process}
    drawing = subprocess.Popen(command, env=environment, start_new_session=True)
    atexit.register(drawing.terminate)

"""``kd-train``: trains a student. Heavy imports wait until there is something to train."""

import atexit
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.launch import sagemaker
from kd.launch.child import PARENT
from kd.launch.cluster import Cluster, is_rank_zero, recognise
from kd.launch.cluster import marker as job_marker
from kd.launch.ray_nodes import check_secret, nodes_of, prepare_data
from kd.machine import cache_dir
from kd.run import files, keys
from kd.run.files import flatten
from kd.run.find import find, listing, names
from kd.run.request import Request, merge
from kd.storage.checkpoints import LAST, PREVIOUS, check_writable, newest_whole, run_folder
from kd.storage.elsewhere import text_of, yaml_of
from kd.storage.mirror import Mirror
from kd.storage.objects import is_url
from kd.storage.run_urls import fetched_marker, fetched_run, on_disk, url_of

if TYPE_CHECKING:
    from kd.run.parser import KDCLI

DRAW = """\
import contextlib, pathlib, runpy, sys
from kd.launch.child import end_with_parent
end_with_parent()
with contextlib.suppress(Exception):
    runpy.run_path(sys.argv[1])["build"](pathlib.Path(sys.argv[2]), 300, 60)
"""  # by its path, as its package imports torch; the run says what fails
START = ("checkpoint", "pretrained", "inherit")  # of model.student

FLAGS = {"help", "keys", "list", "print_config", "trust", "version"}
CLASSES = {"losses": ("LogitLoss", "FeatureLoss", "LayersLoss"), "sources": ("Source",), "tasks": ("Task",)}
PARTS = ("EachLayer", "Regression")  # what losses are made of
HELP = """\
kd-train: trains a small, fast student from a big vision model.

  kd-train recipe=NAME [config=OVERLAY ...] [key=value ...]
  kd-train resume=RUN_FOLDER [key=value ...]

  recipe=NAME       a recipe (below), or a YAML file; a run folder's config.yaml repeats that run
  config=OVERLAY    where and how it runs (kd-train --list); may be given several times
  key=value         any setting; --key=value and --key value mean the same
  --list            all recipes and overlays; --list losses, sources, tasks or models what they are made of
  --keys [PART]     every setting, or those with PART in their names; with recipe= those of its losses too
  --help GROUP      the settings of a group: --help data.augment
  --print_config    the resolved settings; saved to a file they can be run again

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
    """Trains, or prints what is asked for."""
    foreign = sorted(request.flags - FLAGS)
    if foreign:
        raise UserError(f"no option --{foreign[0]} (kd-train --help)")
    container = sagemaker.container()
    if container:
        _take_over(container, request)
    if request.rest:
        word, known = request.rest[0], names("recipes")
        kind = "recipe" if word in known else "config" if word in names("configs") else ""
        meant = f"did you mean '{kind}={word}'?" if kind else f"recipes recipe=NAME ({', '.join(known)})"
        raise UserError(f"what is '{word}'? Settings are key=value, {meant}")
    if "version" in request.flags:
        import kd

        print(f"kd {kd.__version__}")
        return 0
    if {"list", "keys", "help"} & request.flags or not (request.recipe or request.resume):
        print(_said(request), end="")
        return 0
    if "print_config" in request.flags:
        _join_cluster(request)
        _check_resume(request)
        args = request.parser_args()
        from kd.run.parser import KDCLI
        from kd.run.quiet import quiet_libraries

        quiet_libraries()
        print(KDCLI(args, instantiate=False).as_yaml(), end="")
        return 0
    cluster = recognise()
    check_secret(cluster)
    if cluster and cluster.role == "data":
        return prepare_data(cluster)
    cli, resume_from = prepare(request)
    from kd.commands._fit import fit

    with nodes_of(cli.cluster, cli.config.data.engine):
        status = fit(cli, resume_from)
    if container and status == 0 and cli.trainer.is_global_zero:
        assert cli.folder.path is not None
        container.deliver(cli.folder.path)
    return status


def _take_over(container: sagemaker.Container, request: Request) -> None:
    """SageMaker's hyperparameters are settings, and what it keeps of a job is where the run's folder is."""
    if request.rest == ["train"]:  # what SageMaker starts an image with that names no command
        request.rest = []
    merge(request, container.settings, "SageMaker's hyperparameters")
    request.overlays = [sagemaker.folder_of(name) for name in request.overlays]
    request.recipe = sagemaker.folder_of(request.recipe) if request.recipe else None
    if not any(item.startswith("runs_dir=") for item in request.overrides):
        request.overrides.append(f"runs_dir={container.runs_dir}")


def prepare(request: Request) -> tuple["KDCLI", Path | None]:
    """Builds what a command line describes.

    Args:
        request: the command line.

    Returns:
        The configuration with its objects, and the checkpoint to resume from.

    Raises:
        UserError: a mistake in it; nothing is written.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # it switches the monitor; before that listens it must not kill
    cluster = _join_cluster(request)
    together = _machines(cluster, request) > 1
    by_url = is_url(request.resume or "")
    resume_from = _check_resume(request, together)
    args = request.parser_args()  # a wrong recipe's name is told before anything heavy is imported
    if request.check_read().get("data.source") == "FoodTagMini" and is_rank_zero():
        _draw_ahead(cache_dir())
    from kd.run.parser import KDCLI
    from kd.run.quiet import quiet_libraries
    from kd.run.teacher_files import what_files_say
    from kd.run.train_first import teacher_settings

    quiet_libraries()
    if resume_from:
        args.append(f"--resume={request.resume}")
    parsed = KDCLI(args, instantiate=False)
    if resume_from is None and parsed.config.resume:  # a key of the recipe or of an overlay
        request.resume, by_url = parsed.config.resume, is_url(parsed.config.resume)
        resume_from = _check_resume(request, together)
    place = _place(request, parsed.config.runs_dir, by_url)
    if is_url(place) and resume_from and not by_url:  # the store may have more of it than this disk
        request.resume = url_of(Path(request.resume or ""))
        resume_from = _check_resume(request, together)
    runs = on_disk(place) / parsed.config.recipe
    if is_rank_zero():
        check_writable(Path(request.resume) if resume_from and request.resume else runs)
    name = parsed.config.name
    if name and resume_from is None and is_rank_zero() and cluster is None and (runs / name).exists():
        raise UserError(f"name: there is a run {runs / name} already")
    # a later job of SageMaker's may get its folder
    job = "checkpoints" if sagemaker.container() and not is_url(place) else cluster.job if cluster else None
    marker = job_marker(job, runs, request.overrides)
    if marker and resume_from is None:
        fetched_marker(place, marker, together)
    if marker and resume_from is None and _was_here_before(marker, request):
        resume_from = _check_resume(request)
    if resume_from:
        _check_start(Path(request.resume or ""), parsed.as_dict())
    parsed.change({"resume": request.resume} if resume_from else {})
    parsed.change(what_files_say(parsed.as_dict(), request.overrides))
    parsed.change(teacher_settings(parsed.as_dict(), request.overrides))
    mirror = Mirror(place) if is_url(place) else None
    parsed.build(cluster, marker)
    parsed.folder.mirror = mirror
    return parsed, resume_from


def _draw_ahead(folder: Path) -> None:
    """Begins to draw FoodTag's pictures beside the imports, where they are missing; the run waits for the rest."""
    if not any(folder.glob("foodtag-mini-*-300x60")):
        command = [sys.executable, "-c", DRAW, str(Path(__file__).parents[1] / "data/foodtag_mini.py"), str(folder)]
        drawing = subprocess.Popen(command, env={**os.environ, PARENT: str(os.getpid())}, start_new_session=True)
        atexit.register(drawing.terminate)


def _machines(cluster: Cluster | None, request: Request) -> int:
    asked = [item.split("=", 1)[1] for item in request.overrides if item.startswith("trainer.num_nodes=")]
    told = asked[-1] if asked and asked[-1].isdigit() else "1"
    return max(int(told), cluster.num_nodes if cluster else 1)


def _place(request: Request, runs_dir: str, by_url: bool) -> str:
    """Where the run's folder is kept: a resumed run stays where it was.

    Raises:
        UserError: it would go to an object store where it is not.
    """
    if request.resume is None or not (by_url or is_url(runs_dir)):
        return runs_dir
    folder = Path(request.resume)
    url = url_of(folder)
    if not url or on_disk(url).resolve() != folder.resolve():
        raise UserError(f"runs_dir: {runs_dir} has no run {request.resume}; give its URL (resume=), or runs_dir=FOLDER")
    return url.rsplit("/", 2)[0]


def _said(request: Request) -> str:
    """What ``--list``, ``--keys`` and ``--help`` print."""
    if "list" in request.flags:
        return _listed(request.about)
    if "keys" in request.flags or request.about:
        recipe = {} if request.recipe is None else files.read(find("recipes", request.recipe))
        known = {**keys.schema(), **keys.of_recipe(recipe)[0]}
        return keys.table(known, request.about if "keys" in request.flags else f"{request.about}.")
    return HELP.format(recipes=listing("recipes", "recipe="))


def _listed(kind: str) -> str:
    if not kind:
        return listing("recipes", "recipe=") + listing("configs", "config=")
    if kind == "models":
        import timm

        return "".join(f"{name}\n" for name in timm.list_models())
    if kind not in CLASSES:
        raise UserError(f"--list: lists {', '.join([*CLASSES, 'models'])}, not '{kind}'")
    found = keys.subclasses(*CLASSES[kind])
    return "".join(f"  {name:<20} {text}\n" for name, text in sorted(found.items()) if name not in PARTS)


def _check_start(run: Path, config: dict[str, Any]) -> None:
    """Refuses to change how the student of a resumed run has started."""
    whole: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # the configuration of the run before may be damaged
        whole = yaml_of(text_of(run / "config.yaml"))
    if not isinstance(whole, dict) or not {"model.ema_decay", "model.student.arch"} <= flatten(whole).keys():
        return
    _check_averages(whole, config)
    before, now = whole["model"]["student"], config["model"]["student"]
    changed = [key for key in START if before.get(key) != now[key] and "auto" not in (before.get(key), now[key])]
    if changed:
        key = changed[0]
        raise UserError(
            f"model.student.{key}: has no effect on a resumed run, whose weights come from its checkpoint "
            f"({before.get(key)}, given {now[key]})"
        )


def _check_averages(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses an average that the checkpoint does not have, or to drop the one that was validated."""
    for name in now.get("students") or [""]:
        then, here = (flatten((c.get("students") or {}).get(name) or {}).get("model.ema_decay", c["model"]["ema_decay"])
                      for c in (before, now))  # fmt: skip
        if (then is None) != (here is None):
            key = f"students.{name}.model.ema_decay" if name else "model.ema_decay"
            raise UserError(
                f"{key}: a resumed run keeps its average, or goes without one as it began ({then}, given {here})"
            )


def _join_cluster(request: Request) -> Cluster | None:
    """The launcher's job, unless the command line says itself how many machines there are."""
    cluster = recognise()
    if cluster is None or any(item.startswith("trainer.num_nodes=") for item in request.overrides):
        return None
    _check_devices(cluster, request.overrides)
    request.cluster = cluster.arguments()
    for name, value in cluster.variables.items():
        os.environ.setdefault(name, value)
    return cluster


def _check_devices(cluster: Cluster, overrides: list[str]) -> None:
    """Where the launcher has started every process, the command line can't ask for others."""
    asked = next((item.split("=", 1)[1] for item in reversed(overrides) if item.startswith("trainer.devices=")), None)
    if cluster.starts_each_process and cluster.devices and asked not in (None, "auto", str(cluster.devices)):
        raise UserError(
            f"trainer.devices: {asked}, but {cluster.launcher} has started {cluster.devices} on each machine"
        )


def _was_here_before(marker: Path, request: Request) -> bool:
    """Whether the launcher has started this command again, with something to go on from; then it is a resume."""
    if not marker.is_file():
        return False
    run = marker.parent / marker.read_text(encoding="utf-8").strip()
    if newest_whole(run / "checkpoints")[0] is None:
        return False
    request.resume = str(run)
    if is_rank_zero():
        print(f"kd-train: this job was here before: going on with {run}", flush=True)
    return True


def _run_of(path: Path) -> Path:
    """The run folder where a checkpoint inside it is named."""
    if path.suffix != ".ckpt" or path.parent.name != "checkpoints":
        return path
    run = path.parent.parent
    if path.name in (LAST, PREVIOUS):
        return run
    if not path.is_file():
        raise UserError(f"resume: there is no {path}")
    raise UserError(
        f"resume: {path.name} holds weights alone; resume={run} resumes from {LAST}, and "
        f"model.student.checkpoint={path} starts a new run with these weights"
    )


def _check_resume(request: Request, together: bool = False) -> Path | None:
    """The checkpoint to go on from; the run's own settings are the recipe unless one is given."""
    if request.resume is None:
        return None
    if is_url(request.resume):
        url, inside, file = request.resume.rpartition("/checkpoints/")
        named = bool(inside) and file.endswith(".ckpt")
        found = fetched_run(url if named else request.resume, together=together)
        request.resume = str(found / "checkpoints" / file if named else found)
    run = run_folder(_run_of(Path(request.resume)))
    request.resume = str(run)
    if not run.is_dir():
        raise UserError(f"resume: there is no {run}")
    checkpoint, damaged = newest_whole(run / "checkpoints")
    told = "; ".join(f"{file} can't be loaded: {problem}" for file, problem in damaged.items())
    if checkpoint is None:
        raise UserError(f"resume: {told or f'{run} has no checkpoints/last.ckpt'}")
    if is_rank_zero() and (damaged or checkpoint.name != LAST):
        print(f"kd-train: warning: {told or 'last.ckpt is gone'}; going on from {checkpoint}", file=sys.stderr)
    if request.recipe is None:
        request.recipe = str(run / "config.yaml")
        if (run / "config.yaml").is_file():
            files.check_whole(run / "config.yaml")
    return checkpoint.resolve()

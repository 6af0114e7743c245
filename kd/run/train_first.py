"""What a run's teachers need before it: what their files say of themselves, and weights, trained first if need be."""

import fcntl
import hashlib
import json
import shutil
import signal
from collections.abc import Iterable, Mapping
from itertools import starmap
from pathlib import Path
from types import FrameType
from typing import Any

import kd
from kd.clock import part_of_the_start
from kd.data.sources import Source, fingerprint
from kd.errors import Stopped, UserError
from kd.launch.child import TRAINS_TEACHER, start_kd_train
from kd.launch.cluster import is_rank_zero
from kd.machine import cache_dir, say_in_handler, signals_kept, stopping
from kd.models import TeacherSpec, completed
from kd.models.build import AUTO
from kd.models.hub import check_downloadable
from kd.models.recognise import holds
from kd.models.weights import about, read_weights
from kd.run.build import data_of
from kd.run.needs import TRAIN, refuse_random_weights
from kd.run.paths import find
from kd.run.request import as_word
from kd.run.run import Run, settings_of
from kd.run.trust import Trust
from kd.settings import teachers_in
from kd.storage.checkpoints import newest_whole
from kd.storage.elsewhere import LARGEST_WEIGHTS, open_regular
from kd.storage.run_urls import only_run, words_of_only_run
from kd.storage.student_metadata import student_metadata_in
from kd.storage.weights_files import weights_file
from kd.storage.writing import appended, make_folder

FORMAT = 1
"""Of the folder that is kept: to be raised whenever a run can no longer read a teacher that an earlier kd has trained."""


def train_teacher_if_missing(run: Run, trains: bool = True) -> list[str]:
    """Adds to the settings what the teachers' files say of themselves; trains a teacher now, perhaps for hours, where the
    recipe has one to train and no weights.

    Called by each process, before the run is built; the first one to come trains, the others wait for it.

    Args:
        run: its settings are changed.
        trains: whether a teacher may be trained.

    Returns:
        What :func:`train_teacher_first` has added, as ``key=value`` words of another run's command line.

    Raises:
        UserError: no such file, the teacher's training failed, or a missing teacher may not be trained.
        Stopped: by a signal, while a teacher was trained; the training has saved.
    """
    from_files = what_files_say(run.config, run.overrides)
    run.change(from_files)
    source = None if run.splits is None else run.splits.source
    trained = train_teacher_first(run.config, run.trusted, source, trains)
    run.change(trained)
    return [as_word(key, value) for key, value in trained.items()]


def train_teacher_first(
    config: dict[str, Any],
    trusted: Trust,
    source: Source | None = None,
    trains: bool = True,
) -> dict[str, Any]:
    """Settings, by key, that give the run the trained teacher of ``model.teacher.recipe``.

    Its weights ship with kd, or are from an earlier training; else it is trained now, perhaps for hours.

    Empty where the teacher has weights (a checkpoint, ``pretrained``), or no recipe, and for a run with several teachers.
    Where the weights are from is printed by the first process.

    Args:
        config: the run's settings, resolved.
        trusted: what the user trusts beside the list of classes.
        source: of the run's pictures, where these were listed already.
        trains: whether a teacher may be trained.

    Raises:
        UserError: settings of a teacher that do not fit each other, its training failed, or a missing teacher may not be
            trained.
        Stopped: as :func:`train_teacher_if_missing`.
    """
    refuse_random_weights(config)
    teacher = config["model"]["teacher"]
    if not teacher:
        return {}
    recipe = teacher["recipe"]
    checkpoint = teacher["checkpoint"]
    given = checkpoint not in (None, TRAIN)
    if teacher["backbone"] and (given or not recipe):
        why = "model.teacher.checkpoint is given" if given else "there is no model.teacher.recipe"
        raise UserError(
            f"model.teacher.backbone: is for training a teacher first, and none is trained: {why}"
        )
    if checkpoint == TRAIN and not recipe:
        raise UserError(
            "model.teacher.checkpoint: train needs the recipe to train, model.teacher.recipe=NAME"
        )
    if not recipe or given or (teacher["pretrained"] and checkpoint != TRAIN):
        return {}
    if source is None:
        source = data_of(config, trusted).source
    shipped = None
    if checkpoint != TRAIN and not teacher["backbone"]:
        shipped = shipped_teacher(teacher, source)
    if shipped is not None:
        if is_rank_zero():
            ships = "ships with kd; model.teacher.checkpoint=train trains one"
            print(f"teacher: {shipped} ({ships})", flush=True)
        return {"model.teacher.checkpoint": str(shipped), "model.teacher.checkpoint_key": None}

    words = [f"recipe={recipe}", *ONE_PROCESS, *trusted.words]
    passed = passed_on(config, splits_itself=not source.has("val"))
    as_its_recipe_says = settings_of([*words, *starmap(as_word, passed.items())])
    task = config["model"]["task"]
    if as_its_recipe_says["model"]["task"]["class_path"] != task["class_path"]:
        passed["model.task"] = task
    batch = config["data"]["batch_size"]
    if isinstance(batch, int) and batch < as_its_recipe_says["data"]["batch_size"]:
        passed["data.batch_size"] = batch  # little memory: that holds for the teacher too
    limits = trial_limits(config["trainer"], as_its_recipe_says["trainer"])
    items = [*words, *starmap(as_word, {**passed, **limits}.items())]
    own = settings_of(items)
    backbone = own["model"]["student"]
    if backbone["pretrained"] and not backbone["checkpoint"] and not backbone["builder"]:
        check_downloadable(backbone["arch"], "model.teacher.backbone")
    digest = training_digest(own, source)
    trained = trained_teacher(items, digest, own["recipe"], trains, limits)
    return {
        "model.teacher.checkpoint": str(trained),
        "model.teacher.backbone": None,  # it has done its part
        "model.teacher.checkpoint_key": None,  # of the backbone's file
    }


def shipped_teacher(teacher: dict[str, Any], source: Source) -> Path | None:
    """The weights beside the teacher's recipe, where their architecture, arguments, input size and classes are the same;
    else None.

    Args:
        teacher: the settings ``model.teacher``.
        source: of the run; its classes are loaded.
    """
    file = find("recipes", teacher["recipe"]).with_suffix(".safetensors")
    if not file.is_file():
        return None
    made = student_metadata_in(file)
    wanted = {**teacher["kwargs"], "img_size": teacher["img_size"], "num_classes": made.num_classes}
    if made.arch != teacher["arch"] or made.kwargs != wanted:
        return None
    source.load("train")  # only then its classes are known
    return file if made.classes == list(source.classes) else None


def what_files_say(config: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The settings that the teachers' checkpoints replace, by whole key: where a file holds another architecture than the
    settings name. A student that starts from such a teacher follows it (:func:`_following`). Typed settings stay.

    Args:
        config: all settings.
        overrides: words ``KEY=VALUE`` of the command line.

    Raises:
        UserError: a typed architecture that the file does not hold. Where timm may have several names for the file's model
            (:attr:`kd.models.weights.About.foreign`), the typed one stays.
    """
    typed = {item.partition("=")[0] for item in overrides}
    replaced: dict[str, Any] = {}
    for key, given in teachers_in(config["model"]).items():
        said = about(given["checkpoint"])
        arch = TeacherSpec(given["arch"]).arch
        is_same = said.arch.partition(".")[0] == arch.partition(".")[0]
        if not said.arch or given["builder"] or is_same:
            continue
        is_typed = f"{key}.arch" in typed
        if is_typed and not said.foreign:  # else timm may have several names for it
            raise UserError(
                f"{key}.arch: {given['checkpoint']} holds {said.arch}, got {arch}; leave it out, or give "
                f"another {key}.checkpoint"
            )
        stays = is_typed
        if said.foreign and not stays:
            _, tensors, _ = read_weights(Path(given["checkpoint"]), f"{key}.checkpoint")
            stays = holds(tensors, arch, given["kwargs"])
        if stays:
            continue
        named = TeacherSpec("" if said.foreign else arch, checkpoint=given["checkpoint"])
        spec = completed(named, key)
        for name in ("arch", "img_size", "kwargs", "mean", "std"):
            value = getattr(spec, name)
            name_is_typed = any(f"{item}.".startswith(f"{key}.{name}.") for item in typed)
            if value is not None and not name_is_typed:
                replaced[f"{key}.{name}"] = value
    return {**replaced, **_following(config, replaced, typed)}


def _following(
    config: Mapping[str, Any], replaced: Mapping[str, Any], typed: set[str]
) -> dict[str, Any]:
    """Settings, by whole key, that adapt a student to its only teacher, whose architecture a file has replaced.

    The architecture of a student that inherits becomes ``auto``; a size of the student or the pictures that was the old
    teacher's becomes the new one's. The first process prints them. {} where no architecture was replaced, the student does
    not inherit, or there are several teachers.

    Args:
        config: all settings.
        replaced: those of teachers that their files replace.
        typed: keys of the command line, which stay.
    """
    student = config["model"]["student"]
    teachers = teachers_in(config["model"])
    teacher = next(iter(teachers), "")
    arch = replaced.get(f"{teacher}.arch")
    if len(teachers) > 1 or arch is None or not student["inherit"]:
        return {}
    following: dict[str, Any] = {}
    is_written_out = any(student[name] for name in ("checkpoint", "pretrained", "builder"))
    if not is_written_out and not typed & {"model.student.arch", "model.student.kwargs"}:
        following = {"model.student.arch": AUTO, "model.student.kwargs": {}}
    size = replaced.get(f"{teacher}.img_size")
    sizes = {
        "data.img_size": config["data"]["img_size"],
        "model.student.img_size": student["img_size"],
    }
    for key, now in sizes.items():
        if size and now == teachers[teacher]["img_size"] and key not in typed:
            following[key] = size
    if is_rank_zero() and following:
        words = " ".join(f"{key}={value}" for key, value in following.items())
        print(f"{words}, as the teacher is {arch}", flush=True)
    return following


LIMITS = (
    "fast_dev_run",
    "overfit_batches",
    "limit_train_batches",
    "limit_val_batches",
    "max_steps",
)
"""Settings of a trainer that cut a run short."""
NO_LIMIT = ("None", "False", "-1", "0", "0.0", "1.0")
"""What they are, as Python writes it, where they do not."""
# a teacher's own training: one process, whatever the run has
ONE_PROCESS = [
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "trainer.strategy=auto",
    "optim.zero=false",
]


def passed_on(config: dict[str, Any], splits_itself: bool = False) -> dict[str, Any]:
    """The settings, by key, that a run passes on to the training of its teacher.

    :func:`train_teacher_first` may add the task, a smaller batch and a trial's limits. In messages
    ``kd.launch.child.OUTER_KEYS`` turns keys below ``model.student`` back into the run's own: one that is added here is
    added there. All others but ``recipe`` are the same in both.

    Args:
        config: the resolved configuration of the run.
        splits_itself: the validation pictures are split off by the run, so the seed is passed on too.
    """
    teacher = config["model"]["teacher"]
    passed: dict[str, Any] = {"trainer.accelerator": config["trainer"]["accelerator"]}
    for name in ("source", "on_bad_image", "val_fraction", "num_workers"):
        passed[f"data.{name}"] = config["data"][name]
    for name in ("arch", "img_size", "kwargs", "mean", "std"):
        passed[f"model.student.{name}"] = teacher[name]
    if splits_itself:
        passed["seed"] = config["seed"]
    if teacher["backbone"]:
        passed["model.student.checkpoint"] = teacher["backbone"]
        passed["model.student.checkpoint_key"] = teacher["checkpoint_key"]
        passed["model.student.pretrained"] = False
    return passed


def trial_limits(trainer: Mapping[str, Any], teacher: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that a run's trainer sets to its teacher's training too: a trial run trains a trial teacher.

    The run's number of epochs counts only where each is cut short (``limit_train_batches``, ``overfit_batches``): else it is
    how long the student learns.

    Args:
        trainer: the run's settings ``trainer``.
        teacher: those of the teacher's own training, without limits.

    Returns:
        Settings of the teacher's trainer, by key; empty for a run without limits.
    """
    limits = {}
    for name in LIMITS:
        if repr(trainer[name]) not in NO_LIMIT:
            limits[f"trainer.{name}"] = trainer[name]
    if limits.keys() & {"trainer.limit_train_batches", "trainer.overfit_batches"}:
        epochs = [trainer["max_epochs"] or -1, teacher["max_epochs"] or -1]
        limits["trainer.max_epochs"] = min((n for n in epochs if n > 0), default=1)
    return limits


def training_digest(config: dict[str, Any], source: Source) -> str:
    """A digest of all that a teacher's training depends on, which names the trained teacher in the cache.

    These are its settings, the pictures, the backbone's weights, the versions of kd, torch, torchvision and timm, and
    :data:`FORMAT`.

    Args:
        config: resolved settings of the teacher's own run.
        source: of its pictures.
    """
    import timm
    import torch
    import torchvision

    settings = {k: v for k, v in config.items() if k not in ("runs_dir", "resume", "recipe")}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for split in ("train", "val"):
        if split == "train" or source.has(split):
            digest.update(fingerprint(source.load(split)).encode())
    backbone = settings["model"]["student"]["checkpoint"]
    if backbone:
        file = weights_file(Path(backbone), "model.teacher.backbone")
        with open_regular(file, LARGEST_WEIGHTS) as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    for library in (kd, torch, torchvision, timm):
        digest.update(library.__version__.encode())
    digest.update(str(FORMAT).encode())
    return digest.hexdigest()[:16]


def trained_teacher(
    items: list[str], key: str, name: str, trains: bool, limits: Mapping[str, Any]
) -> Path:
    """The teacher's run folder: from the cache, resumed or trained now; two processes at once train one. The first process
    prints that it is there.

    Args:
        items: command line of the teacher's run.
        key: names it in the cache.
        name: the teacher recipe's name.
        trains: whether one that is missing may be trained.
        limits: of a trial run (:func:`trial_limits`), to report.

    Raises:
        UserError: the training failed, or a missing teacher may not be trained.
        Stopped: by a signal; the training has saved.
    """
    home = cache_dir() / "teachers"
    final = home / f"{name}-{key}"
    if not trains and not (final / "student.safetensors").is_file():
        raise UserError(
            f"model.teacher.checkpoint: there is none yet, kd-train would train recipe={name} first"
        )
    make_folder(home)
    with appended(home / f"{name}-{key}.lock") as lock:
        # a training process holds it too: that of a process that was killed may still be saving
        fcntl.flock(lock, fcntl.LOCK_EX)
        part = home / f"{name}-{key}.part"
        done = f"teacher: {final} (trained earlier by recipe={name})"
        if not (final / "student.safetensors").is_file():
            with part_of_the_start("training of the teacher"):
                words = _begin(items, part, name, limits)
                popen = {"pass_fds": (lock.fileno(),), "env": {TRAINS_TEACHER: "1"}}
                status = run_to_end(words, "the teacher's present step", popen)
            if status != 0:
                raise UserError(
                    f"model.teacher.recipe: training {name} failed (exit {status}), see above and {part}"
                )
            shutil.rmtree(final, ignore_errors=True)
            only_run(part, name).rename(final)
            done = "the teacher is ready; now the student"
        # its checkpoints, seven times its size, and what is left of its training
        for folder in (final / "checkpoints", part):
            shutil.rmtree(folder, ignore_errors=True)
        if is_rank_zero():
            print(done, flush=True)
    return final


def _begin(items: list[str], part: Path, name: str, limits: Mapping[str, Any]) -> list[str]:
    """The words with which a teacher's training begins or resumes, which is printed.

    Args:
        items: words of the command line.
        part: folder of the unfinished training; deleted where the training can't be resumed.
        name: of the teacher's recipe.
        limits: settings that make it as short as this run.
    """
    run = only_run(part, name)
    if newest_whole(run / "checkpoints")[0] is not None:
        print(f"teacher: resuming the training that was stopped ({run})", flush=True)
        return [f"resume={run}"]
    kept = "kept for later runs"
    if limits:
        words = ", ".join(f"{key}={value}" for key, value in limits.items())
        kept = f"as short as this run: {words}; kept for runs with the same limits"
    started = f"teacher: no checkpoint given, so recipe={name} trains one first ({kept})"
    print(started, flush=True)
    shutil.rmtree(part, ignore_errors=True)
    return [*items, *words_of_only_run(part)]


def run_to_end(items: list[str], what: str, popen: Mapping[str, object]) -> int:
    """``kd-train`` in a process of its own; a signal is handed on to it.

    Args:
        items: words of its command line.
        what: it does when a signal comes, for a message: "the teacher's present step".
        popen: arguments of :func:`kd.launch.child.start_kd_train`.

    Returns:
        The exit status of a training that neither SIGTERM nor SIGINT has ended: -N after another signal N.

    Raises:
        Stopped: this process was signalled, or the training was; it has saved.
    """
    received: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        """The handler: the first signal lets the child save, a second Ctrl-C stops it at once."""
        again = number == signal.SIGINT and received
        if not received:
            say_in_handler(stopping(number, what))
        received.append(number)
        # a second Ctrl-C stops it at once
        child.send_signal(signal.SIGINT if again else signal.SIGTERM)

    child = start_kd_train(items, **popen)
    with signals_kept(hand_on):
        status = child.wait()
    by_signal = {130: signal.SIGINT, 143: signal.SIGTERM}.get(status, -status)
    if received or by_signal in (signal.SIGINT, signal.SIGTERM):
        raise Stopped(received[0] if received else by_signal)
    return status

"""Trains the teacher that a recipe names when no checkpoint is given, once, and keeps it in the cache."""

import fcntl
import hashlib
import json
import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock

import kd
from kd.data.sources import Source, cache_dir, fingerprint
from kd.errors import Stopped, UserError
from kd.launch.child import start_kd_train
from kd.models.weights import weights_file
from kd.storage.checkpoints import newest_whole

ONE_PROCESS = [
    "trainer.devices=1", "trainer.num_nodes=1", "trainer.strategy=auto", "optim.zero=false",
]  # fmt: skip


def arguments(config: dict[str, Any], splits_itself: bool = False) -> list[str]:
    """The command line of the teacher's own run: its recipe, with this run's data, architecture, device and limits.

    Args:
        config: this run's resolved configuration.
        splits_itself: validation is held out of the training pictures: the teacher's must be the student's.

    Returns:
        Items for ``kd-train``.
    """
    teacher, data = config["model"]["teacher"], config["data"]
    passed = {
        "data.source": data["source"],
        "data.on_bad_image": data["on_bad_image"],
        "data.val_fraction": data["val_fraction"],
        "data.num_workers": data["num_workers"],
        "model.student.arch": teacher["arch"],
        "model.student.img_size": teacher["img_size"],
        "model.student.kwargs": teacher["kwargs"],
        "model.student.mean": teacher["mean"],
        "model.student.std": teacher["std"],
        "trainer.accelerator": config["trainer"]["accelerator"],
        "trainer.limit_train_batches": config["trainer"]["limit_train_batches"],  # a trial run trains a trial teacher
        "trainer.limit_val_batches": config["trainer"]["limit_val_batches"],
    }
    if splits_itself:
        passed["seed"] = config["seed"]
    if teacher["backbone"]:
        passed |= {"model.student.checkpoint": teacher["backbone"], "model.student.pretrained": False}
    items = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in passed.items()]
    return [f"recipe={teacher['recipe']}", *items, *ONE_PROCESS]


def key_of(config: dict[str, Any], source: Source) -> str:
    """A hash of everything that determines a trained teacher: settings, data, our code, the libraries' versions."""
    import timm
    import torch
    import torchvision

    settings = {k: v for k, v in config.items() if k not in ("runs_dir", "resume", "recipe")}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for split in ("train", "val"):
        if split == "train" or source.has(split):
            digest.update(fingerprint(source.load(split)).encode())
    if start := settings["model"]["student"]["checkpoint"]:
        with weights_file(Path(start), "model.teacher.backbone").open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    for file in sorted(Path(kd.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    for library in (torch, torchvision, timm):
        digest.update(library.__version__.encode())
    return digest.hexdigest()[:16]


def trained_teacher(items: list[str], key: str, name: str, say: bool) -> Path:
    """The run folder of the teacher, trained now unless the cache has it. Two processes at once train one.

    A training that was stopped or killed goes on from its last checkpoint.

    Args:
        items: command line of the teacher's run.
        key: names it in the cache.
        name: the teacher recipe's name.
        say: print what happens (rank 0).

    Raises:
        UserError: the training failed.
        Stopped: by a signal; the training has saved.
    """
    home = cache_dir() / "teachers"
    final = home / f"{name}-{key}"
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f"{name}-{key}.lock"):
        if (final / "student.safetensors").is_file():
            if say:
                print(f"teacher: {final} (trained earlier by recipe={name})", flush=True)
            return final
        part = home / f"{name}-{key}.part"
        with (home / f"{name}-{key}.owner").open("w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)  # the training of a process that was killed may still be saving
            status = _run(_begin(items, part, name), owner.fileno())
        if status != 0:
            raise UserError(f"model.teacher.recipe: training {name} failed (exit {status}), see above and {part}")
        shutil.rmtree(final, ignore_errors=True)
        (part / name / "000").rename(final)
        shutil.rmtree(part, ignore_errors=True)
    return final


def _begin(items: list[str], part: Path, name: str) -> list[str]:
    """The command line that goes on with a training in ``part``, or begins one."""
    run = part / name / "000"
    if newest_whole(run / "checkpoints")[0] is not None:
        print(f"teacher: going on with the training that was stopped ({run})", flush=True)
        return [f"resume={run}"]
    print(f"teacher: no checkpoint given, so recipe={name} trains one first (kept for later runs)", flush=True)
    shutil.rmtree(part, ignore_errors=True)
    return [*items, f"runs_dir={part}"]


def _run(items: list[str], owner: int) -> int:
    """``kd-train`` in a process of its own, which holds the lock ``owner`` too; a signal is handed on to it."""
    received: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and received
        received.append(number)
        child.send_signal(signal.SIGINT if again else signal.SIGTERM)  # a second Ctrl-C stops it at once

    child = start_kd_train(items, pass_fds=(owner,))
    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    by_signal = {
        130: signal.SIGINT,
        143: signal.SIGTERM,
        -signal.SIGINT: signal.SIGINT,
        -signal.SIGTERM: signal.SIGTERM,
    }
    if received or status in by_signal:
        raise Stopped(received[0] if received else by_signal[status])
    return status

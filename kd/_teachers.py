"""Trains the teacher that a recipe names when no checkpoint is given, once, and keeps it in the cache."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock

import kd
from kd.data.sources import Source, cache_dir, fingerprint
from kd.errors import UserError

ONE_PROCESS = [
    "trainer.devices=1", "trainer.num_nodes=1", "trainer.strategy=auto", "optim.zero=false",
]  # fmt: skip
FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def arguments(config: dict[str, Any]) -> list[str]:
    """The command line of the teacher's own run: its recipe, with this run's data, architecture, device and limits.

    Args:
        config: this run's resolved configuration.

    Returns:
        Items for ``kd-train``.
    """
    teacher, data = config["model"]["teacher"], config["data"]
    passed = {
        "data.source": data["source"],
        "data.on_bad_image": data["on_bad_image"],
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
        digest.update(fingerprint(source.load(split)).encode())
    for file in sorted(Path(kd.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    for library in (torch, torchvision, timm):
        digest.update(library.__version__.encode())
    return digest.hexdigest()[:16]


def trained_teacher(items: list[str], key: str, name: str, say: bool) -> Path:
    """The run folder of the teacher, trained now unless the cache has it. Two processes at once train one.

    Args:
        items: command line of the teacher's run.
        key: names it in the cache.
        name: the teacher recipe's name.
        say: print what happens (rank 0).

    Raises:
        UserError: the training failed.
    """
    home = cache_dir() / "teachers"
    final = home / f"{name}-{key}"
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f"{name}-{key}.lock"):
        if (final / "student.safetensors").is_file():
            if say:
                print(f"teacher: {final} (trained earlier by recipe={name})", flush=True)
            return final
        print(
            f"teacher: no checkpoint given, so recipe={name} trains one first (kept for later runs)",
            flush=True,
        )
        part = home / f"{name}-{key}.part"
        shutil.rmtree(part, ignore_errors=True)
        status = _run([*items, f"runs_dir={part}"])
        if status in (130, 143, -signal.SIGTERM):
            raise KeyboardInterrupt
        if status != 0:
            raise UserError(f"model.teacher.recipe: training {name} failed (exit {status}), see above and {part}")
        shutil.rmtree(final, ignore_errors=True)
        (part / name / "000").rename(final)
        shutil.rmtree(part, ignore_errors=True)
    return final


def _run(items: list[str]) -> int:
    """``kd-train`` in a process of its own, outside any distributed job; signals are handed on to it."""
    env = {k: v for k, v in os.environ.items() if k not in FOREIGN and not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    child = subprocess.Popen([sys.executable, "-m", "kd.cli", *items], env=env)
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    except KeyboardInterrupt:
        return child.wait()  # the terminal sent the signal to both: let it save
    finally:
        signal.signal(signal.SIGTERM, before)

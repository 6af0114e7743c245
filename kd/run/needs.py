"""What a run's settings need of this Python and machine: checked before torch is imported and pictures are drawn."""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kd.errors import UserError, needs_extra, pip_install
from kd.launch.cluster import recognise
from kd.run.files import leaves
from kd.run.keys import plain

LOGGERS = {
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
    "MLFlowLogger": ("mlflow", "mlflow_skinny"),
    "CometLogger": ("comet_ml",),
}
"""Lightning's loggers: packages of which one has to be there. kd has no extra for them."""
SMDDP = "smdistributed.dataparallel.torch.torch_smddp"
GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg", "nvhost-gpu", "nvgpu")
"""Below ``/dev``, one of which is there on a machine with a GPU: NVIDIA's, AMD's, WSL's, Jetson's."""


class Need(NamedTuple):
    """Packages of which a setting needs one."""

    setting: str
    """The setting, and its value where that says more."""
    packages: tuple[str, ...]
    """As they are imported."""
    extra: str = ""
    """kd's extra that installs them; "": kd has none."""


def check_needs(config: Mapping[str, Any], overlays: list[str]) -> None:
    """Refuses settings for which a package, a GPU, or a model is missing.

    Args:
        config: the resolved settings.
        overlays: of the command line, for the message.

    Raises:
        UserError: names the setting, and the command that installs the package or another way out.
    """
    _check_student(config)
    refuse_random_weights(config)
    for need in _needs(config):
        if not any(map(_installed, need.packages)):
            package = need.packages[0]
            what = f"needs the package {package}: {pip_install(package)}"
            if need.extra:
                what = needs_extra(need.extra)
            raise UserError(f"{need.setting} {what}")
    strategy = str(config["trainer"]["strategy"])
    if (SMDDP in strategy or "SMDDPStrategy" in strategy) and not _installed(SMDDP):
        raise UserError(
            f"trainer.strategy: {_by(overlays, 'smddp')}needs SageMaker's package smdistributed, which this Python "
            "lacks; config=nodes_4x8 trains on the same machines over NCCL"
        )
    _check_gpus(config["trainer"], overlays)
    _check_processes(config)


def _check_student(config: Mapping[str, Any]) -> None:
    """Refuses a student without a name, a checkpoint or a builder."""
    student = config["model"]["student"]
    if any(student[name] for name in ("arch", "checkpoint", "builder")):
        return
    raise UserError(
        "model.student.arch: which model? Give one of timm.list_models(), "
        "or a model.student.checkpoint with its name"
    )


def refuse_random_weights(config: Mapping[str, Any]) -> None:
    """Refuses a teacher without weights, unless ``preflight`` is other than ``stop``: most likely a key was forgotten.

    The preflight would find out too, but only after a minute.

    Args:
        config: the resolved settings.

    Raises:
        UserError: names the teacher's checkpoint, and the recipe for those who have no teacher.
    """
    if config["preflight"] != "stop":
        return
    for key, spec in teachers_in(config["model"]).items():
        if not any(spec[name] for name in ("checkpoint", "pretrained", "recipe", "builder")):
            raise UserError(
                f"{key}.checkpoint: must be given, or {key}.pretrained=true: its weights would be random; "
                "no teacher yet: recipe=photos fine-tunes one first "
                "(preflight=warn distils from random weights nevertheless)"
            )


def check_downloads(config: Mapping[str, Any]) -> None:
    """Checks that weights which timm would download are on this machine, or can be, before anything is built.

    Args:
        config: the resolved settings, with what the teachers' files say.

    Raises:
        UserError: names the setting that takes the weights from a file.
    """
    models = {**teachers_in(config["model"]), "model.student": config["model"]["student"]}
    for key, spec in models.items():
        from_elsewhere = spec["checkpoint"] or spec["builder"]
        if spec["pretrained"] and spec["arch"] and not from_elsewhere:
            from kd.models.hub import check_downloadable

            check_downloadable(spec["arch"], f"{key}.checkpoint")


def teachers_in(model: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a run's teachers, by key: ``model.teacher``, or ``model.teachers.NAME`` of each; {} without one.

    Beside ``model.teacher`` those of ``model.teachers`` are left out: :mod:`kd.run.checks` refuses both.

    Args:
        model: the settings ``model``, resolved.
    """
    one = model.get("teacher")
    several = model.get("teachers") or {}
    if one:
        return {"model.teacher": one}
    return {f"model.teachers.{name}": spec for name, spec in several.items()}


def _needs(config: Mapping[str, Any]) -> Iterator[Need]:
    """The packages that settings need."""
    data, trainer, monitor = config["data"], config["trainer"], config["monitor"]
    for name in _class_names(trainer["logger"]):
        if name in LOGGERS:
            yield Need(f"trainer.logger: {name}", LOGGERS[name])
    needed = (
        (data["engine"] == "dali", "data.engine: dali", "nvidia.dali", "dali"),
        (data["engine"] == "ray", "data.engine: ray", "ray", "ray"),
        ("DeepSpeed" in _class_names(trainer["strategy"]), "trainer.strategy: DeepSpeed", "deepspeed", "deepspeed"),
        (monitor["prometheus_port"], "monitor.prometheus_port:", "prometheus_client", "prometheus"),
        (monitor["otlp"], "monitor.otlp:", "opentelemetry", "otel"),
    )  # fmt: skip
    from kd.data.sources import class_at

    source = class_at((data["source"] or {}).get("class_path"))
    if source is not None and source.needs is not None:
        package, extra = source.needs
        yield Need(f"data.source: {source.__name__}", (package,), extra)
    for is_needed, setting, package, extra in needed:
        if is_needed:
            yield Need(setting, (package,), extra)
    for key, value in leaves(config):
        name = plain(key.removesuffix(".class_path"))
        if key.endswith("class_path") and str(value).endswith(".HuggingFaceBuilder"):
            yield Need(f"{name}: HuggingFaceBuilder", ("transformers",), "hf")
        elif isinstance(value, str) and value.startswith(("s3://", "gs://")):
            yield Need(f"{name}: {value}", ("fsspec",), "stream")


def _check_gpus(trainer: Mapping[str, Any], overlays: list[str]) -> None:
    """Refuses a run on GPUs where the machine surely has none; how many there are is known once torch is imported.

    Not off Linux, nor in the job of a launcher, which may start the processes on other machines.

    Args:
        trainer: its settings.
        overlays: names of the overlays that were given, for the message.
    """
    if trainer["accelerator"] not in ("gpu", "cuda") or recognise():
        return
    if not _has_gpu_files():
        devices = trainer["devices"]
        machines = trainer["num_nodes"]
        raise UserError(
            f"trainer.accelerator: {_by(overlays, 'x8', '8gpu')}needs GPUs (trainer.devices={devices}, "
            f"trainer.num_nodes={machines}, trainer.accelerator={trainer['accelerator']}) and this machine has none; "
            "trainer.accelerator=cpu trainer.devices=1 trainer.num_nodes=1 trains here, kd-launch sends the run to others"
        )


def _check_processes(config: Mapping[str, Any]) -> None:
    """Refuses ZeRO and FSDP on one process, as far as settings and machine tell: a run of several may be resumed on one."""
    trainer = config["trainer"]
    devices = str(trainer["devices"])
    one = devices == "1" or (devices in ("auto", "-1") and not _has_gpu_files())
    started = recognise() or "WORLD_SIZE" in os.environ
    if not one or trainer["num_nodes"] > 1 or started:
        return
    if config["optim"]["zero"]:
        raise UserError(
            "optim.zero: needs several processes, for example config=ddp_2cpu; optim.zero=false trains on one"
        )
    if _class_names(trainer["strategy"]) == ["FSDP"]:
        raise UserError(
            "trainer.strategy: FSDP shards over several processes (trainer.devices=N, config=ddp_8gpu config=fsdp); "
            "trainer.strategy=auto trains on one"
        )


def _has_gpu_files() -> bool:
    """Whether this machine may have a GPU: off Linux always."""
    on_linux = sys.platform == "linux"
    return not on_linux or any(any(Path("/dev").glob(pattern)) for pattern in GPU_FILES)


def _by(overlays: list[str], *parts: str) -> str:
    """The subject of a message, with a blank after it: the last overlay with one of ``parts`` in its name, else the run."""
    names = [name for name in overlays if any(part in name for part in parts)]
    if names:
        return f"config={names[-1]} "
    return "this run "


def _class_names(value: object) -> list[str]:
    """The short names of a class, or of a list of classes; words and null have none."""
    nodes = value if isinstance(value, list) else [value]
    return [node["class_path"].rpartition(".")[2] for node in nodes if isinstance(node, dict)]


def _installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    if package in sys.modules:
        return True
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a package that holds it
        return False

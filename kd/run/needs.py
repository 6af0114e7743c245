"""What settings and command lines need of this Python, machine and disk: checked before torch is imported."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.config import parts as listed
from kd.config.parts import plain_key
from kd.config.trees import leaves
from kd.errors import UserError, needs_extra, pip_install
from kd.launch.cluster import recognise_launcher
from kd.run.resolve import class_nodes
from kd.run.trust import is_here, no_module
from kd.settings import teachers_in
from kd.storage.objects import is_url
from kd.storage.run_urls import finished_at, names_run
from kd.storage.weights_files import refuse_text, weights_file

if TYPE_CHECKING:
    from kd.data.splits import Splits

PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "TensorBoardLogger": (("tensorboard", "tensorboardX"), ""),
    "WandbLogger": (("wandb",), ""),
    "MLFlowLogger": (("mlflow", "mlflow_skinny"), ""),
    "CometLogger": (("comet_ml",), ""),
    "DeepSpeed": (("deepspeed",), "deepspeed"),
    "HuggingFaceBuilder": (("transformers",), "hf"),
    "data.engine=dali": (("nvidia.dali",), "dali"),
    "data.engine=ray": (("ray",), "ray"),
    "monitor.prometheus_port": (("prometheus_client",), "prometheus"),
    "monitor.otlp": (("opentelemetry",), "otel"),
    "s3://": (("fsspec",), "stream"),
    "gs://": (("fsspec",), "stream"),
}
"""What a setting needs, by its key, its key and value, its class or the beginning of a URL: packages of which one has to be
there, and kd's extra that installs them ("": kd has none, as for Lightning's loggers)."""
SMDDP = "smdistributed.dataparallel.torch.torch_smddp"
GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg", "nvhost-gpu", "nvgpu")
"""Below ``/dev``, one of which is there on a machine with a GPU: NVIDIA's, AMD's, WSL's, Jetson's."""
TRAIN = "train"
"""As ``model.teacher.checkpoint``: the teacher is trained first, even where one ships with its recipe."""


# -- packages and machines --------


def check_needs(config: Mapping[str, Any]) -> None:
    """Refuses settings for which a package, a GPU, or a model is missing.

    Args:
        config: the resolved settings.

    Raises:
        UserError: names the setting, and the command that installs the package or another way out.
    """
    student = config["model"]["student"]
    if not any(student[name] for name in ("arch", "checkpoint", "builder")):
        raise UserError(
            "model.student.arch: which model? Give one of timm.list_models(), "
            "or a model.student.checkpoint with its name"
        )
    refuse_random_weights(config)
    strategy = str(config["trainer"]["strategy"])
    if (SMDDP in strategy or "SMDDPStrategy" in strategy) and not _installed(SMDDP):
        raise UserError(
            "trainer.strategy: needs SageMaker's package smdistributed, which this Python "
            "lacks; config=nodes_4x8 trains on the same machines over NCCL"
        )
    _check_processes(config)
    for setting, packages, extra in _needs(config):
        if not any(map(_installed, packages)):
            remedy = f"needs the package {packages[0]}: {pip_install(packages[0])}"
            if extra:
                remedy = needs_extra(extra)
            raise UserError(f"{setting} {remedy}")


def refuse_random_weights(config: Mapping[str, Any]) -> None:
    """Refuses a teacher without weights, unless ``preflight`` is other than ``stop``: most likely a key was forgotten.

    The preflight would find out too, but only after a minute.

    Args:
        config: the resolved settings.

    Raises:
        UserError: names the teacher's checkpoint, and the recipe for those who have no teacher.
    """
    for key, spec in teachers_in(config["model"]).items():
        has_weights = any(spec[name] for name in ("checkpoint", "pretrained", "recipe", "builder"))
        if not has_weights and config["preflight"] == "stop":
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


def _needs(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """The packages that settings need.

    Yields:
        The setting with its value, as text; import names of packages, of which one must be installed; kd's extra that
        installs them, "" for none.
    """
    from kd.data.sources import class_at

    said = []
    for key, value in leaves(config):
        if value:
            said.append((plain_key(key), str(value)))
    for key, _, node in class_nodes(config):
        name = node["class_path"].rpartition(".")[2]
        said.append((key, name))
        source = class_at(node["class_path"]) if key == "data.source" else None
        if source is not None and source.needs is not None:
            package, extra = source.needs
            yield f"{key}: {name}", (package,), extra
    for key, value in said:
        scheme = value.partition("://")[0]
        for word in (f"{key}={value}", key, value, f"{scheme}://"):
            if word in PACKAGES:
                shown = f"{key}:" if word == key else f"{key}: {value}"
                yield shown, *PACKAGES[word]


def _check_processes(config: Mapping[str, Any]) -> None:
    """Refuses GPUs on a machine that surely has none (known on Linux alone), and ZeRO and FSDP in a single process.

    Settings and machine decide how many processes there will be. In the job of a launcher nothing is refused: it may
    start the processes on other machines.

    Args:
        config: all settings.

    Raises:
        UserError: names the setting, and another one that would do.
    """
    trainer = config["trainer"]
    devices, machines = trainer["devices"], trainer["num_nodes"]
    may_have_gpus = sys.platform != "linux" or any(
        any(Path("/dev").glob(name)) for name in GPU_FILES
    )
    if recognise_launcher():
        return
    if trainer["accelerator"] in ("gpu", "cuda") and not may_have_gpus:
        raise UserError(
            f"trainer.accelerator: needs GPUs (trainer.devices={devices}, "
            f"trainer.num_nodes={machines}, trainer.accelerator={trainer['accelerator']}) and this machine has none; "
            "trainer.accelerator=cpu trainer.devices=1 trainer.num_nodes=1 trains here, kd-launch sends the run to others"
        )
    one = str(devices) == "1" or (str(devices) in ("auto", "-1") and not may_have_gpus)
    if not one or machines > 1 or "WORLD_SIZE" in os.environ:
        return
    if config["optim"]["zero"]:
        raise UserError(
            "optim.zero: needs several processes, for example config=ddp_2cpu; optim.zero=false trains on one"
        )
    if "kd.strategies.fsdp.FSDP" in str(trainer["strategy"]):
        raise UserError(
            "trainer.strategy: FSDP shards over several processes (trainer.devices=N, config=ddp_8gpu config=fsdp); "
            "trainer.strategy=auto trains on one"
        )


def _installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    if package in sys.modules:
        return True
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a package that holds it
        return False


# -- files and folders --------


def check_present(config: Mapping[str, Any]) -> "Splits | None":
    """Refuses settings that name a folder or a file that is not on this machine, and pictures that can't be trained on.

    Args:
        config: the resolved settings.

    Returns:
        The pictures, for :attr:`kd.run.run.Run.splits`; None where they are listed later
        (:func:`kd.run.pictures.list_to_train`).

    Raises:
        UserError: as of :func:`check_named` and :func:`kd.run.pictures.list_to_train`.
    """
    check_named(config)
    from kd.run.pictures import list_to_train

    return list_to_train(config)


def check_named(config: Mapping[str, Any], resumed: bool = False) -> None:
    """Refuses settings that name weights, answers or a class of the user's own that are not on this machine; URLs are left
    to their readers, and pictures to :func:`kd.run.pictures.list_to_train`.

    Args:
        config: the resolved settings.
        resumed: the run is resumed: its student's weights are in the checkpoint, so the file they began with may be gone.

    Raises:
        UserError: names the setting, and the missing path or class.
    """
    for key, kind, node in class_nodes(config):
        top = node["class_path"].partition(".")[0]
        is_imported = (
            "." in node["class_path"] and listed.listed_class(node["class_path"], kind) is None
        )
        if is_imported and not (_installed(top) or is_here(top)):
            raise no_module(top, node["class_path"], kind, key)
        if node["class_path"].endswith(".StoredAnswers"):
            folder = node["init_args"]["folder"]
            if not (is_url(folder) or Path(folder).is_dir()):
                answers = key.replace("builder", "answers")
                raise UserError(f"{answers}: folder {folder} not found")
    model = config["model"]
    places = {}
    for key, spec in teachers_in(model).items():
        checkpoint = spec["checkpoint"]
        if checkpoint != TRAIN:
            places[f"{key}.checkpoint"] = checkpoint
        if spec["recipe"] and checkpoint in (None, TRAIN):  # it is trained first
            places[f"{key}.backbone"] = spec["backbone"]
    if not resumed:
        places["model.student.checkpoint"] = model["student"]["checkpoint"]
    for key, place in places.items():
        if place and not is_url(place):
            refuse_text(weights_file(Path(place), key), key)


def check_models(words: Sequence[str]) -> list[Path | None]:
    """Refuses words of a command line that name neither a finished run nor a weights file.

    Returns:
        The run's folder for each word; None for a weights file.

    Raises:
        UserError: names the missing folder or file.
    """
    runs: list[Path | None] = []
    for word in words:
        if names_run(word):
            runs.append(finished_at(word, "config.yaml"))
        else:
            weights_file(Path(word), "weights")
            runs.append(None)
    return runs

"""Writes ``kd/config/parts.json``: the classes that settings may name, with the arguments that each may be given.

    python scripts/parts.py           # writes the table
    python scripts/parts.py --check   # exits with 1 if the table is not what would be written

Which classes are listed is written here by hand, for it is what a file from elsewhere may have built. The arguments of kd's
classes, and of Lightning's Trainer, are those of the imported class; those of other packages are written here too.
"""

import argparse
import inspect
import json
import re
import sys
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytorch_lightning  # noqa: E402

import kd  # noqa: E402
from kd.config.kinds import AnyClass, Range  # noqa: E402
from kd.run.keys import first_sentence  # noqa: E402

TABLE = ROOT / "kd" / "config" / "parts.json"
PACKAGES = ("pytorch-lightning", "torchvision")
"""The table is of these packages' versions."""

CLASSES: dict[str, dict[str, str]] = {
    "source": {
        "kd.data.sources": "Food101 FoodTagCalories FoodTagMini HuggingFace ImageFolder Manifest Pictures "
        "SegmentationFolder Shards WebDataset"
    },
    "task": {"kd.tasks": "Classification Features MultiLabel Regression Segmentation"},
    "loss": {
        "kd.losses": " ".join(
            name
            for name in kd.losses.__all__
            if name.endswith(("Loss", "Regression"))
            and name not in ("DistillLoss", "FeatureLoss", "LogitLoss")
        )
    },
    "projection": {"kd.losses": "ConvProjection MLPProjection OrthogonalProjection Projection"},
    "builder": {
        "kd.models.hugging_face": "HuggingFaceBuilder",
        "kd.teachers": "StoredAnswers",
    },
    "strategy": {
        "kd.strategies.ddp": "DDP SMDDPStrategy",
        "kd.strategies.fsdp": "FSDP",
        "kd.strategies.deepspeed": "DeepSpeed",
        "pytorch_lightning.strategies": "DDPStrategy",
    },
    "callback": {
        "kd.monitor.audit": "Audit",
        "pytorch_lightning.callbacks": "DeviceStatsMonitor EarlyStopping LearningRateMonitor ModelCheckpoint Timer",
    },
    "logger": {
        "pytorch_lightning.loggers": "CSVLogger CometLogger MLFlowLogger TensorBoardLogger WandbLogger"
    },
    "profiler": {"pytorch_lightning.profilers": "AdvancedProfiler PyTorchProfiler SimpleProfiler"},
    "plugin": {},
    "transform": {
        "torchvision.transforms.v2": "AugMix AutoAugment ColorJitter ElasticTransform GaussianBlur JPEG RandAugment "
        "RandomAdjustSharpness RandomAffine RandomAutocontrast RandomChannelPermutation RandomEqualize RandomGrayscale "
        "RandomInvert RandomPerspective RandomPhotometricDistort RandomPosterize RandomSolarize TrivialAugmentWide"
    },
    "sampler": {},
}
"""By what they are: module -> names of its classes, with blanks between."""

LIGHTNINGS = {
    "callback": "pytorch_lightning.callbacks",
    "logger": "pytorch_lightning.loggers",
    "profiler": "pytorch_lightning.profilers",
    "strategy": "pytorch_lightning.strategies",
    "plugin": "pytorch_lightning.plugins.environments",
}
"""Where Lightning's classes are that a command line may name without their module."""

BASES = {
    "Source": "source", "Task": "task", "DistillLoss": "loss", "LogitLoss": "loss", "FeatureLoss": "loss",
    "FeatureRegression": "loss", "Projection": "projection", "Builder": "builder",
    "Strategy": "strategy", "Callback": "callback", "Logger": "logger", "Profiler": "profiler",
    "ClusterEnvironment": "plugin", "Accelerator": "plugin",
}  # fmt: skip
"""What a base class in an annotation takes."""

_GROUP = "process_group_backend: str | None"

_TORCH_DDP = (
    "model_averaging_period: int | None, "
    "start_method: Literal['popen', 'spawn', 'fork', 'forkserver'], dim: int, broadcast_buffers: bool | None, "
    "init_sync: bool, bucket_cap_mb: float | None, find_unused_parameters: bool, check_reduction: bool, "
    "gradient_as_bucket_view: bool, static_graph: bool, skip_all_reduce_unused_params: bool, batched_grad_copy: bool"
)

_ONE_OR_TWO = "float | list[float]"

_FEW = "Annotated[int, Range('<= 1000')]"

_IN_FILES = "dirpath: str | None, filename: str | None"

FIELDS = {
    "kd.models.hugging_face.HuggingFaceBuilder": "path: str",
    "kd.strategies.ddp.DDP": "backend: str | None, "
    f"compression: Literal['bf16', 'powersgd'] | None, powersgd_rank: int, powersgd_start_step: int, {_TORCH_DDP}",
    "kd.strategies.ddp.SMDDPStrategy": _TORCH_DDP,
    "kd.strategies.fsdp.FSDP": _GROUP,
    "kd.strategies.deepspeed.DeepSpeed": f"stage: Literal[1, 2, 3], zero: dict | None, {_GROUP}",
    "pytorch_lightning.strategies.DDPStrategy": f"process_group_backend: str | None, {_TORCH_DDP}",
    "pytorch_lightning.callbacks.DeviceStatsMonitor": "cpu_stats: bool | None",
    "pytorch_lightning.callbacks.EarlyStopping": "monitor: str, min_delta: float, patience: int, verbose: bool, "
    "mode: Literal['min', 'max'], strict: bool, check_finite: bool, stopping_threshold: float | None, "
    "divergence_threshold: float | None, check_on_train_epoch_end: bool | None, log_rank_zero_only: bool",
    "pytorch_lightning.callbacks.LearningRateMonitor": "logging_interval: Literal['step', 'epoch'] | None, "
    "log_momentum: bool, log_weight_decay: bool",
    "pytorch_lightning.callbacks.ModelCheckpoint": f"{_IN_FILES}, monitor: str | None, verbose: bool, "
    "save_last: bool | Literal['link'] | None, save_top_k: int, save_on_exception: bool, save_weights_only: bool, "
    "mode: Literal['min', 'max'], auto_insert_metric_name: bool, every_n_train_steps: int | None, "
    "train_time_interval: str | int | None, every_n_epochs: int | None, save_on_train_epoch_end: bool | None, "
    "enable_version_counter: bool",
    "pytorch_lightning.callbacks.Timer": "duration: TimeLimit | None, interval: Literal['step', 'epoch'], "
    "verbose: bool",
    "pytorch_lightning.loggers.CSVLogger": "save_dir: str, name: str | None, version: int | str | None, prefix: str, "
    "flush_logs_every_n_steps: int",
    "pytorch_lightning.loggers.CometLogger": "project: str | None, experiment_key: str | None, "
    "mode: str | None, online: bool | None, prefix: str | None",
    "pytorch_lightning.loggers.MLFlowLogger": "experiment_name: str, run_name: str | None, tracking_uri: str | None, "
    "tags: dict | None, save_dir: str | None, log_model: bool | Literal['all'], prefix: str, "
    "artifact_location: str | None, run_id: str | None, synchronous: bool | None",
    "pytorch_lightning.loggers.TensorBoardLogger": "save_dir: str, name: str | None, version: int | str | None, "
    "log_graph: bool, default_hp_metric: bool, prefix: str, sub_dir: str | None",
    "pytorch_lightning.loggers.WandbLogger": "name: str | None, save_dir: str, version: str | None, offline: bool, "
    "dir: str | None, id: str | None, anonymous: bool | None, project: str | None, "
    "log_model: bool | Literal['all'], prefix: str, checkpoint_name: str | None, "
    "add_file_policy: Literal['mutable', 'immutable']",
    "pytorch_lightning.profilers.AdvancedProfiler": f"{_IN_FILES}, line_count_restriction: float, dump_stats: bool",
    "pytorch_lightning.profilers.PyTorchProfiler": f"{_IN_FILES}, group_by_input_shapes: bool, emit_nvtx: bool, "
    "export_to_chrome: bool, row_limit: int, sort_by_key: str | None, record_module_names: bool, "
    "table_kwargs: dict | None, record_shapes: bool, profile_memory: bool, with_stack: bool, with_flops: bool",
    "pytorch_lightning.profilers.SimpleProfiler": f"{_IN_FILES}, extended: bool",
    "torchvision.transforms.v2.AugMix": f"severity: int, mixture_width: {_FEW}, chain_depth: {_FEW}, "
    "alpha: float, all_ops: bool",
    "torchvision.transforms.v2.AutoAugment": "",
    "torchvision.transforms.v2.ColorJitter": f"brightness: {_ONE_OR_TWO} | None, contrast: {_ONE_OR_TWO} | None, "
    f"saturation: {_ONE_OR_TWO} | None, hue: {_ONE_OR_TWO} | None",
    "torchvision.transforms.v2.ElasticTransform": f"alpha: {_ONE_OR_TWO}, sigma: {_ONE_OR_TWO}",
    "torchvision.transforms.v2.GaussianBlur": f"kernel_size: {_FEW} | list[{_FEW}], sigma: {_ONE_OR_TWO}",
    "torchvision.transforms.v2.JPEG": "quality: int | list[int]",
    "torchvision.transforms.v2.RandAugment": f"num_ops: {_FEW}, magnitude: int, num_magnitude_bins: {_FEW}",
    "torchvision.transforms.v2.RandomAdjustSharpness": "sharpness_factor: float, p: float",
    "torchvision.transforms.v2.RandomAffine": f"degrees: {_ONE_OR_TWO}, translate: list[float] | None, "
    f"scale: list[float] | None, shear: {_ONE_OR_TWO} | None",
    "torchvision.transforms.v2.RandomAutocontrast": "p: float",
    "torchvision.transforms.v2.RandomChannelPermutation": "",
    "torchvision.transforms.v2.RandomEqualize": "p: float",
    "torchvision.transforms.v2.RandomGrayscale": "p: float",
    "torchvision.transforms.v2.RandomInvert": "p: float",
    "torchvision.transforms.v2.RandomPerspective": "distortion_scale: float, p: float",
    "torchvision.transforms.v2.RandomPhotometricDistort": "brightness: list[float], contrast: list[float], "
    "saturation: list[float], hue: list[float], p: float",
    "torchvision.transforms.v2.RandomPosterize": "bits: int, p: float",
    "torchvision.transforms.v2.RandomSolarize": "threshold: float, p: float",
    "torchvision.transforms.v2.TrivialAugmentWide": f"num_magnitude_bins: {_FEW}",
}
"""Class path -> its arguments as Python writes them in a signature, with types and without defaults: those of classes of
other packages, and of ours that take ``**kwargs``. Those of all others are in their source."""

OF_A_RUN = {
    "pytorch_lightning.loggers.CSVLogger": {"save_dir": "RUN"},
    "pytorch_lightning.loggers.TensorBoardLogger": {"save_dir": "RUN"},
    "pytorch_lightning.profilers.AdvancedProfiler": {"dirpath": "RUN"},
    "pytorch_lightning.profilers.PyTorchProfiler": {"dirpath": "RUN"},
    "pytorch_lightning.profilers.SimpleProfiler": {"dirpath": "RUN"},
}
"""Arguments that a run gives where no settings do: its own folder."""


def text_of(kind: Any) -> str:
    """A type as :func:`kd.config.parts.kind_named` reads it; one that only the class itself knows is ``Any``."""
    if get_origin(kind) is Annotated:
        inside, *marks = get_args(kind)
        if any(isinstance(mark, AnyClass) for mark in marks):
            return "Class"
        limits = [mark for mark in marks if isinstance(mark, Range)]
        return (
            f"Annotated[{text_of(inside)}, Range({limits[0].text!r})]"
            if limits
            else text_of(inside)
        )
    several = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if len(several) > 1:
        return " | ".join(dict.fromkeys(map(text_of, several)))
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    if get_origin(kind) in (dict, list, tuple):
        inside = ", ".join("..." if part is ... else text_of(part) for part in get_args(kind))
        return f"{get_origin(kind).__name__}[{inside}]"
    name = getattr(kind, "__name__", "Any")
    if name in BASES:
        return f"Part({BASES[name]!r})"
    if isinstance(kind, type) and issubclass(kind, Path):
        return "str"
    names = {NoneType: "None", timedelta: "timedelta"}
    names |= {plain: plain.__name__ for plain in (int, float, bool, str, dict, list, tuple)}
    return names.get(kind, "Any")


def described(cls: type) -> dict[str, str]:
    """What the docstrings of a class, of its bases and of their constructors say of each argument: a sentence."""
    texts: dict[str, str] = {}
    for one in [*reversed(cls.__mro__[:-1]), cls.__init__]:
        own = one.__doc__ if one is cls.__init__ or "__doc__" in vars(one) else ""
        section = re.search(
            r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", inspect.cleandoc(own or ""), re.M | re.S
        )
        for entry in re.split(r"\n(?=    \w+: )", "\n" + section[1]) if section else ():
            name, _, text = entry.strip().partition(": ")
            texts[name] = first_sentence(text)
    return texts


def ranges(cls: type) -> dict[str, str]:
    """The ranges of the fields of a class and its bases."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__[:-1]):
        for field, kind in vars(one).get("__annotations__", {}).items():
            for mark in getattr(kind, "__metadata__", ()):
                if isinstance(mark, Range):
                    found[field] = mark.text
    return found


def arguments(cls: type) -> dict[str, dict[str, str]]:
    """The arguments of an imported class: type, default as Python writes it (none: it must be given), meaning."""
    hints = get_type_hints(cls.__init__, include_extras=True)
    limits, texts = ranges(cls), described(cls)
    found = {}
    for name, parameter in [*inspect.signature(cls.__init__).parameters.items()][1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = text_of(hints.get(name, Any))
        if name in limits and "Range" not in kind:
            kind = " | ".join(
                part
                if part == "None" or part.startswith(("Literal", "Annotated"))
                else f"Annotated[{part}, Range({limits[name]!r})]"
                for part in kind.split(" | ")
            )
        entry = {"type": kind, "text": texts.get(name, "")}
        if parameter.default is not parameter.empty:
            entry["default"] = repr(parameter.default)
        found[name] = entry
    return found


def written(path: str) -> dict[str, dict[str, str]]:
    """The arguments that :data:`FIELDS` lists of a class."""
    found = {}
    for declared in re.findall(r"(\w+: .+?)(?:, (?=\w+: )|$)", FIELDS[path]):
        name, _, kind = declared.partition(": ")
        found[name] = {"type": kind, "text": ""}
        if name in OF_A_RUN.get(path, {}):
            found[name]["default"] = repr(OF_A_RUN[path][name])
    return found


def paths(module: str, name: str) -> list[str]:
    """The paths of a class: by its package, by the module that defines it, and by the packages between."""
    cls = getattr(import_module(module), name)
    top = module.partition(".")[0]
    between = [
        place for place, found in sorted(sys.modules.items())
        if place.partition(".")[0] == top and vars(found).get(name) is cls
        and f"{cls.__module__}.".startswith(f"{place}.") and place.startswith(module)
    ]  # fmt: skip
    found = {f"{place}.{name}" for place in (module, cls.__module__, *between)}
    return sorted(found | ({f"kd.{name}"} if kd.public(name) == module else set()))


def part(module: str, name: str) -> dict[str, Any]:
    """What the table says of a class."""
    path = f"{module}.{name}"
    cls = getattr(import_module(module), name)
    known = path not in FIELDS
    text = (inspect.getdoc(cls) or "").split("\n")[0] if known else ""
    return {"paths": paths(module, name), "text": text, "all_known": known,
            "arguments": arguments(cls) if known else written(path)}  # fmt: skip


def names_in(module: str) -> list[str]:
    """The public classes of a module."""
    found = vars(import_module(module)).items()
    return sorted(name for name, value in found if isinstance(value, type) and name[0] != "_")


def table() -> dict[str, Any]:
    """The whole table."""
    return {
        "versions": {package: version(package).partition("+")[0] for package in PACKAGES},
        "classes": {
            kind: {f"{module}.{name}": part(module, name) for module, names in modules.items() for name in names.split()}
            for kind, modules in CLASSES.items()
        },
        "short_names": {
            kind: {"module": module, "names": names_in(module)}
            for kind, module in LIGHTNINGS.items()
        },
        "trainer": arguments(pytorch_lightning.Trainer),
    }  # fmt: skip


def main() -> int:
    """Writes the table, or compares it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    text = json.dumps(table(), indent=1) + "\n"
    if parser.parse_args().check:
        return int(TABLE.read_text() != text)
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

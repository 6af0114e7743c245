"""The classes that a file from elsewhere may name, each with its typed fields. Neither torch nor Lightning is imported.

This list is what builds: :mod:`kd.run.trust` checks files by it, and
:mod:`kd.run.build` builds by it. A class outside it needs the user's ``trust=``. ``kd-train --list classes`` prints it.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kd.run import keys
from kd.run.annotations import names_in, shown, type_of

CLASSES: dict[str, dict[str, str]] = {
    "source": {
        "kd.data.sources": "Food101 FoodTagCalories FoodTagMini HuggingFace ImageFolder Manifest Pictures "
        "SegmentationFolder Shards WebDataset"
    },
    "task": {"kd.tasks": "Classification Features MultiLabel Regression Segmentation"},
    "loss": {
        "kd.losses": "ATLoss BinaryKDLoss CKALoss CRDLoss CWDFeatureLoss CWDLoss CosineLoss DISTLoss DKDLoss EachLayer "
        "FeatureRegression GramKLLoss HardKDLoss HintLoss KDLoss MGDLoss MLKDLoss MSELoss NKDLoss PKDLoss PairwiseLoss "
        "PixelKDLoss PseudoClassLoss RADIOLoss RKDLoss RegressionKDLoss ReviewKDLoss SPLoss SimKDLoss SmoothL1Loss "
        "StandardizedLoss ViTKDLoss WSLDLoss"
    },
    "projection": {"kd.losses": "ConvProjection MLPProjection OrthogonalProjection Projection"},
    "builder": {
        "kd.models.hugging_face": "HuggingFaceBuilder",
        "kd.teachers": "Address AnswersFile ChatAddress",
    },
    "strategy": {
        "kd.strategies.ddp": "DDP SMDDPStrategy",
        "kd.strategies.fsdp": "FSDP",
        "kd.strategies.deepspeed": "DeepSpeed",
        "pytorch_lightning.strategies": "DDPStrategy",
    },
    "callback": {
        "kd.monitor.audit": "Audit",
        "kd.monitor.headspace": "Headspace",
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

SEVERAL = ("callback", "logger", "plugin")
"""Kinds of classes of which a setting takes a list."""

PLACES = {
    r"data\.source": "source",
    r"data\.augment\.transform": "transform",
    r"data\.sampler": "sampler",
    r"model\.task": "task",
    r"model\.distill_losses\.[^.]+": "loss",
    r"model\.(student|teacher|teachers\.[^.]+)\.builder": "builder",
    r"trainer\.strategy": "strategy",
    r"trainer\.callbacks": "callback",
    r"trainer\.logger": "logger",
    r"trainer\.profiler": "profiler",
    r"trainer\.(plugins|accelerator)": "plugin",
}
"""Settings that take a class, and which kind of class. No other setting takes one."""

BASES = {
    "Source": "source", "Task": "task", "DistillLoss": "loss", "LogitLoss": "loss", "FeatureLoss": "loss",
    "LayersLoss": "loss", "FeatureRegression": "loss", "Projection": "projection", "Builder": "builder",
    "Strategy": "strategy", "Callback": "callback", "Logger": "logger", "Profiler": "profiler",
    "ClusterEnvironment": "plugin", "Accelerator": "plugin",
}  # fmt: skip
"""What a base class in an annotation takes."""

_GROUP = "process_group_backend: str | None, timeout: timedelta | None"
_TORCH_DDP = (
    "model_averaging_period: int | None, timeout: timedelta | None, "
    "start_method: Literal['popen', 'spawn', 'fork', 'forkserver'], dim: int, broadcast_buffers: bool | None, "
    "init_sync: bool, bucket_cap_mb: float | None, find_unused_parameters: bool, check_reduction: bool, "
    "gradient_as_bucket_view: bool, static_graph: bool, skip_all_reduce_unused_params: bool, batched_grad_copy: bool"
)
_ONE_OR_TWO = "float | list[float]"
_IN_FILES = "dirpath: str | None, filename: str | None"

FIELDS = {
    "kd.models.hugging_face.HuggingFaceBuilder": "path: str | None, config: dict",
    "kd.strategies.ddp.DDP": "backend: str | None, module: str | None, "
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
    "pytorch_lightning.callbacks.Timer": "duration: str | dict | None, interval: Literal['step', 'epoch'], "
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
    "torchvision.transforms.v2.AugMix": "severity: int, mixture_width: int, chain_depth: int, alpha: float, all_ops: bool",
    "torchvision.transforms.v2.AutoAugment": "",
    "torchvision.transforms.v2.ColorJitter": f"brightness: {_ONE_OR_TWO} | None, contrast: {_ONE_OR_TWO} | None, "
    f"saturation: {_ONE_OR_TWO} | None, hue: {_ONE_OR_TWO} | None",
    "torchvision.transforms.v2.ElasticTransform": f"alpha: {_ONE_OR_TWO}, sigma: {_ONE_OR_TWO}",
    "torchvision.transforms.v2.GaussianBlur": f"kernel_size: int | list[int], sigma: {_ONE_OR_TWO}",
    "torchvision.transforms.v2.JPEG": "quality: int | list[int]",
    "torchvision.transforms.v2.RandAugment": "num_ops: int, magnitude: int, num_magnitude_bins: int",
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
    "torchvision.transforms.v2.TrivialAugmentWide": "num_magnitude_bins: int",
}
"""Class path -> its arguments as Python writes them in a signature, with types and without defaults: those of classes of
other packages, and of ours that take ``**kwargs``. Those of all others are in their source."""

FROM_ELSEWHERE = {
    "kd.strategies.ddp.DDP": {
        "module": "Literal['smdistributed.dataparallel.torch.torch_smddp'] | None"
    },
}
"""Arguments whose value is imported, and what a file from elsewhere may give them; the user may give any."""

OF_A_RUN = {
    "pytorch_lightning.loggers.CSVLogger": {"save_dir": "RUN"},
    "pytorch_lightning.loggers.TensorBoardLogger": {"save_dir": "RUN"},
    "pytorch_lightning.profilers.AdvancedProfiler": {"dirpath": "RUN"},
    "pytorch_lightning.profilers.PyTorchProfiler": {"dirpath": "RUN"},
    "pytorch_lightning.profilers.SimpleProfiler": {"dirpath": "RUN"},
}
"""Arguments that a run gives where no settings do: its own folder."""


@dataclass(frozen=True)
class Listed:
    """A class that files from elsewhere may name.

    Attributes:
        name: its public class path.
        kind: what it is, a key of :data:`CLASSES`.
    """

    name: str
    kind: str

    @property
    def short(self) -> str:
        """The class's name without its module."""
        return self.name.rpartition(".")[2]

    @property
    def names(self) -> set[str]:
        """All names by which it can be given: short, public, and by the module that defines it."""
        return {self.short, *self.paths}

    @property
    def paths(self) -> set[str]:
        """The names of :attr:`names` that are class paths."""
        return paths_of(self.name)

    @property
    def arguments(self) -> Mapping[str, keys.Key]:
        """The arguments that it may be given, by name in their order; a key's own ``name`` is that name, without a place."""
        return _arguments(self.name)

    @property
    def all_known(self) -> bool:
        """Whether these are all its arguments, with their defaults: its source is read."""
        return self.name not in FIELDS

    @property
    def fields(self) -> Mapping[str, object]:
        """The type of each argument that it may be given."""
        return {name: argument.kind for name, argument in self.arguments.items()}

    @property
    def fields_from_elsewhere(self) -> Mapping[str, object]:
        """The type of what a file from elsewhere may give to each argument."""
        narrower = FROM_ELSEWHERE.get(self.name, {})
        return {**self.fields, **{name: _type(text) for name, text in narrower.items()}}


@cache
def classes() -> tuple[Listed, ...]:
    """The whole list, each class with its kind; :mod:`kd.run.trust` and :mod:`kd.run.build` read it."""
    return tuple(
        Listed(f"{module}.{name}", kind)
        for kind, modules in CLASSES.items()
        for module, names in modules.items()
        for name in names.split()
    )


@cache
def listed(name: str, kind: str) -> Listed | None:
    """The class of a kind that a name means; None where the list has none.

    Args:
        name: short (``KDLoss``), public (``kd.losses.KDLoss``), or by the module that defines it.
        kind: a key of :data:`CLASSES`; "" finds none.
    """
    for one in classes():
        if one.kind == kind and name in one.names:
            return one
    return None


def kind_at(key: str) -> str:
    """The kind of class that a setting takes; empty where it takes none.

    >>> kind_at("students.small.model.distill_losses.kd"), kind_at("trainer.callbacks+"), kind_at("optim.kwargs")
    ('loss', 'callback', '')
    """
    name = re.sub(r"^students\.[^.]+\.", "", keys.plain(key))
    return next((kind for place, kind in PLACES.items() if re.fullmatch(place, name)), "")


def kind_of(annotation: object) -> str:
    """The kind of class that a type takes, by the base classes in it; empty where it takes none."""
    words = [word for name in names_in(annotation) for word in re.findall(r"\w+", name)]
    return next((BASES[word] for word in words if word in BASES), "")


def described() -> str:
    """The list as ``kd-train --list classes`` prints it: by kind, a line for each class with its arguments."""
    lines: list[str] = []
    for kind in CLASSES:
        lines += [f"{kind}\n"]
        lines += [
            f"  {one.name}({_shown(one.fields_from_elsewhere)})\n"
            for one in classes()
            if one.kind == kind
        ]
    return "".join(lines)


@cache
def _type(annotation: str) -> object:
    """The type that an annotation in text means (:func:`kd.run.annotations.type_of`)."""
    return type_of(ast.parse(annotation, mode="eval").body)


def _shown(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name}: {shown(kind)}" for name, kind in fields.items())


@cache
def _arguments(path: str) -> Mapping[str, keys.Key]:
    """The typed arguments of a listed class: as :data:`FIELDS` writes them, else as its source declares them."""
    if path not in FIELDS:
        return keys.arguments(path.rpartition(".")[2])
    function = ast.parse(f"def arguments({FIELDS[path]}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    of_a_run = OF_A_RUN.get(path, {})
    arguments: dict[str, keys.Key] = {}
    for argument in function.args.args:
        default = ""
        if argument.arg in of_a_run:
            default = repr(of_a_run[argument.arg])
        kind = type_of(argument.annotation)
        arguments[argument.arg] = keys.Key(argument.arg, kind, default, "")
    return arguments


@cache
def paths_of(path: str) -> set[str]:
    """The class paths that mean the same class as a public one: by its package, and by the module that defines it."""
    import kd

    module, _, name = path.rpartition(".")
    paths = {path}
    for home in _homes(module, name):
        paths.add(f"{home}.{name}")
    if kd.public(name) == module:
        paths.add(f"kd.{name}")
    return paths


def _homes(module: str, name: str) -> Iterator[str]:
    """The modules through which a package imports a name, as their source says."""
    top, *rest = module.split(".")
    found = find_spec(top)
    if found:
        root = Path(next(iter(found.submodule_search_locations or ())))
    else:
        root = Path(top)
    file = root.joinpath(*rest, "__init__.py")
    for node in ast.parse(file.read_text("utf-8")).body if file.is_file() else ():
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and name in {alias.name for alias in node.names}
        ):
            home = f"{module}.{node.module}" if node.level else node.module
            yield home
            yield from _homes(home, name)

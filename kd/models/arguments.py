"""Arguments of architectures: what a recipe or a file from elsewhere may say of a model that is built from it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from kd.errors import UserError
from kd.settings import LARGEST_SIDE

LOADS = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
"""Of ``timm.create_model``: they fetch or read weights, which a model's ``checkpoint`` and ``pretrained`` do."""
FETCHES = re.compile(
    r"_.*|auto_map|quantization_config|name_or_path|transformers_weights|(torch_)?dtype"
)
"""Names of a transformers configuration that fetch code or weights, or name a type, which is that of the weights."""
IMPLEMENTATIONS = ("eager", "sdpa")
"""Of attention, in transformers' own code."""
LARGEST = 65_536
"""The largest number that an architecture takes: a width, a number of heads or classes."""
MOST_LAYERS = 1000
"""Of a model that settings or a file describe: each is built before its weights are compared."""
LARGEST_WINDOW = 64
"""Pixels or tokens of an attention window's side; some models count its pairs of tokens, (side^2)^2, one by one."""
BOUNDS = (
    (re.compile(r"img_size|image_size|input_size"), LARGEST_SIDE, " pixels"),
    (re.compile(r".*depth\w{0,20}_(mult|coef).*"), 10, ""),
    (re.compile(r".*(depth|layers|blocks|stages|repeats).*"), MOST_LAYERS, ""),
    (re.compile(r".*window.*"), LARGEST_WINDOW, ""),
    (re.compile(r".*"), LARGEST, ""),
)
"""By the names of arguments, the first that matches: their largest number, and its unit. Layers are summed."""
FIRST_VALUES = frozenset(
    getattr(Tensor, name)
    for name in ("uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_")
)
"""Methods by which weights are drawn; of what has no values each gives back the same tensor."""
MOST_MODULES = 100_000
"""Of a model, each counted where another one takes it up."""


def check_arguments(
    arguments: Mapping[str, Any], key: str, tensors: Mapping[str, object] | None = None
) -> None:
    """Checks that arguments fetch no weights and describe a model that a machine can build, also those of models inside it
    (``vision_config``).

    Args:
        arguments: of ``timm.create_model``, or a configuration of transformers.
        key: what messages begin with: a configuration key with its last dot, or a file and a colon.
        tensors: the weights' tensors by name where the arguments are from their file. A model has no more layers than
            its file has tensors, and in any case at most :data:`MOST_LAYERS`.

    Raises:
        UserError: an argument that loads weights, or a number above its bound (:data:`BOUNDS`).
    """
    for name, value in arguments.items():
        if name in LOADS:
            raise UserError(
                f"{key}{name}: can't be an argument of the architecture; a file of weights is a checkpoint"
            )
        if isinstance(value, Mapping) and name.endswith("_config"):  # a model inside it
            check_arguments(value, f"{key}{name}.", tensors)
            continue
        numbers = [abs(number) for number in _numbers(value)]
        limit, unit = next((most, unit) for names, most, unit in BOUNDS if names.fullmatch(name))
        bounded = max(numbers, default=0)
        if limit == MOST_LAYERS:  # numbers of layers, which are summed
            bounded = sum(numbers)
            limit = MOST_LAYERS if tensors is None else min(len(tensors), MOST_LAYERS)
        if bounded > limit:
            raise UserError(f"{key}{name}: must be <= {limit}{unit}, got {str(value)[:80]}")


def check_memory(make: Callable[[], nn.Module], key: str, arguments: Mapping[str, Any]) -> None:
    """Checks that a model's weights fit this machine's memory, before it is built (:func:`on_meta`).

    Args:
        make: builds the model with random weights.
        key: what the message begins with.
        arguments: what the model is built with, for the message.

    Raises:
        UserError: weights and buffers are larger than all memory of the machine, free or not, or as of :func:`on_meta`.
    """
    model = on_meta(make, key)
    if model is None:
        return
    tensors = [*model.parameters(), *model.buffers()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    memory = psutil.virtual_memory().total
    if needed > memory:
        raise UserError(
            f"{key}: its weights take {needed / 2**30:.0f} GiB with {listed(arguments)}, "
            f"the machine has {memory / 2**30:.0f} GiB"
        )


def listed(arguments: Mapping[str, Any]) -> str:
    """Arguments of a model for a message, at most 200 characters: ``depth=6, num_heads=3``."""
    return ", ".join(f"{name}={value}" for name, value in arguments.items())[:200]


def on_meta(make: Callable[[], nn.Module], key: str) -> nn.Module | None:
    """A model on PyTorch's ``meta`` device, where tensors have shapes and no memory; random numbers are drawn from a copy
    of the generator.

    Args:
        make: builds the model.
        key: what the message begins with.

    Returns:
        The model; None where it can't be built there, for whatever reason: a caller that then builds it elsewhere gets the
        error.

    Raises:
        UserError: it has more modules than :data:`MOST_MODULES`.
    """
    modules = count()

    def counted(*_: object) -> None:
        """Called for each module that another one takes up."""
        if next(modules) >= MOST_MODULES:
            raise UserError(f"{key}: it has more than {MOST_MODULES} modules")

    hook = register_module_module_registration_hook(counted)
    with torch.random.fork_rng(devices=[]), without_values():
        try:
            return make()
        except UserError:
            raise
        except Exception:  # whatever an architecture raises
            return None
        finally:
            hook.remove()


@contextmanager
def without_values() -> Iterator[None]:
    """Models that are built inside are on PyTorch's ``meta`` device, and get no first values."""
    with torch.device("meta"), WithoutValues():
        yield


class WithoutValues(TorchFunctionMode):
    """Leaves out what gives tensors of the ``meta`` device their first values, most of the time that a model takes there."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Called for each function of torch."""
        if func in FIRST_VALUES and args and getattr(args[0], "is_meta", False):
            return args[0]
        return func(*args, **(kwargs or {}))


def architecture_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of transformers without what fetches code or weights, also of models inside it.

    Of the settings named ``..._implementation`` those stay that name torch's or transformers' own code
    (:data:`IMPLEMENTATIONS`): others are kernels of the hub. Names that begin with ``_`` never stay.
    """
    kept: dict[str, Any] = {}
    for name, value in config.items():
        is_kernel = name.endswith("_implementation") and value not in IMPLEMENTATIONS
        if is_kernel or FETCHES.fullmatch(name):
            continue
        kept[name] = architecture_alone(value) if isinstance(value, Mapping) else value
    return kept


def _numbers(value: object) -> Iterator[float]:
    """The numbers in nested lists and dicts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value

"""Arguments of architectures: what a recipe or a file from elsewhere may say of a model that is built from it."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import torch
from torch import nn

from kd.errors import UserError
from kd.settings import LARGEST_SIDE

LOADS = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
"""Of ``timm.create_model``: they fetch or read weights, which a model's ``checkpoint`` and ``pretrained`` do."""
FETCHES = re.compile(r"_.*|auto_map|quantization_config|name_or_path")
"""Names of a transformers configuration that fetch code or weights."""
IMPLEMENTATIONS = ("eager", "sdpa")
"""Of attention, in transformers' own code."""
LARGEST = 65_536
"""The largest whole number that an architecture takes: a width, a number of heads or classes."""
MOST_LAYERS = 1000
"""Of a model that settings or a file describe: each is built before its weights are compared."""
LARGEST_WINDOW = 64
"""Pixels or tokens of an attention window's side; some models count its pairs of tokens, (side^2)^2, one by one."""
WINDOWS = re.compile(r"window")
REPEATS = re.compile(r"depth|layers|blocks|stages|repeats")
"""Names of arguments that count layers; a file can't name more layers than it has tensors."""
SIDES = ("img_size", "image_size", "input_size")
"""Names of arguments that give sides of pictures in pixels, at any depth of a configuration."""


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
        UserError: an argument that loads weights, a side above :data:`kd.settings.LARGEST_SIDE`, a number above
            :data:`LARGEST`, too many layers, one by one or summed, or a window above :data:`LARGEST_WINDOW`.
    """
    for name in arguments:
        if name in LOADS:
            raise UserError(
                f"{key}{name}: can't be an argument of the architecture; a file of weights is a checkpoint"
            )
    check_sides(arguments, key)
    for name, value in arguments.items():
        if name.endswith("_config") and isinstance(value, Mapping):  # a model inside it
            check_arguments(value, f"{key}{name}.", tensors)
            continue
        sizes = [abs(number) for number in _whole_numbers(value)]
        counts_layers = REPEATS.search(name) is not None
        limit = LARGEST
        if counts_layers:
            limit = MOST_LAYERS if tensors is None else min(len(tensors), MOST_LAYERS)
        elif WINDOWS.search(name):
            limit = LARGEST_WINDOW
        too_many_layers = counts_layers and sum(sizes) > limit
        if max(sizes, default=0) > limit or too_many_layers:
            raise UserError(f"{key}{name}: must be <= {limit}, got {str(value)[:80]}")


def check_sides(arguments: Mapping[str, Any], key: str) -> None:
    """Checks the sides of pictures in a model's arguments, also those of models inside it (``vision_config``).

    Args:
        arguments: by name; :data:`SIDES` are compared.
        key: what messages begin with.

    Raises:
        UserError: a side above :data:`kd.settings.LARGEST_SIDE` pixels.
    """
    for name, value in arguments.items():
        if name in SIDES:
            largest = max(_whole_numbers(value), default=0)
            if largest > LARGEST_SIDE:
                raise UserError(
                    f"{key}{name}: must be <= {LARGEST_SIDE} pixels, got {str(value)[:80]}"
                )
        if isinstance(value, Mapping):
            check_sides(value, f"{key}{name}.")


def check_memory(make: Callable[[], nn.Module], key: str, arguments: Mapping[str, Any]) -> None:
    """Checks that a model's weights fit this machine's memory, before it is built.

    The model is built once on PyTorch's ``meta`` device, where tensors have shapes and no memory; random numbers are
    drawn from a copy of the generator. A model that can't be built there passes: building it reports why.

    Args:
        make: builds the model with random weights.
        key: what the message begins with.
        arguments: what the model is built with, for the message.

    Raises:
        UserError: weights and buffers are larger than all memory of the machine, free or not.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            model = make()
        except Exception:  # its message is the real building's
            return
    tensors = [*model.parameters(), *model.buffers()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    memory = psutil.virtual_memory().total
    if needed > memory:
        listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise UserError(
            f"{key}: its weights take {needed / 2**30:.0f} GiB with {listed[:200]}, "
            f"the machine has {memory / 2**30:.0f} GiB"
        )


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


def _whole_numbers(value: object) -> Iterator[int]:
    """The whole numbers in nested lists and dicts, and the repeats in text such as ``ir_r2_k3`` (2)."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        for digits in re.findall(r"(?<=_r)\d+", value):
            yield int(digits[:9])
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _whole_numbers(inner)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value

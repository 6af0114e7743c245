"""Arguments of architectures: what a recipe or a file from elsewhere may say of a model that is built from it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kd.errors import UserError

LOADS = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
"""Of ``timm.create_model``: they fetch or read weights, which a model's ``checkpoint`` and ``pretrained`` do."""
FETCHES = re.compile(r"_.*|auto_map|quantization_config|name_or_path")
LARGEST = 65_536
REPEATS = re.compile(r"depth|layers|blocks|stages|repeats")


def check_arguments(
    given: Mapping[str, Any], key: str, holds: Mapping[str, object] | None = None
) -> None:
    """Refuses arguments that fetch weights, or that no machine could build."""
    loads = next((name for name in given if name in LOADS), None)
    if loads:
        raise UserError(
            f"{key}{loads}: can't be an argument of the architecture; a file of weights is a checkpoint"
        )
    for name, value in given.items():
        most = len(holds) if holds is not None and REPEATS.search(name) else LARGEST
        sizes = [abs(number) for number in _whole_numbers(value)]
        if max(sizes, default=0) > most or (most < LARGEST and sum(sizes) > most):
            raise UserError(f"{key}{name}: must be <= {most}, got {str(value)[:80]}")


def architecture_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of transformers without what fetches code or weights: kernels of the hub go by ``owner/name``."""
    kernels = {
        name
        for name, value in config.items()
        if name.endswith("_implementation") and "/" in str(value)
    }
    return {
        name: value
        for name, value in config.items()
        if not FETCHES.fullmatch(name) and name not in kernels
    }


def _whole_numbers(value: object) -> Iterator[int]:
    """Those in nested lists and dicts, and in text such as ``ir_r2_k3``."""
    if isinstance(value, str):
        yield from (int(digits[:9]) for digits in re.findall(r"(?<=_r)\d+", value))
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _whole_numbers(inner)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value

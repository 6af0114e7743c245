"""Which of timm's models a file of weights holds, by the names and shapes of its tensors.

``timm_tensors.json`` has a digest of names and shapes for each architecture of timm's; ``scripts/timm_tensors.py`` writes
it. A model that it suggests is built on PyTorch's ``meta`` device, without memory, and compared with the file.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from kd.errors import UserError
from kd.models.arguments import check_arguments, on_meta
from kd.models.layouts import COUNTER, places

FILE = Path(__file__).with_name("timm_tensors.json")
"""Architectures by the :func:`tensors_digest` of their tensors; of several with one digest the usual one is first."""
HEADS = re.compile(
    r"(head|head_dist|aux_head|heads|heads_dist|classifier|classif|fc|last_linear)\."
)
"""Beginnings of the names of timm's classifiers, and of the layers beside them."""
POSITIONS = "pos_embed"
"""A ViT's tensor that depends on the size of its pictures."""
REGISTERS = "register_tokens"
"""The register tokens of a ViT, in the files of DINOv2's authors."""
NOT_COMPARED = (POSITIONS, "mask_token")
"""Tensors that files of one architecture have or lack, or have in another shape."""
LEAST = 12
"""Tensors of a model; places of a file with fewer are not compared."""
MOST_PLACES = 20
"""Parts of a file, each of as many tensors, of which one may be a model: its optimizer's states are others."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Recognised:
    """A model of timm's that has the tensors of a file."""

    arch: str
    """timm's name."""
    img_size: tuple[int, int] | None
    """Height and width of its input, by the positions that the file has; None: it has none."""
    others: tuple[str, ...] = ()
    """Further architectures whose tensors have these names and shapes."""


def tensors_digest(tensors: Tensors) -> str:
    """Ten hexadecimal digits for the names and shapes of a model's tensors.

    Its classifier, positions, mask token and counters of BatchNorm do not count: they differ between files of one
    architecture.
    """
    lines = []
    for name in _without_counters(tensors):
        if name in NOT_COMPARED or HEADS.match(name):
            continue
        shape = tuple(tensors[name].shape)
        lines.append(f"{name} {shape}\n")
    text = "".join(sorted(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def recognise(tensors: Tensors) -> Recognised | None:
    """The architecture of timm's whose tensors a file holds; None where it holds none, or two.

    Args:
        tensors: all of the file's, by dotted name, also on the ``meta`` device; the model's may be below a prefix.
    """
    digests = {tensors_digest(place): place for place in _places(tensors)}
    known = digests.keys() & archs_by_digest().keys()
    if len(known) != 1:
        return None
    of_model = known.pop()
    place = digests[of_model]
    positions = None
    if POSITIONS in place:
        positions = tuple(place[POSITIONS].shape)
    return _nearest(of_model, frozenset(_without_counters(place)), positions)


@cache
def _nearest(
    of_model: str, names: frozenset[str], positions: tuple[int, ...] | None
) -> Recognised | None:
    """The architecture of one digest that has a file's names and number of positions too, else the one that differs least;
    None where timm's release has none.

    Args:
        of_model: a digest of the table.
        names: of the file's tensors.
        positions: shape of its positions, ``(1, L, D)``; None: it has none.
    """
    archs = archs_by_digest()[of_model]
    fitting = []
    for arch in archs:
        model = meta_model(arch, {})
        own = {} if model is None else model.state_dict()
        if model is None or tensors_digest(own) != of_model:  # of another release
            continue
        differences = len(names ^ {*_without_counters(own)})
        if positions is not None:
            differences += abs(own[POSITIONS].shape[1] - positions[1])
        fitting.append((differences, arch, _size(model, positions)))
        if differences == 0:
            break
    if not fitting:
        return None
    _, nearest, size = min(fitting, key=lambda one: one[0])
    return Recognised(nearest, size, tuple(arch for arch in archs if arch != nearest))


def holds(tensors: Tensors, arch: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a file has the tensors of this architecture with these arguments.

    Args:
        tensors: as of :func:`recognise`.
        arch: timm's name; another one is in no file.
        kwargs: arguments of ``timm.create_model``.
    """
    model = meta_model(arch, kwargs)
    if model is None:
        return False
    wanted = tensors_digest(model.state_dict())
    return any(tensors_digest(place) == wanted for place in _places(tensors))


def meta_model(arch: str, kwargs: Mapping[str, Any]) -> nn.Module | None:
    """A model of timm's on the ``meta`` device; None for an unknown name, or arguments that it can't be built with.

    Args:
        arch: timm's name.
        kwargs: its arguments, which may come from a file: they are checked first.
    """
    if not timm.is_model(arch):
        return None
    try:
        check_arguments(kwargs, "")
        return on_meta(partial(timm.create_model, arch, **kwargs), arch)
    except UserError:
        return None


@cache
def archs_by_digest() -> dict[str, list[str]]:
    """The content of :data:`FILE`."""
    content: dict[str, list[str]] = json.loads(FILE.read_text("utf-8"))["digests"]
    return content


def _places(tensors: Tensors) -> Iterator[Tensors]:
    """The tensors of each part of a file that may be a model, on the ``meta`` device and under timm's names; the register
    tokens of DINOv2's authors too, which otherwise timm's filter renames.
    """
    on_no_device = {}
    for name, value in tensors.items():
        on_no_device[name] = torch.empty_like(value, device="meta")
    least = max(LEAST, len(tensors) / MOST_PLACES)
    for _, state, _ in places(on_no_device, least):
        if REGISTERS in state:
            state["reg_token"] = state.pop(REGISTERS)
        yield state


def _without_counters(names: Iterable[str]) -> Iterator[str]:
    """Names without those of BatchNorm's counters."""
    return (name for name in names if not name.endswith(COUNTER))


def _size(model: nn.Module, positions: tuple[int, ...] | None) -> tuple[int, int] | None:
    """Height and width of a model's input: square, of so many patches as there are positions; None where that is unknown.

    Args:
        model: of timm's.
        positions: their shape, ``(1, L, D)``, those of the class token and the like among them; None: there are none.
    """
    patches: Any = getattr(model, "patch_embed", None)
    if positions is None or len(positions) != 3 or not hasattr(patches, "grid_size"):
        return None
    grid = math.prod(patches.grid_size)
    of_others = model.get_parameter(POSITIONS).shape[1] - grid  # the class token's and the like
    # the authors' file has the class token's where timm's model has none
    for beside in (of_others, 1):
        in_file = max(positions[1] - beside, 0)
        side = math.isqrt(in_file)
        if side and side * side == in_file:
            height, width = patches.patch_size
            return side * height, side * width
    return None

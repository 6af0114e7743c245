"""Tensors of torch's files, whose sizes are what the file holds and not what it claims.

A tensor in such a file is a storage (bytes), a shape and strides. Strides of 0, sparse layouts and packed records let a
file of some kilobytes describe a tensor of terabytes, which the first copy would allocate.
"""

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kd.errors import UserError, first_line
from kd.storage.elsewhere import packed_record, regular

MOST_VALUES = 10_000_000
"""In a file, each as often as it is reached: lists of lists that are shared grow without end as they are restored."""
MOST_TIED = 16  # how often all storages of a file may be claimed: tied weights are listed once for each of their names


def read_tensors(file: str | Path, map_location: object = "cpu", mmap: bool = False) -> object:
    """Reads tensors and plain values from a file that ``torch.save`` has written; runs no code from it.

    Args:
        file: its path.
        map_location: as of ``torch.load``.
        mmap: leave the tensors on the disk until they are used; for zip archives alone, torch's format since 1.6.

    Raises:
        ValueError: packed records, or values that :func:`check_values` refuses.
        OSError: it can't be opened, is no regular file or has more than ``LARGEST_WEIGHTS`` bytes.
        Exception: whatever torch raises for a damaged file, or for one that pickles more than weights.
    """
    problem = packed_record(regular(Path(file)))
    if problem:
        raise ValueError(problem)
    content = torch.load(file, map_location, weights_only=True, mmap=mmap)  # type: ignore[arg-type]
    check_values(content)
    return content


def read_checkpoint(file: str | Path, map_location: object = "cpu") -> dict[str, Any]:
    """The mapping in a training checkpoint, with its weights below ``state_dict``; a ValueError where it has none.

    Arguments and other errors as of :func:`read_tensors`.
    """
    content = read_tensors(file, map_location)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), Mapping):
        raise ValueError("it has no state_dict")
    return content


def check_readable(checkpoint: Mapping[str, Any]) -> None:
    """Checks that what a checkpoint holds can be read back by :func:`read_tensors`. Parts that are not plain are written to
    memory and read for it.

    Args:
        checkpoint: as Lightning makes it, with each callback's state below ``callbacks``.

    Raises:
        UserError: a part can't be read back; names the callback, or the key, and a value's class.
    """
    of_callbacks = checkpoint.get("callbacks", {})
    parts = [
        (f"trainer.callbacks: the state of {name}", state) for name, state in of_callbacks.items()
    ]
    parts += [(f"checkpoint: its key '{k}'", v) for k, v in checkpoint.items() if k != "callbacks"]
    for name, part in parts:
        if _is_plain(part):
            continue
        file = BytesIO()
        try:
            torch.save(part, file)
            file.seek(0)
            check_values(torch.load(file, weights_only=True))
        except UNREADABLE as error:
            kinds = {type(leaf) for leaf in tree_leaves(part)} - PLAIN
            held = ", ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))
            raise UserError(
                f"{name} holds {held or first_line(error)}, which no resumed run can read from a checkpoint: "
                "keep tensors and Python's own numbers, texts, lists and dicts"
            ) from error


PLAIN = {Tensor, nn.Parameter, int, float, bool, str, bytes, complex, type(None)}
"""Classes of values that every checkpoint may hold."""
CONTAINERS = {dict, OrderedDict, list, tuple}
"""Classes of containers that every checkpoint may hold."""
UNREADABLE = (pickle.PickleError, AttributeError, ImportError, KeyError, TypeError, ValueError)
"""What pickle raises for a value that it can't write or read; a RuntimeError meanwhile tells of a loader that was killed."""


def _is_plain(value: object) -> bool:
    """Whether a value, and each below it, is of :data:`PLAIN` or :data:`CONTAINERS`: that is read back without a trial."""
    if isinstance(value, Tensor):
        return _is_whole(value) and type(value) in PLAIN
    if type(value) not in CONTAINERS:
        return type(value) in PLAIN
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value))  # type: ignore[call-overload]


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor has its values itself: it is not sparse, quantized or without data."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def check_values(content: object) -> None:
    """Checks what nested mappings, lists, tuples, sets and attributes of objects hold.

    Raises:
        ValueError: more than :data:`MOST_VALUES` values, they are nested too deeply, or a tensor needs more memory than the
            file holds of it. That is: one that is sparse, quantized, without data or of an unknown class; one that needs
            more bytes than its storage has (strides of 0); and all together where they need more than :data:`MOST_TIED`
            times the bytes of all storages.
    """
    tensors: list[Tensor] = []
    try:
        count = _walk(content, {}, tensors)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if count > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values")
    claimed = 0  # bytes
    storages: dict[int, int] = {}  # bytes by address
    for tensor in tensors:
        shape = tuple(tensor.shape)
        if not _is_whole(tensor):
            raise ValueError(
                f"a tensor of shape {shape} is {tensor.layout}, quantized or without data, not plain"
            )
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        if size > storage.nbytes():
            raise ValueError(
                f"a tensor of shape {shape} claims {size:,} bytes and holds {storage.nbytes():,}"
            )
        claimed += size
        storages[storage.data_ptr()] = storage.nbytes()
    if claimed > MOST_TIED * sum(storages.values()):
        raise ValueError(f"its tensors claim {claimed:,} bytes and hold {sum(storages.values()):,}")


def _walk(value: object, known: dict[int, int], tensors: list[Tensor]) -> int:
    """Counts the values at and below a value as :func:`check_values` does; a tensor's own attributes are not looked at.

    Args:
        value: any.
        known: how many values each container holds that was met before, by id; filled here.
        tensors: gets each tensor, one that two containers hold twice.

    Raises:
        ValueError: a tensor of another class than torch's own three (Tensor, Parameter, Buffer).
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            raise ValueError(f"it holds a {type(value).__name__}, not a plain tensor")
        tensors.append(value)
        return 1
    if id(value) not in known:
        inner: list[object] = []
        if isinstance(value, Mapping):
            inner = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            inner = [*value]
        inner += getattr(value, "__dict__", {}).values()
        if not inner:
            return 1
        known[id(value)] = 1  # of one that holds itself
        known[id(value)] = 1 + sum(_walk(one, known, tensors) for one in inner)
    return known[id(value)]

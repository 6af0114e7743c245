"""``data.augment.transform``: a transform of the user's own, or of another library, as a step of the training views."""

import hashlib
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision import tv_tensors

from kd.errors import UserError, plain
from kd.storage.elsewhere import bytes_of

KEY = "data.augment.transform"


class OwnTransform(nn.Module):
    """A view through the user's transform: uint8 ``(3, H, W)`` -> uint8 ``(3, H, W)``; a mask ``(1, H, W)`` likewise.

    All chance comes from torch's generator, which the caller seeds by picture and view (:func:`kd.data.transforms.seeded`):
    libraries with generators of their own are seeded with a number that is drawn from it.

    Args:
        transform: one of albumentations, which takes ``image=`` and ``mask=`` as NumPy arrays; one of
            ``torchvision.transforms.v2``, or any other callable that takes the picture, or the picture and its mask
            ``(1, H, W)``, as tensors, and returns as many.
        size: height and width of a view in pixels, which the transform must keep.

    Raises:
        UserError: it can't be called, or fails or gives another shape or type on a first picture (without a mask).
    """

    def __init__(self, transform: Any, size: tuple[int, int]) -> None:
        """Tries the transform on one picture, so that a mistake shows before training.

        Args:
            transform: takes and returns a picture, in its library's way.
            size: height and width of the views, in pixels.
        """
        super().__init__()
        self.transform = transform
        self.name = type(transform).__name__
        self.library = _library_of(transform)
        if not callable(transform):
            raise UserError(f"{KEY}: {self.name} can't be called with a picture")
        self._try(size)

    def forward(self, picture: Tensor, *masks: Tensor) -> Tensor | tuple[Tensor, ...]:
        """One view, uint8 ``(3, H, W)``, and its mask ``(1, H, W)`` where there is one, in the way of the transform's
        library.

        Runs in the loader, under torch's generator seeded by picture and view. The transform gets a copy of the picture: it
        may change it in place, and a crop of the whole picture is the picture that is kept for all epochs.
        """
        picture = picture.clone()
        if self.library == "albumentations":
            return self._with_arrays(picture, *masks)
        if self.library == "torchvision":
            return self.transform(picture, *masks)
        with _seeded_by_torch():
            return self.transform(picture, *masks)

    def _with_arrays(self, picture: Tensor, *masks: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Calls a transform of Albumentations, by keyword; its generators are seeded here.

        Args:
            picture: uint8 ``(3, H, W)``; the transform sees ``(H, W, 3)``.
            masks: at most one, uint8 ``(1, H, W)``; the transform sees ``(H, W)``.

        Returns:
            The view, and the mask where there is one, in the shapes of before.
        """
        self.transform.set_random_seed(_drawn())
        arrays = {"image": picture.permute(1, 2, 0).contiguous().numpy()}
        for mask in masks:
            arrays["mask"] = mask[0].numpy()
        changed = self.transform(**arrays)
        view = torch.from_numpy(np.ascontiguousarray(changed["image"])).permute(2, 0, 1)
        if not masks:
            return view
        mask = torch.from_numpy(np.ascontiguousarray(changed["mask"]))[None]
        return view, tv_tensors.Mask(mask)

    def _try(self, size: tuple[int, int]) -> None:
        """Runs the transform on a grey picture of ``size`` (height, width), once; torch's generator is restored.

        Raises:
            UserError: it fails, or gives something else than uint8 ``(3, *size)``.
        """
        grey = torch.full((3, *size), 128, dtype=torch.uint8)
        state = torch.default_generator.get_state()
        try:
            view = self(grey)
        except Exception as error:
            raise UserError(f"{KEY}: {self.name} failed on a picture: {plain(error)}") from error
        finally:
            torch.default_generator.set_state(state)
        is_tensor = isinstance(view, Tensor)
        if is_tensor and view.dtype == torch.uint8 and view.shape == grey.shape:
            return
        made = type(view).__name__
        if is_tensor:
            dtype = str(view.dtype).removeprefix("torch.")
            made = f"{dtype} {tuple(view.shape)}"
        wanted = f"uint8 {tuple(grey.shape)}: kd cuts before it and normalises after it"
        raise UserError(f"{KEY}: {self.name} gives {made}, it must give {wanted}")


def _library_of(transform: object) -> str:
    """``albumentations`` or ``torchvision`` where the class, or one that it inherits from, is of these; else ""."""
    for cls in type(transform).__mro__:
        library = cls.__module__.partition(".")[0]
        if library in ("albumentations", "torchvision"):
            return library
    return ""


def _drawn() -> int:
    """A seed of 31 bits from torch's generator."""
    return int(torch.randint(2**31, ()))


@contextmanager
def _seeded_by_torch() -> Iterator[None]:
    """Runs a block under generators of Python and NumPy that are seeded from torch's, and restores them."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the user's code may use it)
    random.seed(_drawn())
    np.random.seed(_drawn())  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def described(value: object, depth: int = 8, modules: set[str] | None = None) -> object:
    """What an object is made of, as values of JSON: two processes give the same for the same class and settings.

    A cache of a teacher's answers is found by it and by :func:`code_of` (``data.augment.transform``); a resumed run
    compares it with its checkpoint's (``data.sampler``). What lies deeper than ``depth`` levels, and what has no
    attributes, is the text that Python shows. That may name an address: then no cache of an earlier run is found, and
    never one of other views.

    Args:
        value: a transform or a sampler: its class path, and its attributes (Albumentations: its ``to_dict``). Of a
            function also its line, its defaults and the values that it carries; what it does is in its file
            (:func:`code_of`).
        depth: how many levels of values in values are described.
        modules: gets the names of the modules that define the classes and functions on the way.
    """
    inner = partial(described, depth=depth - 1, modules=modules)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(
        value, Tensor | np.ndarray | np.generic
    ):  # whose text leaves out most of many values
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): inner(part) for name, part in value.items()}
    if isinstance(value, Set):  # its order differs between processes
        return sorted(map(inner, value), key=repr)
    if isinstance(value, Sequence):
        return [*map(inner, value)]
    kind = value if isinstance(value, type | FunctionType) else type(value)
    path = f"{kind.__module__}.{kind.__qualname__}"
    if modules is not None:
        modules.add(kind.__module__)
    if isinstance(value, type):
        return path
    parts = _parts(value)
    if parts is None or depth <= 0:
        return repr(value)
    return {path: inner(parts)}


def _parts(value: object) -> object:
    """What a function or an object holds, to be described in turn; None where it has no attributes."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        carried = [cell.cell_contents for cell in value.__closure__ or ()]
        line = value.__code__.co_firstlineno  # tells functions without a name apart
        return [line, value.__defaults__, value.__kwdefaults__, carried]
    if _library_of(value) == "albumentations" and hasattr(value, "to_dict"):
        return value.to_dict()
    return getattr(value, "__dict__", None)


def code_of(value: object) -> str:
    """A hash of the files with the user's own code that an object is made of: 16 digits, the same in each process.

    The files are those of the modules that define what :func:`described` meets, and of the user's modules that these
    import. Installed packages, kd's code and Python's own are left out. Code without a file (a notebook's) has another
    hash in each session.

    Args:
        value: a transform.
    """
    modules: set[str] = set()
    described(value, modules=modules)
    waiting = list(modules)
    digests: dict[str, str] = {}  # by module
    while waiting:
        name = waiting.pop()
        if name in digests or not _is_own(name):
            continue
        file = getattr(sys.modules[name], "__file__", None)
        content = bytes_of(file) if file else SESSION
        digests[name] = hashlib.sha256(content).hexdigest()
        for inner in vars(sys.modules[name]).values():
            is_module = isinstance(inner, ModuleType)
            waiting.append(str(inner.__name__ if is_module else getattr(inner, "__module__", "")))
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


SESSION = os.urandom(16)
"""Stands for code that has no file."""


def _is_own(module: str) -> bool:
    """Whether an imported module, by its full name, is the user's: not Python's, kd's, or an installed package's."""
    package, _, _ = module.partition(".")
    if module not in sys.modules:
        return False
    if package == "kd" or package in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules[module], "__file__", None)
    folders = Path(file or "").parts
    is_installed = "site-packages" in folders or "dist-packages" in folders
    return not is_installed

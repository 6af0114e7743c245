"""``data.augment.transform``: a transform of the user's own, or of another library, as a step of the training views."""

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision import tv_tensors

from kd.errors import UserError, plain

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

        Runs in the loader, under torch's generator seeded by picture and view.
        """
        if self.library == "albumentations":
            return self._with_arrays(picture, *masks)
        if self.library == "torchvision":
            return self.transform(picture, *masks)
        with _seeded_by_torch():
            return self.transform(picture, *masks)

    def _with_arrays(self, picture: Tensor, *masks: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Calls a transform of Albumentations, by keyword; its generators are seeded here.

        Versions before ``set_random_seed`` draw from the generators of Python and NumPy.

        Args:
            picture: uint8 ``(3, H, W)``; the transform sees ``(H, W, 3)``.
            masks: at most one, uint8 ``(1, H, W)``; the transform sees ``(H, W)``.

        Returns:
            The view, and the mask where there is one, in the shapes of before.
        """
        chance: AbstractContextManager[None]
        if hasattr(self.transform, "set_random_seed"):
            self.transform.set_random_seed(_drawn())
            chance = nullcontext()
        else:
            chance = _seeded_by_torch()
        arrays = {"image": picture.permute(1, 2, 0).contiguous().numpy()}
        for mask in masks:
            arrays["mask"] = mask[0].numpy()
        with chance:
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


def described(value: object, depth: int = 8) -> object:
    """What an object is made of, as values of JSON: two processes give the same for the same class and settings.

    A cache of a teacher's answers is found by it (``data.augment.transform``), and a run resumed (``data.sampler``).

    Args:
        value: a transform or a sampler: its class path, and its attributes or what it says itself (``to_dict``). Of a
            function also its code, and the values that it carries; other code is :func:`code_of`'s.
        depth: how many levels of values in values are described; objects below them, and what has no attributes, are
            the text that Python shows. That may name an address: then no cache of an earlier run is found, and never one
            of other views.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, np.ndarray | np.generic):  # whose text leaves out most of many values
        return described(value.tolist(), depth - 1)
    if isinstance(value, Mapping):
        return {str(name): described(inner, depth - 1) for name, inner in value.items()}
    if isinstance(value, Sequence):
        return [described(inner, depth - 1) for inner in value]
    if isinstance(value, Set):  # its order differs between processes
        return sorted((described(inner, depth - 1) for inner in value), key=repr)
    if isinstance(value, type):
        return _path_of(value)
    path = _path_of(type(value))
    if depth > 0 and isinstance(value, FunctionType | MethodType | partial):
        return {path: [described(part, depth - 1) for part in _parts_of(value)]}
    if _library_of(value) == "albumentations" and hasattr(value, "to_dict"):
        return {path: described(value.to_dict(), depth - 1)}
    if depth > 0 and hasattr(value, "__dict__"):
        return {path: described(vars(value), depth - 1)}
    return repr(value)


def _path_of(named: type | FunctionType) -> str:
    """Module and name of a class or function; several functions may share it (``<lambda>``)."""
    return f"{named.__module__}.{named.__qualname__}"


def _parts_of(function: FunctionType | MethodType | partial[Any]) -> list[object]:
    """What tells two functions apart, to be described in turn; a function's attributes are left out.

    Of a partial the function and its arguments; of a method the function and its object; of a function its path, the hash
    of its code, its defaults and the values that it carries.
    """
    if isinstance(function, partial):
        return [function.func, function.args, function.keywords]
    if isinstance(function, MethodType):
        return [function.__func__, function.__self__]
    carried = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = [function.__defaults__, function.__kwdefaults__]
    return [_path_of(function), _digest_of(function.__code__), defaults, carried]


def _digest_of(code: CodeType) -> str:
    """A hash of a function's bytecode with the names and constants that it uses, functions within it too: 16 digits.

    What a global name stands for is not looked at: :func:`code_of` follows those. Another version of Python gives
    another hash, as does any change here: then earlier caches are not found.
    """
    constants = []
    for constant in code.co_consts:
        is_code = isinstance(constant, CodeType)
        constants.append(_digest_of(constant) if is_code else described(constant))
    text = repr((code.co_code, code.co_names, constants))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


DATA = bool | int | float | str | Tensor | np.ndarray | Mapping | Sequence | Set
"""What a global name may stand for that a description tells apart."""


def code_of(value: object) -> str:
    """A hash of the user's own code that an object runs: 16 digits, the same in each process.

    Of the object's class, of what its attributes hold, and of all functions and classes that their code reaches by a
    global name, it hashes the bytecode; of global numbers, texts, tables and collections, what they hold. Installed
    packages, kd's code and Python's own are left out, and so is what is found at run time alone (``getattr``, an entry of
    a table of functions, a method of an argument).

    Args:
        value: a transform.
    """
    seen: dict[int, object] = {}  # by id; kept, as an id is given anew once its object is gone
    hashed: list[object] = []
    waiting: list[object] = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        waiting.extend(_held_by(one))
        for function in _own_functions(one):
            hashed.append([_path_of(function), _digest_of(function.__code__)])
            for name, target in _globals_of(function):
                if isinstance(target, FunctionType | type):
                    waiting.append(target)
                elif isinstance(target, DATA):
                    hashed.append([name, described(target)])
    text = repr(sorted(hashed, key=repr))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _held_by(value: object) -> list[object]:
    """The objects within another one: its entries or attributes, and what a function carries; none of a module, a class, a
    text or an array.
    """
    if isinstance(value, str | bytes | Tensor | np.ndarray | type | ModuleType):
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, Sequence | Set):
        return list(value)
    if isinstance(value, FunctionType | MethodType | partial):
        return _parts_of(value)
    return list(getattr(value, "__dict__", {}).values())


def _own_functions(value: object) -> list[FunctionType]:
    """A function itself, or the methods of an object's (or a class's) classes, bases too; those of the user's code alone."""
    if isinstance(value, FunctionType):
        return [value] if _is_own(value.__module__) else []
    cls = value if isinstance(value, type) else type(value)
    members: list[object] = []
    for base in cls.__mro__:
        if _is_own(base.__module__):
            members.extend(vars(base).values())
    functions: list[FunctionType] = []
    for member in members:
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        parts = [member]
        if isinstance(member, property):
            parts = [member.fget, member.fset]
        functions.extend(part for part in parts if isinstance(part, FunctionType))
    return functions


def _is_own(module: str) -> bool:
    """Whether a module, by its full name, is the user's: neither Python's, nor kd's, nor of an installed package."""
    package, _, _ = module.partition(".")
    if package in sys.stdlib_module_names or package == "kd":
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _globals_of(function: FunctionType) -> list[tuple[str, object]]:
    """What the names in a function's code stand for in its module, and in the user's modules that are named there.

    Returns:
        Name and object; what two modules call alike is there twice, as which of them is meant is not looked at.
    """
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))

    named: list[tuple[str, object]] = []
    seen: set[str] = set()  # names of modules
    waiting = [function.__globals__]
    while waiting:
        place = waiting.pop()
        for name in sorted(names & place.keys()):
            target = place[name]
            if not isinstance(target, ModuleType):
                named.append((name, target))
            elif _is_own(target.__name__) and target.__name__ not in seen:
                seen.add(target.__name__)
                waiting.append(vars(target))
    return named

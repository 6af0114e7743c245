"""Feature taps: what some layers of a model gave during a forward, in a form that losses can compare."""

import difflib
import math
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kd.errors import UserError
from kd.models.preprocess import Prepare, Size, evaluating

PRELOGITS = "prelogits"  # the name of the classifier's input, which in most models is not a module
MAPS = "maps"  # the name of whichever layer gives a model's last map, before its classifier
MAPS_AT = re.compile(
    r"maps@([1-9]\d*)/([1-9]\d*)"
)  # the map after such a share of the blocks or stages
TRIAL = 2  # pictures of the forward that finds the layers' shapes
KEY = "model.taps"  # the setting that names layers, where no other is given


def layer_paths(
    model: nn.Module, patterns: Sequence[str], key: str, besides: Sequence[str] = ()
) -> list[str]:
    """The layers that patterns match, in the model's order; ``besides`` are names that count as layers too.

    Args:
        model: the model.
        patterns: module paths or shell-style patterns, see :class:`TapSpec`.
        key: the configuration key, named in errors.
        besides: names that count as layers too.

    Raises:
        UserError: a pattern that matches nothing.
    """
    names = [*(path for path, _ in model.named_modules() if path), *besides]
    found: list[str] = []
    for pattern in patterns:
        matches = [
            name
            for name in names
            if (name == pattern if name in besides else _matches(name, pattern))
        ]
        if not matches:
            outer = [*(name for name, _ in model.named_children()), *besides]
            near = difflib.get_close_matches(pattern.replace("*", "0"), names, 3, 0.5)
            there = f"near: {', '.join(near)}" if near else f"it has {', '.join(outer[-12:])}"
            raise UserError(f"{key}: {_title(model)} has no layer '{pattern}'; {there}")
        found += [m for m in matches if m not in found]
    return found


def _title(model: nn.Module) -> str:
    own = getattr(model, "model", model)
    return (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or type(own).__name__


class Taps:
    """Catches the outputs of some layers during a forward: ``with taps as caught: model(x)``.

    :meth:`read` brings them into one form: maps ``(N, C, H, W)``, whatever the model's layout, and patch tokens as a
    map; class tokens and pooled features as vectors ``(N, D)``. Each block fills a dict of its own. Nothing is caught
    outside a block, in particular not in the second forward of gradient checkpointing.
    """

    def __init__(
        self, model: nn.Module, patterns: Sequence[str | list[str]], size: Size | Prepare
    ) -> None:
        self._model, self._input_size = model, size
        self._layers = dict(model.named_modules())
        self._caught: dict[str, Tensor] | None = None
        self._hooked: set[str] = set()
        self._found: dict[tuple[str, ...], list[str]] = {}
        self._keys: dict[str, str] = {}
        for pattern in patterns:
            self.add(pattern)

    @property
    def _size(self) -> Size:
        return self._input_size if isinstance(self._input_size, tuple) else self._input_size.size

    def add(
        self, patterns: str | list[str], run: Callable[[], Any] | None = None, key: str = KEY
    ) -> None:
        """Adds layers to read; ``run`` runs one small forward, by which ``maps`` is found."""
        for path in self.paths(patterns, run, key):
            self._keys.setdefault(path, key)
            if path in self._hooked:
                continue
            self._hooked.add(path)
            if path == PRELOGITS:
                classifier_of(self._model, key).register_forward_pre_hook(self._catch_input)
            else:
                self._layers[path].register_forward_hook(partial(self._catch, path))

    def paths(
        self, patterns: str | list[str], run: Callable[[], Any] | None = None, key: str = KEY
    ) -> list[str]:
        """The layers that patterns name, in the model's order.

        Args:
            patterns: paths with wildcards, or names of kinds of layers.
            run: runs the model once, where a kind of layer is found by its output; default: as the taps were made with.
            key: named in errors.

        Raises:
            UserError: a pattern that no layer matches.
        """
        wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        if wanted not in self._found:  # once, not in every step: it walks the whole model
            named = [self._map_at(pattern, key) for pattern in wanted]
            found = layer_paths(self._model, named, key, besides=[MAPS, PRELOGITS])
            if MAPS in found:
                found[found.index(MAPS)] = self._last_map(run or self._run, key)
            self._found[wanted] = list(dict.fromkeys(found))
        return self._found[wanted]

    def _map_at(self, pattern: str, key: str) -> str:
        """The layer that ``maps@1/3`` means in timm's list of features; a ViT's map as its next block normalises it."""
        if not (share := MAPS_AT.fullmatch(pattern)):
            return pattern
        names = [feature["module"] for feature in getattr(self._model, "feature_info", ())]
        place = max(1, math.ceil(len(names) * int(share[1]) / int(share[2])))
        if place > len(names):
            raise UserError(
                f"{key}: '{pattern}' is beyond timm's {len(names)} features of {_title(self._model)}"
            )
        normed = f"blocks.{place}.norm1"
        return (
            normed
            if names[place - 1] == f"blocks.{place - 1}" and normed in self._layers
            else names[place - 1]
        )

    def _run(self) -> None:
        self._model(next(self._model.parameters()).new_zeros(TRIAL, 3, *self._size))

    @torch.no_grad()
    def _last_map(self, run: Callable[[], Any], key: str) -> str:
        """The outermost layer that gives what timm calls a model's features, or else the last map of all."""
        given: list[tuple[str, Tensor]] = []
        features: list[Tensor] = []
        own: Any = getattr(self._model, "forward_features", None)

        def note(path: str, output: object) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and self._is_map(first):
                given.append((path, first))

        def watched(*args: object, **kwargs: object) -> object:
            output = own(*args, **kwargs)
            features.extend(x for _, x in given[-1:])
            features.extend(x for _, x in given if x is output)
            return output

        hooks = [
            m.register_forward_hook(lambda _m, _i, out, path=path: note(path, out))
            for path, m in self._layers.items()
            if path
        ]
        try:
            if own is not None:
                self._model.forward_features = watched  # type: ignore[assignment]
            with evaluating(self._model):
                run()
        finally:
            vars(self._model).pop("forward_features", None)
            for hook in hooks:
                hook.remove()
        spread = [x for _, x in given if x.ndim == 3 or x.shape[2] * x.shape[3] > 1]
        if not given or not (features or spread):
            raise UserError(
                f"{key}: {_title(self._model)} has no map before its classifier: name a layer"
            )
        last = (features or spread)[-1]
        return min(
            reversed([path for path, x in given if x is last]), key=lambda path: path.count(".")
        )

    def _is_map(self, x: Tensor) -> bool:
        if x.ndim == 4:
            return min(self._turned(x)) < 0.7
        count = (
            x.shape[1] - int(getattr(self._model, "num_prefix_tokens", 0) or 0)
            if x.ndim == 3
            else 0
        )
        return count > 1 and x.shape[2] > 1 and math.prod(self._grid(count)) == count

    def __enter__(self) -> dict[str, Tensor]:
        self._caught = {}
        return self._caught

    def __exit__(self, *_: object) -> None:
        self._caught = None

    def _catch(
        self, path: str, _module: nn.Module, _inputs: object, output: Tensor | Sequence[Tensor]
    ) -> None:
        if self._caught is not None:
            self._caught[path] = output[0] if isinstance(output, Sequence) else output

    def _catch_input(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._caught is not None:
            self._caught[PRELOGITS] = inputs[0]

    def read(
        self, caught: dict[str, Tensor], patterns: str | list[str], tokens: str
    ) -> list[Tensor]:
        """What the layers gave in the forward that filled ``caught``, in the form that ``tokens`` asks for."""
        paths = self.paths(patterns)
        for path in paths:
            if path not in caught:
                key = self._keys.get(path, KEY)
                raise UserError(
                    f"{key}: layer '{path}' of {_title(self._model)} gives nothing in a forward"
                )
        return [self._form(caught[path], tokens, path) for path in paths]

    def _form(self, x: Tensor, tokens: str, path: str) -> Tensor:
        if x.ndim == 4:
            return x.permute(0, 3, 1, 2) if self._is_channels_last(x) else x
        if x.ndim != 3 or tokens == "all":
            return x
        prefix = int(getattr(self._model, "num_prefix_tokens", 0) or 0)
        if tokens == "class":
            if not prefix:
                key = self._keys.get(path, KEY)
                raise UserError(
                    f"{key}: layer '{path}' of {_title(self._model)} has no class token (tokens=patch)"
                )
            return x[:, 0]
        for skipped in (prefix, 0):  # blocks may not have the class token, which joins later (CaiT)
            height, width = self._grid(x.shape[1] - skipped)
            if height * width == x.shape[1] - skipped:
                return x[:, skipped:].transpose(1, 2).unflatten(2, (height, width))
        return x

    def _grid(self, count: int) -> Size:
        height = round(math.sqrt(count * self._size[0] / self._size[1]))
        return height, count // max(height, 1)

    def _turned(self, x: Tensor) -> tuple[float, float]:
        """How far the sides are from the picture's where channels come first, and where they come last."""
        wanted = math.log(self._size[0] / self._size[1])
        return abs(math.log(x.shape[2] / x.shape[3]) - wanted), abs(
            math.log(x.shape[1] / x.shape[2]) - wanted
        )

    def _is_channels_last(self, x: Tensor) -> bool:
        """By the picture's shape; where that leaves it open, by what timm says of the model."""
        first, last = self._turned(x)
        return (
            getattr(self._model, "output_fmt", "NCHW") == "NHWC"
            if abs(first - last) < 0.05
            else last < first
        )


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        fnmatchcase(a, b) for a, b in zip(parts, wanted, strict=True)
    )


def classifier_of(model: nn.Module, key: str) -> nn.Module:
    """The last layer of a model: timm's ``get_classifier()``, or a module named ``head``, ``fc`` or ``classifier``.

    Raises:
        UserError: none of these is there.
    """
    get = getattr(model, "get_classifier", None)
    named = (getattr(model, name, None) for name in ("head", "fc", "classifier"))
    found = get() if get is not None else next((m for m in named if isinstance(m, nn.Module)), None)
    if found is None:
        raise UserError(
            f"{key}: {type(model).__name__} has no get_classifier() and no head, fc or classifier, so "
            "'prelogits' is unknown: name a layer"
        )
    return found[0] if isinstance(found, (tuple, list, nn.ModuleList)) else found


@torch.no_grad()
def tap_shapes(
    model: nn.Module, taps: Taps, patterns: str | list[str], tokens: str, run: Callable[[], Any]
) -> list[tuple[int, ...]]:
    """The shapes that layers give, by a forward in eval mode; the model keeps its mode.

    Args:
        model: the tapped model; left in the mode it was in.
        taps: its taps.
        patterns: the layers.
        tokens: see :class:`TapSpec`.
        run: runs one small forward.
    """
    with evaluating(model), taps as caught:
        run()
    return [tuple(x.shape) for x in taps.read(caught, patterns, tokens)]

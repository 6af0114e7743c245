"""Feature taps: what some layers of a model gave during a forward, in a form that losses can compare."""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kd.errors import UserError

PRELOGITS = "prelogits"
"""The name of the classifier's input, which is no module of its own in most models."""

TRIAL = 2
"""Pictures of the forward that finds the layers' shapes."""

Size = tuple[int, int]


@dataclass
class TapSpec:
    """Which layers of each model a feature loss looks at.

    Module paths (``blocks.11``, ``norm``, ``layer3``) or shell-style patterns, in which ``*`` does not cross a dot
    (``blocks.*``, ``stages.[23]``), or ``prelogits``, the classifier's input.

    Attributes:
        student: paths below the student.
        teacher: paths below the teacher.
        tokens: of a transformer's tokens: the patch tokens as a map (``patch``), the class token as a vector
            (``class``), or all as they are (``all``).
    """

    student: str | list[str]
    teacher: str | list[str]
    tokens: Literal["patch", "class", "all"] = "patch"


def layer_paths(model: nn.Module, patterns: Sequence[str], key: str, besides: Sequence[str] = ()) -> list[str]:
    """The layers of a model that patterns name, in the model's order.

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
        matches = [name for name in names if (name == pattern if name in besides else _matches(name, pattern))]
        if not matches:
            near = difflib.get_close_matches(pattern.replace("*", "0"), names, 3, 0.5)
            raise UserError(f"{key}: no layer '{pattern}'{'; near: ' + ', '.join(near) if near else ''}")
        found += [m for m in matches if m not in found]
    return found


class Taps:
    """Catches the outputs of some layers during a forward inside ``with taps:``.

    Outputs are brought into one form: maps ``(N, C, H, W)``, whatever the model's layout, and patch tokens as a map;
    class tokens and pooled features as vectors ``(N, D)``. Nothing is caught outside the block, in particular not in
    the second forward that gradient checkpointing runs during backward.

    Args:
        model: the model.
        patterns: module paths or shell-style patterns below it.
        size: height and width of the model's input in pixels.
        key: the configuration key, named in errors.

    Raises:
        UserError: a pattern that matches nothing.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str | list[str]], size: Size, key: str) -> None:
        self._model, self._size, self._key = model, size, key
        self._layers = dict(model.named_modules())
        self._caught: dict[str, Tensor] = {}
        self._given: dict[tuple[str, str], Tensor] = {}
        self._open = False
        for path in dict.fromkeys(path for pattern in patterns for path in self.paths(pattern)):
            if path == PRELOGITS:
                _classifier(model).register_forward_pre_hook(self._catch_input)
            else:
                self._layers[path].register_forward_hook(self._catch(path))

    def paths(self, patterns: str | list[str]) -> list[str]:
        """The layers that patterns name, in the model's order."""
        return layer_paths(
            self._model, [patterns] if isinstance(patterns, str) else patterns, self._key, besides=[PRELOGITS]
        )

    def __enter__(self) -> "Taps":
        self._open, self._given = True, {}  # a forward takes the place of what was given
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False

    def _catch(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._open:
                self._caught[path] = output[0] if isinstance(output, (tuple, list)) else output

        return hook

    def _catch_input(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._open:
            self._caught[PRELOGITS] = inputs[0]

    def read(self, patterns: str | list[str], tokens: str) -> list[Tensor]:
        """What the layers gave in the last forward, in the form that ``tokens`` asks for."""
        return [
            self._given[path, tokens] if (path, tokens) in self._given else self._form(self._caught[path], tokens, path)
            for path in self.paths(patterns)
        ]

    def put(self, features: Mapping[tuple[str, str], Tensor]) -> None:
        """Takes features by (layer, tokens), as :meth:`read` will give them: in place of a forward."""
        self._caught, self._given = {}, dict(features)

    def clear(self) -> None:
        """Lets go of everything: no tensor, and no graph behind it, outlives the step."""
        self._caught, self._given = {}, {}

    def _form(self, x: Tensor, tokens: str, path: str) -> Tensor:
        if x.ndim == 4:
            return x.permute(0, 3, 1, 2) if self._is_channels_last(x) else x
        if x.ndim != 3 or tokens == "all":
            return x
        prefix = int(getattr(self._model, "num_prefix_tokens", 0) or 0)
        if tokens == "class":
            if not prefix:
                raise UserError(f"{self._key}: layer '{path}' has no class token (tokens=patch)")
            return x[:, 0]
        height, width = self._grid(x.shape[1] - prefix)
        if height * width != x.shape[1] - prefix:
            return x
        return x[:, prefix:].transpose(1, 2).unflatten(2, (height, width))

    def _grid(self, count: int) -> Size:
        height = round(math.sqrt(count * self._size[0] / self._size[1]))
        return height, count // max(height, 1)

    def _is_channels_last(self, x: Tensor) -> bool:
        """By the picture's shape; where that leaves it open, by what timm says of the model."""
        wanted = math.log(self._size[0] / self._size[1])
        first = abs(math.log(x.shape[2] / x.shape[3]) - wanted)
        last = abs(math.log(x.shape[1] / x.shape[2]) - wanted)
        if abs(first - last) < 0.05:
            return getattr(self._model, "output_fmt", "NCHW") == "NHWC"
        return last < first


@dataclass
class Features:
    """What losses look at of one model.

    Attributes:
        taps: of the model.
        shapes: (layer, tokens) -> the shape that it gives for :data:`TRIAL` pictures.
    """

    taps: Taps
    shapes: dict[tuple[str, str], tuple[int, ...]]

    def read(self) -> dict[tuple[str, str], Tensor]:
        """What each gave in the last forward."""
        return {(layer, tokens): self.taps.read(layer, tokens)[0] for layer, tokens in self.shapes}


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(a, b) for a, b in zip(parts, wanted, strict=True))


def _classifier(model: nn.Module) -> nn.Module:
    found = model.get_classifier()  # type: ignore[operator]  # every timm model has it
    return found[0] if isinstance(found, (tuple, list, nn.ModuleList)) else found


@torch.no_grad()
def tap_shapes(
    model: nn.Module, taps: Taps, patterns: str | list[str], tokens: str, run: Callable[[], Any]
) -> list[tuple[int, ...]]:
    """The shapes that layers give, by a forward in eval mode.

    Args:
        model: the tapped model; left in the mode it was in.
        taps: its taps.
        patterns: the layers.
        tokens: see :class:`TapSpec`.
        run: runs one small forward.
    """
    training = model.training
    model.eval()
    with taps:
        run()
    model.train(training)
    shapes = [tuple(x.shape) for x in taps.read(patterns, tokens)]
    taps.clear()
    return shapes

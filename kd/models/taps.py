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
# The map after such a share of the blocks or stages.
MAPS_AT = re.compile(r"maps@([1-9]\d*)/([1-9]\d*)")
# The last map of a CNN with one position for so many pixels a side, as detectors name their levels.
MAPS_OF_STRIDE = re.compile(r"maps@stride([1-9]\d*)")
TRIAL = 2  # number of pictures of the forward that finds the layers' shapes
KEY = "model.taps"  # the setting that names layers, where no other is given


def layer_paths(
    model: nn.Module, patterns: Sequence[str], key: str, besides: Sequence[str] = ()
) -> list[str]:
    """The paths of the layers that patterns match, each once: pattern by pattern, those of one in the model's order.

    Args:
        model: the model.
        patterns: module paths or shell-style patterns, in which ``*`` does not cross a dot; names as ``maps@1/3``
            (:class:`TapSpec`) are put into ``besides`` or resolved before.
        key: the configuration key, named in errors.
        besides: names that count as layers too, where a pattern is just that name.

    Raises:
        UserError: a pattern that matches nothing.
    """
    names = [path for path, _ in model.named_modules() if path]
    paths: list[str] = []
    for pattern in patterns:
        matches = [name for name in names if _matches(name, pattern)]
        if pattern in besides:
            matches = [pattern]
        if not matches:
            near = difflib.get_close_matches(pattern.replace("*", "0"), [*names, *besides], 3, 0)
            raise UserError(
                f"{key}: {name_of(model)} has no layer '{pattern}'; near: {', '.join(near)}"
            )
        paths += matches
    return list(dict.fromkeys(paths))


def name_of(model: nn.Module) -> str:
    """A model's name, for messages and reports: timm's architecture, else the class of the module."""
    inner = getattr(model, "model", model)
    config = getattr(model, "pretrained_cfg", None) or {}
    return config.get("architecture") or type(inner).__name__


class Taps:
    """Catches the outputs of some layers during a forward: ``with taps as caught: model(x)``.

    :meth:`read` brings them into one form: maps ``(N, C, H, W)``, whatever the model's layout, and patch tokens as a
    map; class tokens and pooled features as vectors ``(N, D)``. Each ``with`` fills a dict of its own. Nothing is caught
    outside of one, in particular not in the second forward of gradient checkpointing.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Sequence[str | list[str]],
        size: Size | Prepare,
        run: Callable[[], Any] | None = None,
    ) -> None:
        """Finds the layers that are caught.

        Args:
            model: whose layers they are; they get forward hooks that stay, and that do nothing outside of a ``with``.
            patterns: layers, or lists of them, as of :class:`kd.settings.TapSpec`; more may follow by :meth:`add`.
            size: height and width of the model's input in pixels, or what prepares it.
            run: runs the model on :data:`TRIAL` pictures, which show maps and shapes; None: on pictures of zeros.
        """
        self._model = model
        self._run = run or self._run_zeros
        self._input_size = size
        self._layers = dict(model.named_modules())
        self._features: list[dict[str, Any]] = list(getattr(model, "feature_info", ()))  # timm's
        # class and register tokens before the patches' tokens
        self._prefix_tokens = int(getattr(model, "num_prefix_tokens", 0) or 0)
        self._caught: dict[str, Tensor] | None = None
        self._hooked: set[str] = set()
        self._paths: dict[tuple[str, ...], list[str]] = {}  # of layers, by patterns
        for pattern in patterns:
            self.add(pattern)

    @property
    def _size(self) -> Size:
        """Height and width of the model's input in pixels; what prepares it may change them."""
        if isinstance(self._input_size, tuple):
            return self._input_size
        return self._input_size.size

    def paths_and_shapes(
        self, patterns: str | list[str], tokens: str, key: str = KEY
    ) -> tuple[list[str], list[tuple[int, ...]]]:
        """Adds layers; gives their paths, and the shapes that they give for :data:`TRIAL` pictures.

        Args:
            patterns: as of :meth:`add`.
            tokens: as of :meth:`read`.
            key: the setting that names the layers, for messages.

        Raises:
            UserError: as of :meth:`add` and :meth:`read`.
        """
        self.add(patterns, key)
        with torch.no_grad(), evaluating(self._model), self as caught:
            self._run()
        outputs = self.read(caught, patterns, tokens, key)
        shapes = [tuple(x.shape) for x in outputs]
        return self.paths(patterns), shapes

    def add(self, patterns: str | list[str], key: str = KEY) -> None:
        """Adds layers to read.

        Args:
            patterns: their paths, with ``*``, or the names ``maps``, ``maps@1/3``, ``maps@stride8`` and ``prelogits``.
            key: the setting that names the layers, for messages.

        Raises:
            UserError: a pattern that no layer matches.
        """
        for path in self.paths(patterns, key):
            if path in self._hooked:
                continue
            self._hooked.add(path)
            if path == PRELOGITS:
                classifier_of(self._model, key).register_forward_pre_hook(self._catch_input)
            else:
                self._layers[path].register_forward_hook(partial(self._catch, path))

    def paths(self, patterns: str | list[str], key: str = KEY) -> list[str]:
        """The paths of the layers that patterns name, each once: pattern by pattern, those of one in the model's order.

        They are found at the first call with these patterns and kept.

        Args:
            patterns: as of :meth:`add`.
            key: the setting that names the layers, for messages.

        Raises:
            UserError: a pattern that no layer matches.
        """
        wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        if wanted in self._paths:  # once, not in every step: it walks the whole model
            return self._paths[wanted]
        resolved = []
        for pattern in wanted:
            resolved.append(self._resolved(pattern, key))
        besides = [MAPS, PRELOGITS]
        paths = layer_paths(self._model, resolved, key, besides)
        self._paths[wanted] = paths
        return paths

    def _resolved(self, pattern: str, key: str) -> str:
        """The layer that ``maps``, ``maps@1/3`` or ``maps@stride8`` means; any other pattern is returned as it is.

        Raises:
            UserError: the model has no such map; ``key`` begins the message.
        """
        share = MAPS_AT.fullmatch(pattern)
        if share is not None:
            return self._map_at(int(share[1]), int(share[2]), key)
        stride = MAPS_OF_STRIDE.fullmatch(pattern)
        if stride is not None:
            return self._map_of_stride(int(stride[1]), key)
        if pattern == MAPS:
            return self._last_map(key)
        return pattern

    def _map_at(self, part: int, parts: int, key: str) -> str:
        """The layer after ``part`` of ``parts`` of timm's list of features, rounded up: of 12 blocks ``maps@1/3`` is the
        fourth. A ViT's map is read as its next block normalises it.

        Raises:
            UserError: timm lists no feature at that share; ``key`` begins the message.
        """
        count = len(self._features)
        place = max(1, math.ceil(count * part / parts))  # from 1
        if place > count:
            loss = key.removeprefix(f"{KEY}.").partition(".")[0]
            raise UserError(
                f"{key}: timm lists {count} features of {name_of(self._model)}, so 'maps@{part}/{parts}' names none: "
                f"name a layer, or leave its loss out (model.distill_losses.{loss}.weight=0)"
            )
        layer = self._features[place - 1]["module"]
        normed = f"blocks.{place}.norm1"
        if layer == f"blocks.{place - 1}" and normed in self._layers:
            return normed
        return layer

    def _map_of_stride(self, stride: int, key: str) -> str:
        """The last layer whose map has one position for ``stride`` pixels a side (:meth:`_layer_by_stride`).

        Raises:
            UserError: no layer has such a map; ``key`` begins the message.
        """
        layers = self._layer_by_stride()
        if stride not in layers:
            height, width = self._size
            maps = ", ".join(f"maps@stride{each}" for each in sorted(layers)) or "none"
            raise UserError(
                f"{key}: no layer of {name_of(self._model)} gives maps@stride{stride}, one position for {stride}x{stride} "
                f"pixels of a {height}x{width} picture; it has {maps}"
            )
        return layers[stride]

    def _layer_by_stride(self) -> dict[int, str]:
        """By stride, the last layer with such a map in timm's list of features.

        For a model that timm has not built a forward shows the maps; of the layers of one stride it is the last of the
        outermost.
        """
        if self._features:
            return {feature["reduction"]: feature["module"] for feature in self._features}
        height, width = self._size
        layers: dict[int, str] = {}
        for path, output in self._outputs().items():
            if output.ndim != 4:
                continue
            rows, columns = (
                output.shape[1:3] if self._is_channels_last(output) else output.shape[2:]
            )
            stride = height // rows
            is_whole = (rows * stride, columns * stride) == (height, width)
            # the next stage's first layers may still have this stage's positions; they lie deeper
            is_outer = path.count(".") <= layers.get(stride, path).count(".")
            if is_whole and is_outer:
                layers[stride] = path
        return layers

    @torch.no_grad()
    def _outputs(self) -> dict[str, Tensor]:
        """The output of each layer in a forward in eval mode, by path, in the order in which the layers end.

        Of several outputs it is the first, of a layer that runs again the last. Of a model with timm's ``forward_features``
        layers after the end of that are left out.
        """
        forward_features: Any = getattr(self._model, "forward_features", None)

        def to_its_end(*args: object, **kwargs: object) -> object:
            """timm's ``forward_features``, after which nothing more is caught."""
            result = forward_features(*args, **kwargs)
            self._caught = None
            return result

        hooks = []
        for path, layer in self._layers.items():
            if path:  # all but the model itself
                hooks.append(layer.register_forward_hook(partial(self._catch, path)))
        try:
            if forward_features is not None:
                self._model.forward_features = to_its_end  # type: ignore[assignment]
            with evaluating(self._model), self as caught:
                self._run()
        finally:
            vars(self._model).pop("forward_features", None)
            for hook in hooks:
                hook.remove()
        return caught

    def _run_zeros(self) -> None:
        """A forward of two pictures of zeros."""
        self._model(next(self._model.parameters()).new_zeros(TRIAL, 3, *self._size))

    def _last_map(self, key: str) -> str:
        """The path of the outermost layer that gives a model's last map: the last one before the end of timm's
        ``forward_features``; of a model without that, the last map of more than one position.

        Args:
            key: the setting that names the layers, for messages.

        Raises:
            UserError: no layer gives a map.
        """
        is_timms = hasattr(self._model, "forward_features")
        maps = {}
        for path, output in self._outputs().items():
            is_pooled = output.ndim == 4 and output.shape[2:].numel() == 1
            if self._is_map(output) and (is_timms or not is_pooled):
                maps[path] = output
        if not maps:
            raise UserError(
                f"{key}: {name_of(self._model)} has no map before its classifier: name a layer"
            )
        # of the layers that give this very tensor the outermost; of equally deep ones the last
        *_, last_map = maps.values()
        paths = [path for path, x in maps.items() if x is last_map]
        return min(reversed(paths), key=lambda path: path.count("."))

    def _is_map(self, x: Tensor) -> bool:
        """Whether a layer's output has a value for each place of the picture: a map, or patch tokens."""
        if x.ndim != 3:
            return x.ndim == 4
        patches = x.shape[1] - self._prefix_tokens
        if patches < 2 or x.shape[2] < 2:
            return False
        return self._grid(patches) is not None

    def __enter__(self) -> dict[str, Tensor]:
        self._caught = {}
        return self._caught

    def __exit__(self, *_: object) -> None:
        self._caught = None

    # forward hooks: torch calls them while a model runs
    def _catch(self, path: str, _module: nn.Module, _inputs: object, output: object) -> None:
        """Hook: keeps a layer's output under its path while something catches; of several outputs the first.

        Of a layer that runs several times the last output stays.
        """
        if self._caught is None:
            return
        if isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, Tensor):
            self._caught.pop(path, None)  # so that it is the last one
            self._caught[path] = output

    def _catch_input(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._caught is not None:
            self._caught[PRELOGITS] = inputs[0]

    def read(
        self, caught: dict[str, Tensor], patterns: str | list[str], tokens: str, key: str = KEY
    ) -> list[Tensor]:
        """The layers' outputs in one form.

        Args:
            caught: filled by a forward.
            patterns: the layers, as they were added, or their paths.
            tokens: what is read of tokens: ``patch``, ``class`` or ``all``, see :class:`TapSpec`.
            key: the setting that names the layers, for messages.

        Returns:
            For each layer, in the order of :meth:`paths`: a map ``(N, C, H, W)``, vectors ``(N, D)``, or tokens
            ``(N, T, D)`` (with ``all``, or where the patches' tokens make no grid).

        Raises:
            UserError: a layer that the forward did not run, or one without the wanted token.
        """
        read = []
        for path in self.paths(patterns):
            problem = ""
            if path not in caught:
                problem = "gives nothing in a forward"
            elif caught[path].ndim == 3 and tokens == "class" and not self._prefix_tokens:
                problem = "has no class token (tokens=patch)"
            if problem:
                raise UserError(f"{key}: layer '{path}' of {name_of(self._model)} {problem}")
            read.append(self._form(caught[path], tokens))
        return read

    def _form(self, x: Tensor, tokens: str) -> Tensor:
        """One layer's output, ``(N, C, H, W)``, ``(N, H, W, C)``, ``(N, T, D)`` or ``(N, D)``, in the form of ``tokens``."""
        if x.ndim == 4:
            if self._is_channels_last(x):
                return x.permute(0, 3, 1, 2)
            return x
        if x.ndim != 3 or tokens == "all":
            return x
        if tokens == "class":
            return x[:, 0]
        # blocks may not have the class token, which joins later (CaiT)
        for skipped in (self._prefix_tokens, 0):
            grid = self._grid(x.shape[1] - skipped)
            if grid is not None:
                return x[:, skipped:].transpose(1, 2).unflatten(2, grid)
        return x

    def _grid(self, count: int) -> Size | None:
        """Rows and columns of ``count`` patches, as near to the picture's height / width as whole numbers are; None where
        these make no grid.
        """
        height = round(math.sqrt(max(count, 0) * self._size[0] / self._size[1]))
        width = count // max(height, 1)
        return (height, width) if height * width == count else None

    def _is_channels_last(self, x: Tensor) -> bool:
        """Whether a map ``x`` of four axes is ``(N, H, W, C)``, and not ``(N, C, H, W)``.

        It is read in the order in which its height / width is nearer to the picture's; where both are equally near, timm's
        ``output_fmt`` of the model decides.
        """
        height, width = self._size
        first, second, third = x.shape[1:]
        of_picture = math.log(height / width)
        if_first = math.log(second / third)
        if_last = math.log(first / second)
        channels_first = abs(if_first - of_picture)
        channels_last = abs(if_last - of_picture)
        if abs(channels_first - channels_last) < 0.05:  # within 5 %
            return getattr(self._model, "output_fmt", "NCHW") == "NHWC"
        return channels_last < channels_first


def _matches(path: str, pattern: str) -> bool:
    """Whether a layer's path has as many names as a pattern, and each fits (``blocks.*.mlp``)."""
    names = path.split(".")
    patterns = pattern.split(".")
    if len(names) != len(patterns):
        return False
    return all(fnmatchcase(name, one) for name, one in zip(names, patterns, strict=True))


def classifier_of(model: nn.Module, key: str) -> nn.Module:
    """The last layer of a model: timm's ``get_classifier()``, or a module named ``head``, ``fc`` or ``classifier``.

    Of several classifiers (a distilled ViT's two) it is the first. It need not be linear.

    Raises:
        UserError: none of these is there.
    """
    classifier: Any = _last_layer(model)
    if classifier is None:
        raise UserError(
            f"{key}: {type(model).__name__} has no get_classifier() and no head, fc or classifier, so "
            "'prelogits' is unknown: name a layer"
        )
    if isinstance(classifier, (tuple, list, nn.ModuleList)):
        return classifier[0]
    return classifier


def linear_classifier(model: nn.Module) -> nn.Linear | None:
    """The last layer of a model, as :func:`classifier_of` finds it; None where it is not one linear layer."""
    classifier = _last_layer(model)
    return classifier if isinstance(classifier, nn.Linear) else None


def single_classifier(model: nn.Module) -> nn.Module | None:
    """The last layer of a model, as :func:`classifier_of` finds it; None where it has no weight of its own, or there are
    several.
    """
    classifier: Any = _last_layer(model)
    has_weight = isinstance(getattr(classifier, "weight", None), Tensor)
    return classifier if has_weight else None


def _last_layer(model: nn.Module) -> object:
    """What a model classifies by: a layer, several in a tuple or list; None where it has no usual name."""
    get_classifier = getattr(model, "get_classifier", None)
    if get_classifier is not None:
        return get_classifier()
    for name in ("head", "fc", "classifier"):
        layer = getattr(model, name, None)
        if isinstance(layer, nn.Module):
            return layer
    return None

"""Finds one model's tensors in a weights file, and brings them under that model's names.

Nothing is decided by a list of names. Every place in the file that may hold the model is tried: as it is, under the
names of other libraries, and through the filter that timm keeps beside the architecture. The place from which the
most tensors have the model's names *and* shapes is taken. Two models that fit equally well are a question to the user.

``state`` holds the file's tensors by name below a place, ``expected`` the model's own by name; ``img_size`` is height
and width of the model's input in pixels.
"""

import contextlib
import inspect
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from kd.errors import UserError
from kd.models.foreign import foreign_models

COUNTER = ".num_batches_tracked"
"""A counter of BatchNorm, which reads it without a momentum alone; many files lack it."""

DEEPEST = 12
"""The most parts of a name that a prefix has."""

PRETRAINING = ("decoder_", "mask_token")
"""First letters of masked autoencoders' tensors that no classifier has."""

AVERAGES = {"state_dict_ema": "state_dict", "model_ema": "model"}
"""Names below which timm's trainer saves moving averages, and of the weights that they are averages of."""

Size = Sequence[int]


@dataclass
class FileModel:
    """One model of a file, under the names of the wanted one."""

    prefix: str
    """What is before its names in the file, with the last dot; "" where they begin at the top."""
    state: dict[str, Tensor]
    """Its tensors under the wanted model's names."""
    library: str = ""
    """The library whose names were replaced."""
    same_shape: int = 0
    """How many of the wanted model's tensors it has with their shapes."""
    same_name: int = 0
    """How many of them it has with any shape."""
    rivals: list[str] = field(default_factory=list)
    """The prefixes of other models in the file that were passed over."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """The higher, the better it fits: equal shapes, equal names, few tensors that the wanted model lacks."""
        return self.same_shape, self.same_name, self.same_name - len(self.state)


def choose_layout(
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    img_size: Size | None,
    part: str | None,
    name: str,
    key: str,
) -> FileModel:
    """The place in a file whose tensors fit the model best.

    Args:
        tensors: all of the file's, by dotted name (:func:`kd.models.weights.tensors_in`).
        model: the wanted one.
        img_size: height and width of the input that the file names, or None.
        part: names that must be among those before the model's (``teacher``, ``net.encoder``); ``.``: the shortest
            prefix of all.
        name: of the file, for messages.
        key: the setting that names the file; ``part`` is from ``<key>_key``.

    Returns:
        The best place, also where none fits well: the caller compares its tensors with the model's. Without any place: all
        tensors under their own names.

    Raises:
        UserError: two models fit equally well, or nothing is below ``part``.
    """
    # a model fits where half of the wanted tensors have their shapes
    layouts = list(_layouts(tensors, model, img_size))
    half = _expected_count(model) / 2
    candidates = [layout for layout in layouts if layout.same_shape >= half] or layouts
    if part is not None:
        candidates = _below_part(candidates, part, f"{name} ({key}_key)")
    best = max(candidates, key=lambda layout: layout.rank, default=FileModel("", dict(tensors)))

    # other models, with other weights; a moving average is preferred to the weights that it is of
    others = []
    for layout in candidates:
        if layout.same_shape >= half and not _same_weights(layout, best):
            others.append(layout)
    replaced = [layout for layout in others if _is_plain_of(layout.prefix, best.prefix)]
    equal = []
    for layout in others:
        if layout.same_shape == best.same_shape and layout not in replaced:
            equal.append(layout)
    if len(equal) == 1 and _is_plain_of(best.prefix, equal[0].prefix):
        replaced = [best]
        best = equal.pop()
    if equal:
        shown = _distinct_prefixes([best, *equal])
        listed = f"{', '.join(shown[:-1])} and {shown[-1]}"
        raise UserError(
            f"{name} holds {len(shown)} models that fit equally well, below {listed}; "
            f"{key}_key=NAME says which, for example {key}_key={shown[0].strip(chr(39))}"
        )
    best.rivals = [layout.prefix for layout in [*others, *replaced] if layout is not best]

    # what masked autoencoders have beside a classifier is left out
    expected = model.state_dict()
    for tensor_name in list(best.state):
        if tensor_name.startswith(PRETRAINING) and tensor_name not in expected:
            del best.state[tensor_name]
    return best


def _expected_count(model: nn.Module) -> int:
    """The number of a model's tensors without BatchNorm's counters."""
    return sum(not name.endswith(COUNTER) for name in model.state_dict())


def _below_part(layouts: list[FileModel], part: str, name: str) -> list[FileModel]:
    """The layouts whose prefix has the path ``part`` in it; ".": those with the shortest prefix.

    ``name`` begins the user's error where there is none.
    """
    if part == ".":
        shortest = min((len(layout.prefix) for layout in layouts), default=0)
        return [layout for layout in layouts if len(layout.prefix) == shortest]
    chosen = [layout for layout in layouts if f".{part}." in f".{layout.prefix}"]
    if not chosen:
        prefixes = sorted({layout.prefix[:-1] or "." for layout in layouts})
        raise UserError(
            f"{name}: no model below '{part}'; models are below: {', '.join(prefixes) or 'nothing'}"
        )
    return chosen


def _same_weights(one: FileModel, other: FileModel) -> bool:
    """Whether all tensors that both have are equal: then they are one model, found at two places or in two ways."""
    for name in one.state.keys() & other.state.keys():
        first = one.state[name]
        second = other.state[name]
        if first is second:
            continue
        if first.shape != second.shape or not torch.equal(first, second):
            return False
    return True


def _is_plain_of(plain: str, average: str) -> bool:
    """Whether ``average`` is the prefix of a moving average, and ``plain`` that of the weights that it is an average of, by
    the names of timm's trainer.
    """
    first = average.split(".")[0]
    return first in AVERAGES and plain.split(".")[0] == AVERAGES[first]


def _distinct_prefixes(layouts: Sequence[FileModel]) -> list[str]:
    """The prefixes in quotes, for a message, without the names that all begin with; ``'.'`` where nothing is left."""
    prefixes = [layout.prefix.split(".")[:-1] for layout in layouts]
    while all(prefixes) and len({names[0] for names in prefixes}) == 1:
        prefixes = [names[1:] for names in prefixes]
    quoted = []
    for names in prefixes:
        shown = ".".join(names) or "."
        quoted.append(f"'{shown}'")
    return quoted


# -- every place and every way --------


def _layouts(
    tensors: Mapping[str, Tensor], model: nn.Module, img_size: Size | None
) -> Iterator[FileModel]:
    """Every way to read the file as the model: each place, in each of its variants, and under other libraries' names.

    Where places have all of the model's names and shapes, these alone are tried; else all that have at least a third as
    many tensors as the model.

    Args:
        tensors: of the file, by name.
        model: that they are for.
        img_size: height and width of the input that the file names; None: it names none.
    """
    expected = {}
    for name, value in model.state_dict().items():
        if not name.endswith(COUNTER):
            expected[name] = value

    # how many tensors each prefix has, and how many with the model's names and shapes
    below = Counter[str]()
    matching = Counter[str]()
    for name, value in tensors.items():
        for prefix, rest in _splits(name):
            below[prefix] += 1
            matching[prefix] += rest in expected and expected[rest].shape == value.shape
    exact = {prefix for prefix, count in matching.items() if count == len(expected)}
    prefixes = exact
    if not exact:
        prefixes = {prefix for prefix, count in below.items() if 3 * count >= len(expected)}

    for prefix in sorted(prefixes):
        state = {}
        for name, value in tensors.items():
            if name.startswith(prefix):
                state[name.removeprefix(prefix)] = value
        for variant in _variants(state, expected):
            yield _fitted(prefix, variant, "", model, expected, img_size)
    if not exact:
        for prefix, state, library in foreign_models(tensors):
            yield _fitted(prefix, state, library, model, expected, img_size)


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """A tensor's name as (prefix, rest): ``a.b.c`` -> ``("", "a.b.c")``, ``("a.", "b.c")``, ``("a.b.", "c")``."""
    yield "", name
    place = name.find(".") + 1
    for _ in range(DEEPEST):
        if not place:
            return
        yield name[:place], name[place:]
        place = name.find(".", place) + 1


def _variants(
    state: dict[str, Tensor], expected: Mapping[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """The tensors of one place as they are, and as filters of timm and models of builders expect them.

    Args:
        state: tensors of the file, by name below that place.
        expected: the model's own, by name.
    """
    yield state
    # a builder's module, trained outside of kd
    if all(name.startswith("model.") for name in expected):
        yield _below_prefix("model.", state)
    # timm's filter recognises DINOv2's layout by its mask token
    if "register_tokens" in state and "mask_token" not in state:
        registers = state["register_tokens"]
        yield {**state, "mask_token": registers}
    # CLIP's picture tower alone: timm's filter reads it as a part of CLIP
    if "class_embedding" in state:
        yield _below_prefix("visual.", state)


def _below_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


def _fitted(
    prefix: str,
    state: dict[str, Tensor],
    library: str,
    model: nn.Module,
    expected: Mapping[str, Tensor],
    img_size: Size | None,
) -> FileModel:
    """The state through the architecture's filter, and how well it fits: how many names and shapes are the model's.

    Args:
        prefix: of the place in the file.
        state: see the module.
        library: whose names were brought into timm's; "": timm's own.
        model: that they are for.
        expected: see the module.
        img_size: likewise.
    """
    filtered = _in_the_models_layout(state, model, img_size)
    same_names = 0
    same_shapes = 0
    for name, value in expected.items():
        if name in filtered:
            same_names += 1
            same_shapes += filtered[name].shape == value.shape
    return FileModel(prefix, filtered, library, same_shapes, same_names)


def _in_the_models_layout(
    state: dict[str, Tensor], model: nn.Module, img_size: Size | None
) -> dict[str, Tensor]:
    """The state under the model's names, by the architecture's own checkpoint filter; a plain timm file becomes a dense
    model's backbone.

    Args:
        state: see the module.
        model: that it is for.
        img_size: height and width of the input that the file names; None: it names none.
    """
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        return _filtered(state, model, img_size)

    of_backbone = {}
    of_head = {}
    for name, value in state.items():
        if name.startswith("backbone."):
            of_backbone[name.removeprefix("backbone.")] = value
        else:
            of_head[name] = value
    if of_backbone:  # a dense model's file
        return {**_below_backbone(_filtered(of_backbone, backbone, img_size)), **of_head}

    # a file for classification holds more: layers after the last level, a classifier
    filtered = _filtered(state, backbone, img_size)
    wanted = backbone.state_dict()
    taken = {name: value for name, value in filtered.items() if name in wanted}
    return _below_backbone(taken)


def _below_backbone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A backbone's tensors under the names that they have in a dense model."""
    return {f"backbone.{name}": value for name, value in state.items()}


def _filtered(
    state: dict[str, Tensor], model: nn.Module, img_size: Size | None
) -> dict[str, Tensor]:
    """The state through timm's filter for foreign layouts and other position embeddings, which timm keeps beside the
    class. A state that is the model's exactly, or that the filter can't read, stays as it is.

    Arguments and result are those of :func:`_in_the_models_layout`.
    """
    state = _with_positions(state, model, img_size)
    convert: Callable[..., dict[str, Tensor]] | None = getattr(
        sys.modules[type(model).__module__], "checkpoint_filter_fn", None
    )
    if convert is None or _is_exact(state, model):
        return state
    options: dict[str, Any] = {}
    if "adapt_layer_scale" in inspect.signature(convert).parameters:
        # DeiT III's authors write gamma_1 for ls1.gamma
        options["adapt_layer_scale"] = any("gamma_" in name for name in state)
    copied = dict(state)  # some filters take tensors out
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some print what they try
            return convert(copied, model, **options)
    except Exception:  # another architecture's file: comparing names and shapes gives the message
        return state


def _is_exact(state: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether the state has the model's names, no others, and the model's shapes."""
    return _shapes_of(state) == _shapes_of(model.state_dict())


def _shapes_of(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes of a state by name, without the norms' counters."""
    return {name: value.shape for name, value in state.items() if not name.endswith(COUNTER)}


# -- position embeddings --------


def _with_positions(
    state: dict[str, Tensor], model: nn.Module, img_size: Size | None
) -> dict[str, Tensor]:
    """Resamples position embeddings from the grid that the file names, which need not be square as timm's filter takes it;
    others stay as they are. Arguments as of :func:`_in_the_models_layout`.
    """
    model_grid: Any = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    positions = state.get("pos_embed")  # (1, L, D), those of the class token and the like first
    patch = state.get("patch_embed.proj.weight")  # (D, 3, patch height, patch width)
    if img_size is None or model_grid is None or positions is None or patch is None:
        return state
    if positions.ndim != 3 or patch.ndim != 4:
        return state
    prefix_positions = 0
    if not getattr(model, "no_embed_class", False):
        prefix_positions = int(getattr(model, "num_prefix_tokens", 0))
    grid = [side // patch_side for side, patch_side in zip(img_size, patch.shape[-2:], strict=True)]
    patches = positions.shape[1] - prefix_positions
    if patches != grid[0] * grid[1] or grid == list(
        model_grid
    ):  # another layout: the filter knows it
        return state
    resampled = resample_abs_pos_embed(
        positions, list(model_grid), grid, num_prefix_tokens=prefix_positions
    )
    return {**state, "pos_embed": resampled}

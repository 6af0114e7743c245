"""Finds one model's tensors in a weights file, and brings them under that model's names.

Nothing is decided by a list of names. Every place in the file that may hold the model is tried: as it is, under the
names of other libraries, and through the filter that timm keeps beside the architecture. The place from which the
most tensors have the model's names *and* shapes is taken. Two models that fit equally well are a question to the user.

``state`` holds the file's tensors by name below a place, ``expected`` the model's own by name; ``img_size`` is height
and width of the model's input in pixels.
"""

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kd.errors import UserError
from kd.models.foreign import foreign_models
from kd.models.preprocess import built_size

COUNTER = ".num_batches_tracked"
"""A counter of BatchNorm, which reads it without a momentum alone; many files lack it."""

DEEPEST = 12
"""The most parts of a name that a prefix has."""

PRETRAINING = ("decoder_", "mask_token")
"""First letters of masked autoencoders' tensors that no classifier has."""

AVERAGES = {"state_dict_ema": "state_dict", "model_ema": "model"}
"""Names below which timm's trainer saves moving averages, and of the weights that they are averages of."""

State = dict[str, Tensor]
Size = tuple[int, int]


@dataclass
class FileModel:
    """One model of a file, under the names of the wanted one."""

    prefix: str
    """What is before its names in the file, with the last dot; "" where they begin at the top."""
    state: State
    """Its tensors under the wanted model's names."""
    library: str = ""
    """The library whose names were replaced."""
    same_shape: int = 0
    """How many of the wanted model's tensors it has with their shapes."""
    same_name: int = 0
    """How many of them it has with any shape."""

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """The higher, the better it fits: equal shapes, a moving average, equal names, few tensors that the model
        lacks.
        """
        is_average = self.prefix.split(".")[0] in AVERAGES
        return self.same_shape, is_average, self.same_name, -len(self.state)


def choose_layout(
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    img_size: Size | None,
    part: str | None,
    place: str,
    key: str,
) -> FileModel:
    """The place in a file whose tensors fit the model best.

    Args:
        tensors: all of the file's, by dotted name (:func:`kd.models.weights.tensors_in`).
        model: the wanted one.
        img_size: height and width of the input that the file names, or None.
        part: names that must be among those before the model's (``teacher``, ``net.encoder``); ``.``: the shortest
            prefix of all.
        place: setting and file, for messages.
        key: the setting that names the file; ``part`` is from ``<key>_key``.

    Returns:
        The best place, also where none fits well: the caller compares its tensors with the model's. Without any place: all
        tensors under their own names.

    Raises:
        UserError: two models fit equally well, or nothing is below ``part``. Weights and their moving average, or equal
            weights at two places, count as one model.
    """
    # a model fits where half of the wanted tensors have their shapes
    state = model.state_dict()
    expected = {name: value for name, value in state.items() if not name.endswith(COUNTER)}
    layouts = list(_layouts(tensors, expected, model, img_size))
    fitting = [layout for layout in layouts if 2 * layout.same_shape >= len(expected)]
    candidates = fitting or layouts
    if part is not None:
        candidates = _below_part(candidates, part, f"{place} ({key}_key)")
    best = max(candidates, key=lambda layout: layout.rank, default=FileModel("", dict(tensors)))

    equal = [best.prefix]
    for layout in candidates if fitting else ():
        fits_as_well = layout.same_shape == best.same_shape
        if fits_as_well and not _is_average_of(best, layout) and not _same_weights(layout, best):
            equal.append(layout.prefix)
    if len(equal) > 1:
        places = [prefix[:-1] or "." for prefix in equal]
        raise UserError(
            f"{place} holds {len(places)} models that fit equally well, below {', '.join(places)}; "
            f"{key}_key=NAME says which, for example {key}_key={places[0]}"
        )

    # what masked autoencoders have beside a classifier is left out
    for tensor_name in list(best.state):
        if tensor_name.startswith(PRETRAINING) and tensor_name not in expected:
            del best.state[tensor_name]
    return best


def _below_part(layouts: list[FileModel], part: str, name: str) -> list[FileModel]:
    """The layouts whose prefix has the path ``part`` in it; ".": those with the shortest prefix.

    ``name`` begins the user's error where no layout is left.
    """
    if part == ".":
        shortest = min((len(layout.prefix) for layout in layouts), default=0)
        return [layout for layout in layouts if len(layout.prefix) == shortest]
    chosen = []
    for layout in layouts:
        if f".{part}." in f".{layout.prefix}":
            chosen.append(layout)
    if not chosen:
        places = sorted({layout.prefix[:-1] or "." for layout in layouts})
        below = ", ".join(places) or "nothing"
        raise UserError(f"{name}: no model below '{part}'; models are below: {below}")
    return chosen


def _same_weights(one: FileModel, other: FileModel) -> bool:
    """Whether all tensors that both have are equal: then they are one model, found at two places or in two ways."""
    for name in one.state.keys() & other.state.keys():
        first = one.state[name]
        second = other.state[name]
        if first is not second and not torch.equal(first, second):
            return False
    return True


def _is_average_of(average: FileModel, plain: FileModel) -> bool:
    """Whether ``average`` is the moving average of ``plain``, by the names below which timm's trainer saves both."""
    return AVERAGES.get(average.prefix.split(".")[0]) == plain.prefix.split(".")[0]


# -- every place and every way --------


def places(tensors: Mapping[str, Tensor], least: float) -> Iterator[tuple[str, State, str]]:
    """Every part of a file that may be a model: what is below a prefix of ``least`` tensors and more, and each ViT of
    another library.

    Args:
        tensors: all of the file's, by dotted name.
        least: the fewest tensors of a model.

    Yields:
        The prefix, with its last dot or "", the tensors by the rest of their names, and the library whose names were
        replaced by timm's; "" for none.
    """
    below = Counter(prefix for name in tensors for prefix in prefixes(name))
    for prefix in sorted(below):
        if below[prefix] >= least:
            yield prefix, without_prefix(tensors, prefix), ""
    yield from foreign_models(tensors)


def _layouts(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    model: nn.Module,
    img_size: Size | None,
) -> Iterator[FileModel]:
    """Every way to read the file as the model: each place of a third of the model's tensors and more, in each of its
    variants.
    """
    least = len(expected) / 3
    for prefix, state, library in places(tensors, least):
        for variant in _variants(state, expected):
            own = _in_the_models_layout(variant, model, img_size)
            same_name = 0
            same_shape = 0
            for name in own.keys() & expected.keys():
                same_name += 1
                same_shape += own[name].shape == expected[name].shape
            yield FileModel(
                prefix,
                own,
                library,
                same_shape,
                same_name,
            )


def _variants(state: State, expected: Mapping[str, Tensor]) -> Iterator[State]:
    """The tensors of one place as they are, and as filters of timm and models of builders expect them."""
    yield state
    # a builder's module, trained outside of kd
    if all(name.startswith("model.") for name in expected):
        yield _with_prefix("model.", state)
    # timm's filter recognises DINOv2's layout by its mask token
    if "register_tokens" in state and "mask_token" not in state:
        yield {**state, "mask_token": state["register_tokens"]}
    # CLIP's picture tower alone: timm's filter reads it as a part of CLIP
    if "class_embedding" in state:
        yield _with_prefix("visual.", state)


def _with_prefix(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {f"{prefix}{name}": value for name, value in state.items()}


def prefixes(name: str) -> Iterator[str]:
    """Each beginning of a tensor's name that may be a place's: "", or with its last dot.

    >>> list(prefixes("net.head.bias"))
    ['', 'net.', 'net.head.']
    """
    parts = name.split(".", DEEPEST)
    for depth in range(len(parts)):
        yield name.removesuffix(".".join(parts[depth:]))


def without_prefix(state: Mapping[str, Tensor], prefix: str) -> State:
    """The tensors below a prefix, by the rest of their names."""
    inner = {}
    for name, value in state.items():
        if name.startswith(prefix):
            inner[name.removeprefix(prefix)] = value
    return inner


def _in_the_models_layout(state: State, model: nn.Module, img_size: Size | None) -> State:
    """The state under the model's names, by the architecture's own checkpoint filter; a plain timm file becomes a dense
    model's backbone.
    """
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        return _filtered(state, model, img_size)
    of_backbone = without_prefix(state, "backbone.")
    if of_backbone:  # a dense model's file
        filtered = _filtered(of_backbone, backbone, img_size)
        own = _with_prefix("backbone.", filtered)
        for name, value in state.items():
            if not name.startswith("backbone."):
                own[name] = value
        return own
    # a file for classification holds more: layers after the last level, a classifier
    filtered = _filtered(state, backbone, img_size)
    names = backbone.state_dict().keys()
    taken = {name: value for name, value in filtered.items() if name in names}
    return _with_prefix("backbone.", taken)


def _filtered(state: State, model: nn.Module, img_size: Size | None) -> State:
    """The state through the filter that timm keeps beside the model's class, for foreign layouts and position embeddings of
    another size. A state that is the model's exactly, or that the filter can't read, stays as it is.
    """
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    options: dict[str, Any] = {}
    if "adapt_layer_scale" in getattr(convert, "__annotations__", ()):
        # DeiT III's authors write gamma_1 for ls1.gamma
        options["adapt_layer_scale"] = any("gamma_" in name for name in state)
    try:
        state = _without_foreign_grid(state, model, img_size)
        own = model.state_dict()
        is_exact = state.keys() == own.keys() and all(state[n].shape == own[n].shape for n in own)
        if convert is None or is_exact:
            return state
        with contextlib.redirect_stdout(io.StringIO()):  # some print what they try
            return convert(dict(state), model, **options)  # some take tensors out
    except Exception:  # another architecture's file: comparing names and shapes gives the message
        return state


def _without_foreign_grid(state: State, model: nn.Module, img_size: Size | None) -> State:
    """The state without a ViT's position embeddings, where the file's pictures are not square and the model's have another
    size; else as it is.

    timm's filter would take the file's patches for a square grid. The model then lacks these tensors, which is reported.
    """
    of_file = img_size or (0, 0)
    of_model = built_size(model)
    if of_file[0] == of_file[1]:
        return state
    if of_model is None or of_model == of_file:
        return state
    without = dict(state)
    without.pop("pos_embed", None)
    return without
